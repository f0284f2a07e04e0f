"""Rewards that compare a response with the answer of its prompt: 1 where it is right, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.runtime.environment.algebra import NoValueError
from meshwright.runtime.environment.maths_notation import MOST_CHARACTERS, are_equal, read
from meshwright.runtime.environment.samples import RewardSample

_NUMBER = re.compile(
    r"(?:(?<![\w)}])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[ ]\d+)?(?:\s*/\s*-?\d+)?|\.\d+)", re.ASCII
)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}(?:\^\{?\d\}?)?\s*$")
_CHOICE = re.compile(r"^\s*\(\s*([a-z])\s*\)\s*$")
_NAMED = re.compile(r"^\s*(?:[a-zA-Z]|\\?[a-zA-Z]+\([a-zA-Z]\))\s*(?:=|\\in\b)")
_BOXED, _GIVEN = "\\boxed{", "####"
_IGNORED = (
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
_SAME = {
    "\u2212": "-",
    "\u2013": "-",
    "\u00d7": "*",
    "\u00b7": "*",
    "\u221a": "\\sqrt",
    "\u03c0": "\\pi",
    "~": " ",
}
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\,|\{,\})(?=\d{3})")
"""Parts thousands."""
_SPACE = re.compile(r"(?<!\\)\\[ ,;:]")
_MOST_SEARCHED = 20_000
"""Characters at the end of a response in which its answer is looked for."""


def exact_match(samples: Sequence[RewardSample]) -> list[float]:
    """Whether the response is the answer, but for blanks around it."""
    return [float(sample.response.strip() == (sample.answer or "").strip()) for sample in samples]


def maths_answer(samples: Sequence[RewardSample]) -> list[float]:
    r"""Whether what the response gives at last, in \boxed{}, behind #### or as its last number with the formula that it
    is part of, is the answer: has its value where `maths_notation` reads both, else letter by letter without blanks and
    markup. A tuple is no number, and a unit counts where both have one."""
    return [float(_is_right(sample.response, sample.answer or "")) for sample in samples]


def _is_right(response: str, answer: str) -> bool:
    response = response[-_MOST_SEARCHED:]
    given, wanted = _marked(response), _marked(answer)
    if given is None:
        given = _last_formula(response)
    wanted = answer if wanted is None else wanted
    if not given.strip() or not wanted.strip():
        return False
    return _are_same(given, wanted)


def _are_same(given: str, wanted: str) -> bool:
    """Whether two answers without their marks are one."""
    if _letters(given) == _letters(wanted):
        return True
    one, other = _parted(given), _parted(wanted)
    if (one.unit and other.unit and one.unit != other.unit) or (one.name and other.name and one.name != other.name):
        return False
    try:
        return are_equal(read(one.value), read(other.value))
    except NoValueError:
        return _letters(one.value) == _letters(other.value)


def _marked(text: str) -> str | None:
    """What a text marks as its answer, nothing where the mark does not end; None where it marks nothing."""
    if _BOXED in text:
        return _in_braces(text[text.rindex(_BOXED) + len(_BOXED) :])
    if _GIVEN in text:
        return text.rpartition(_GIVEN)[2].strip().partition("\n")[0]
    return None


def _in_braces(text: str) -> str:
    """Up to the brace that closes one before the text."""
    depth, escaped = 1, False
    for place, character in enumerate(text):
        if not escaped:
            depth += (character == "{") - (character == "}")
        escaped = character == "\\" and not escaped
        if not depth:
            return text[:place]
    return ""


def _last_formula(response: str) -> str:
    r"""The last number of a text, with what stands around it where that makes it another value: the 2 of \sqrt{2}."""
    numbers = list(_NUMBER.finditer(response))
    if not numbers:
        return ""
    found = numbers[-1]
    first, last = found.span()
    while first and not response[first - 1].isspace() and last - first < MOST_CHARACTERS:
        first -= 1
    while last < len(response) and not response[last].isspace() and last - first < MOST_CHARACTERS:
        last += 1
    around = response[first:last].rstrip(".,;:!?*").rpartition("=")[2]
    if any(mark in around for mark in "\\^([{"):
        try:
            read(_parted(around).value)
            return around
        except NoValueError:
            pass
    return found.group()


def _cleaned(text: str) -> str:
    text = _SPACE.sub(" ", _THIN_SPACE.sub("", text))
    for mark, plain in _SAME.items():
        text = text.replace(mark, plain)
    for mark in _IGNORED:
        text = text.replace(mark, "")
    return text.strip().rstrip(".").strip()


class _Parted(NamedTuple):
    """An answer, the name that it is given ("x =") and its unit."""

    value: str
    name: str = ""
    unit: str = ""


def _parted(text: str) -> _Parted:
    text, name, said = _cleaned(text), "", ""
    if len(text) > MOST_CHARACTERS:
        return _Parted(text)
    unit = _UNIT.search(text)
    if unit and text[: unit.start()].strip():
        text, said = text[: unit.start()], _letters(unit.group())
    if named := _NAMED.match(text):
        text, name = text[named.end() :], _letters(named.group())
    return _Parted(text.strip(), name, said)


def _letters(text: str) -> str:
    """Without markup, and without blanks but those between two digits."""
    text = _CHOICE.sub(r"\1", _TEXT.sub(r"\1", _cleaned(text)).lower())
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
