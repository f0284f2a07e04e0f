"""An answer is right where it has the value that was asked for, however it is written."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from meshwright.runtime.environment.answers import exact_match, maths_answer
from tests.runtime.environment.maths_pairs import RIGHT, WRONG
from tests.runtime.environment.samples import sample


def paid(response: str, answer: str) -> float:
    (found,) = maths_answer([sample(response, answer)])
    return found


def test_an_exact_match_differs_in_blanks_around_it_alone() -> None:
    assert exact_match([sample(" yes\n", "yes"), sample("Yes", "yes"), sample("", None)]) == [1, 0, 1]


def test_every_right_answer_of_the_table_is_paid_and_no_wrong_one() -> None:
    """As it is in a box, and behind ####; the table is made by hand and has more than 150 pairs."""
    assert len(RIGHT) > 100
    assert len(WRONG) > 90
    for form in ("so \\boxed{%s}, not 7", "work: 3 + 4\n#### %s\nmore"):
        assert [pair for pair in RIGHT if not paid(form % pair[0], pair[1])] == []
        assert [pair for pair in WRONG if paid(form % pair[0], pair[1])] == []


def test_an_answer_equals_itself_and_what_equals_it() -> None:
    for one, other in RIGHT:
        assert paid(f"\\boxed{{{one}}}", one), one
        assert paid(f"\\boxed{{{other}}}", one), (other, one)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so it is 42.", "42"),
        ("first 3, then 42", "42"),
        (r"\boxed{42}, not 7", "42"),
        (r"\boxed{41}, or rather \boxed{42}", "42"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}"),
        ("#### 1,234\nmore", "1234"),
        ("#### $18", "work #### 18"),
        ("50%", "50"),
        ("it is 3/6", "1/2"),
        ("it is 1 1/2", "3/2"),
        ("-7", "-7.0"),
        (".5", "1/2"),
        (r"it is $\sqrt{2}$.", r"\sqrt{2}"),
        (r"it is $x=\frac{1}{2}$.", "0.5"),
        ("the point is (1,2).", "(1, 2)"),
        ("**42**", "42"),
        ("10-7=3", "3"),
        ("10-7", "7"),
    ],
)
def test_the_last_answer_is_right_where_it_has_the_value(response: str, answer: str) -> None:
    assert paid(response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("", "42"),
        ("42, or rather 43", "42"),
        (r"\boxed{", "42"),
        (r"the answer is \boxed{42", "42"),
        (r"\boxed{x+1}", "x+2"),
        ("no number", "no number"),
        ("it is 1 1/2", "1/2"),
        (r"it is $\sqrt{2}$.", "2"),
        (r"it is $\frac{1}{2}$.", "2"),
        ("the point is (1,2).", "2"),
        ("the point is (1,2).", "12"),
        ("it is 1,2", "12"),
        ("10-7", "-7"),
    ],
)
def test_any_other_answer_is_wrong(response: str, answer: str) -> None:
    assert paid(response, answer) == 0.0


HOSTILE = {
    "a division by nothing": "1/0",
    "an exponent without end": "1e999999999",
    "a tower of powers": "9^{9^{9^{9^9}}}",
    "powers of powers": "((((99^99)^99)^99)^99)",
    "a long number": "9" * 10**5,
    "a long list": "1," * 10**5 + "1",
    "deep braces": "{" * 5000 + "1" + "}" * 5000,
    "deep marks": "(" * 5000 + "1" + ")" * 5000,
    "many letters": "(a+b+c+x+y+z+k+m+n)^{99}",
    "many products": "(a+b+c+x+y+z)" * 20,
    "many roots": r"\sqrt{2}+" * 25 + "1",
    "a large root": r"\sqrt{" + "9" * 190 + "}",
    "roots of roots": r"\sqrt{" * 60 + "2" + "}" * 60,
    "fractions of fractions": r"\frac{1}{" * 30 + "2" + "}" * 30,
    "units": r"\text{a} " * 3000,
    "blanks": "1" + " " * 10**5 + "2",
    "backslashes": "\\" * 10**5,
    "commas": "," * 10**5,
    "other digits": "\u0663\u0664 \u00bd \u2460",
    "nothing": "\x00",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("form", [r"\boxed{%s}", "%s", r"\boxed{%s"])
def test_no_answer_takes_long_or_is_right_by_being_odd(text: str, form: str) -> None:
    start = time.process_time()
    assert paid(form % text, "42") == 0.0
    assert paid(r"\boxed{42}", text) == 0.0
    assert time.process_time() - start < 2.0


def test_what_reads_answers_loads_no_algebra_system() -> None:
    code = "import sys, meshwright.runtime.environment.answers; print({'sympy', 'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
