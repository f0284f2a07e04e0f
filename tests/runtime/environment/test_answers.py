"""An answer is right where it has the value that was asked for, however it is written."""

from __future__ import annotations

import pytest

from meshwright.runtime.environment.answers import exact_match, maths_answer
from tests.runtime.environment.samples import sample


def test_an_exact_match_differs_in_blanks_around_it_alone() -> None:
    assert exact_match([sample(" yes\n", "yes"), sample("Yes", "yes"), sample("", None)]) == [1, 0, 1]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so it is 42.", "42"),
        ("first 3, then 42", "42"),
        (r"\boxed{42}, not 7", "42"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\dfrac{-3}{4}}", "-3/4"),
        (r"\boxed{\text{east}}", "East"),
        (r"\boxed{x^{2}+1}", "x^{2} + 1"),
        ("#### 1,234\nmore", "1234"),
        ("#### $18", "work #### 18"),
        ("50%", "50"),
        ("it is 3/6", "1/2"),
        ("-7", "-7.0"),
        (".5", "1/2"),
    ],
)
def test_the_last_answer_is_right_where_it_has_the_value(response: str, answer: str) -> None:
    assert maths_answer([sample(response, answer)]) == [1.0]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("", "42"),
        ("42, or rather 43", "42"),
        (r"\boxed{", "42"),
        (r"\boxed{1/0}", "42"),
        (r"\boxed{1e999999999}", "42"),
        (r"\boxed{" + "9" * 10**5 + "}", "42"),
        (r"\boxed{x+1}", "x+2"),
        ("no number", "no number"),
    ],
)
def test_any_other_answer_is_wrong_and_none_takes_long(response: str, answer: str) -> None:
    assert maths_answer([sample(response, answer)]) == [0.0]
