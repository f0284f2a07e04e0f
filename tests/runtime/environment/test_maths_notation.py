"""The grammar of answers: which parts a text has, and what has no value."""

from __future__ import annotations

from fractions import Fraction

import pytest

from meshwright.runtime.environment.algebra import NoValueError, Value
from meshwright.runtime.environment.maths_notation import MOST_CHARACTERS, Several, are_equal, read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 1/2", "3/2"),
        (r"\frac12", "1/2"),
        (r"\frac123", None),
        ("1,234.5", "2469/2"),
        ("(2)(3)", "6"),
        ("2^-1", "1/2"),
    ],
)
def test_a_number_has_one_reading(text: str, value: str | None) -> None:
    if value is None:
        with pytest.raises(NoValueError):
            read(text)
        return
    found = read(text)
    assert isinstance(found, Value)
    assert found.rational == Fraction(value)


@pytest.mark.parametrize(
    ("text", "marks", "count"),
    [("(1,2)", "()", 2), ("[1,2)", "[)", 2), (r"\{1\}", "\\{\\}", 1), ("1,2,3", "", 3), ("(1,234)", "()", 2)],
)
def test_a_comma_parts(text: str, marks: str, count: int) -> None:
    found = read(text)
    assert isinstance(found, Several)
    assert (found.marks, len(found.parts)) == (marks, count)


def test_marks_around_one_value_are_none() -> None:
    assert are_equal(read("((7))"), read("7"))


@pytest.mark.parametrize("text", ["", "1 2", "(1", "1)", "1+", "^2", "east", r"\sin x", "1" * (MOST_CHARACTERS + 1)])
def test_what_is_not_of_the_grammar_has_no_value(text: str) -> None:
    with pytest.raises(NoValueError):
        read(text)


def test_the_order_of_a_set_and_of_a_bare_list_does_not_count() -> None:
    assert are_equal(read("1,2"), read("2,1"))
    assert are_equal(read(r"\{1,(2,3)\}"), read(r"\{(2,3),1\}"))
    assert not are_equal(read("(1,2)"), read("(2,1)"))
