"""The grammar of answers: which parts a text has, and what has no value."""

from __future__ import annotations

from fractions import Fraction

import pytest

from meshwright.runtime.environment.maths_notation import (
    MAX_CHARACTERS,
    AnswerList,
    NoValueError,
    Value,
    are_equal,
    parse_answer,
)


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
            parse_answer(text)
        return
    found = parse_answer(text)
    assert isinstance(found, Value)
    assert found.rational == Fraction(value)


@pytest.mark.parametrize(
    ("text", "marks", "count"),
    [("(1,2)", "()", 2), ("[1,2)", "[)", 2), (r"\{1\}", "\\{\\}", 1), ("1,2,3", "", 3), ("(1,234)", "()", 2)],
)
def test_a_comma_parts(text: str, marks: str, count: int) -> None:
    found = parse_answer(text)
    assert isinstance(found, AnswerList)
    assert (found.brackets, len(found.parts)) == (marks, count)


def test_marks_around_one_value_are_none() -> None:
    assert are_equal(parse_answer("((7))"), parse_answer("7"))


@pytest.mark.parametrize("text", ["", "1 2", "(1", "1)", "1+", "^2", "east", r"\sin x", "1" * (MAX_CHARACTERS + 1)])
def test_what_is_not_of_the_grammar_has_no_value(text: str) -> None:
    with pytest.raises(NoValueError):
        parse_answer(text)


def test_the_order_of_a_set_and_of_a_bare_list_does_not_count() -> None:
    assert are_equal(parse_answer("1,2"), parse_answer("2,1"))
    assert are_equal(parse_answer(r"\{1,(2,3)\}"), parse_answer(r"\{(2,3),1\}"))
    assert not are_equal(parse_answer("(1,2)"), parse_answer("(2,1)"))
