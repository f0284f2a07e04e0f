"""Reward functions that compare a response with the reference answer of its prompt: 1 if it is right, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.runtime.environment.maths_notation import MAX_CHARACTERS, NoValueError, are_equal, parse_answer
from meshwright.runtime.environment.samples import RewardSample

_NUMBER = re.compile(
    r"(?:(?<![\w)}])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[ ]\d+)?(?:\s*/\s*-?\d+)?|\.\d+)", re.ASCII
)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}(?:\^\{?\d\}?)?\s*$")
_CHOICE = re.compile(r"^\s*\(\s*([a-z])\s*\)\s*$")
_NAME_BEFORE = re.compile(r"^\s*(?:[a-zA-Z]|\\?[a-zA-Z]+\([a-zA-Z]\))\s*(?:=|\\in\b)")
_BOXED, _HASHES = "\\boxed{", "####"
_IGNORED_MARKUP = (
    "\\left",
    "\\right",
    "\\displaystyle",
    "\\!",
    "\\$",
    "$",
    "\\%",
    "%",
    "^{\\circ}",
    "^\\circ",
    "\\circ",
    "\\(",
    "\\)",
    "\\[",
    "\\]",
)
_REPLACEMENTS = {
    "\u2212": "-",
    "\u2013": "-",
    "\u00d7": "*",
    "\u00b7": "*",
    "\u221a": "\\sqrt",
    "\u03c0": "\\pi",
    "~": " ",
}
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\,|\{,\})(?=\d{3})")
"""A separator of thousands in LaTeX."""

_SPACE = re.compile(r"(?<!\\)\\[ ,;:]")
_SEARCHED_CHARACTERS = 20_000
"""Number of characters at the end of a response that are searched for its answer."""


def exact_match(samples: Sequence[RewardSample]) -> list[float]:
    """Score 1 if the response equals the reference answer, ignoring surrounding white space, else 0."""
    return [float(sample.response.strip() == (sample.answer or "").strip()) for sample in samples]


def maths_answer(samples: Sequence[RewardSample]) -> list[float]:
    r"""Score 1 if the final result of the response equals the reference answer, else 0.

    The final result is the content of the last \boxed{}, else the text after ####, else the last number with the
    formula around it. Results are equal if `maths_notation` gives them the same value, or, if it cannot read them, if
    their texts are the same without white space and markup. Units are compared if both have one.
    """
    return [float(_is_right(sample.response, sample.answer or "")) for sample in samples]


def _is_right(response: str, answer: str) -> bool:
    response = response[-_SEARCHED_CHARACTERS:]
    result, expected = _marked_answer(response), _marked_answer(answer)
    if result is None:
        result = _last_formula(response)
    expected = answer if expected is None else expected
    if not result.strip() or not expected.strip():
        return False
    return _equal(result, expected)


def _equal(result: str, expected: str) -> bool:
    """True if two extracted answers are equal."""
    if _normalised(result) == _normalised(expected):
        return True
    result_parts, expected_parts = _split_answer(result), _split_answer(expected)
    if (result_parts.unit and expected_parts.unit and result_parts.unit != expected_parts.unit) or (
        result_parts.name and expected_parts.name and result_parts.name != expected_parts.name
    ):
        return False
    try:
        return are_equal(parse_answer(result_parts.value), parse_answer(expected_parts.value))
    except NoValueError:
        return _normalised(result_parts.value) == _normalised(expected_parts.value)


def _marked_answer(text: str) -> str | None:
    """Return the marked answer of a text: None without a mark, empty if the mark is not closed."""
    if _BOXED in text:
        return _until_closing_brace(text[text.rindex(_BOXED) + len(_BOXED) :])
    if _HASHES in text:
        return text.rpartition(_HASHES)[2].strip().partition("\n")[0]
    return None


def _until_closing_brace(text: str) -> str:
    """Return the text up to the closing brace of a group whose opening brace precedes it; empty if there is none."""
    depth, escaped = 1, False
    for index, character in enumerate(text):
        if not escaped:
            depth += (character == "{") - (character == "}")
        escaped = character == "\\" and not escaped
        if not depth:
            return text[:index]
    return ""


def _last_formula(response: str) -> str:
    r"""Return the last number of a text, or the formula that contains it, such as \sqrt{2} for the 2."""
    numbers = list(_NUMBER.finditer(response))
    if not numbers:
        return ""
    number = numbers[-1]
    start, end = number.span()
    while start and not response[start - 1].isspace() and end - start < MAX_CHARACTERS:
        start -= 1
    while end < len(response) and not response[end].isspace() and end - start < MAX_CHARACTERS:
        end += 1
    formula = response[start:end].rstrip(".,;:!?*").rpartition("=")[2]
    if any(mark in formula for mark in "\\^([{"):
        try:
            parse_answer(_split_answer(formula).value)
            return formula
        except NoValueError:
            pass
    return number.group()


def _without_markup(text: str) -> str:
    text = _SPACE.sub(" ", _THIN_SPACE.sub("", text))
    for mark, replacement in _REPLACEMENTS.items():
        text = text.replace(mark, replacement)
    for mark in _IGNORED_MARKUP:
        text = text.replace(mark, "")
    return text.strip().rstrip(".").strip()


class _AnswerParts(NamedTuple):
    """An answer split into its value, the name before it ("x =") and its unit."""

    value: str
    name: str = ""
    unit: str = ""


def _split_answer(text: str) -> _AnswerParts:
    text, name, unit_text = _without_markup(text), "", ""
    if len(text) > MAX_CHARACTERS:
        return _AnswerParts(text)
    unit_match = _UNIT.search(text)
    if unit_match and text[: unit_match.start()].strip():
        text, unit_text = text[: unit_match.start()], _normalised(unit_match.group())
    if name_match := _NAME_BEFORE.match(text):
        text, name = text[name_match.end() :], _normalised(name_match.group())
    return _AnswerParts(text.strip(), name, unit_text)


def _normalised(text: str) -> str:
    """Return the text in lower case without markup and white space, except for spaces between two digits."""
    text = _CHOICE.sub(r"\1", _TEXT.sub(r"\1", _without_markup(text)).lower())
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
