"""Rewards that compare a response with the answer of its prompt: 1 where it is right, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from meshwright.runtime.environment.samples import RewardSample

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*-?\d+)?|-?\.\d+")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}")
_BOXED, _GIVEN = "\\boxed{", "####"
_IGNORED = ("\\left", "\\right", "\\!", "\\,", "\\ ", "\\$", "$", "\\%", "%", "^\\circ", "\\circ")
_MOST_CHARACTERS = 200
"""Of an answer: a longer one is no number, and is compared as it is."""


def exact_match(samples: Sequence[RewardSample]) -> list[float]:
    """Whether the response is the answer, but for blanks around it."""
    return [float(sample.response.strip() == (sample.answer or "").strip()) for sample in samples]


def maths_answer(samples: Sequence[RewardSample]) -> list[float]:
    r"""Whether what the response gives at last, in \boxed{}, behind #### or as its last number, is the answer: as a
    number, which may be a fraction, where both are, else letter by letter without blanks and markup."""
    return [float(_is_right(sample.response, sample.answer or "")) for sample in samples]


def _is_right(response: str, answer: str) -> bool:
    given, wanted = _marked(response), _plain(_marked(answer) or answer)
    if given is None:
        numbers = _NUMBER.findall(response)
        if not numbers:
            return False
        given = str(numbers[-1])
    one, other = _plain(given), _value(wanted)
    return one == wanted if other is None else _value(one) == other


def _marked(text: str) -> str | None:
    """What a text marks as its answer; None where it marks nothing."""
    if _BOXED in text:
        return _in_braces(text[text.rindex(_BOXED) + len(_BOXED) :])
    if _GIVEN in text:
        return text.rpartition(_GIVEN)[2].strip().partition("\n")[0]
    return None


def _in_braces(text: str) -> str | None:
    """Up to the brace that closes one before the text."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[:place]
    return None


def _plain(text: str) -> str:
    """Without what does not change the value."""
    for mark in _IGNORED:
        text = text.replace(mark, "")
    text = _TEXT.sub(r"\1", _FRACTION.sub(r"(\1)/(\2)", text))
    return "".join(text.split()).rstrip(".").lower()


def _value(text: str) -> Fraction | None:
    """The number that a text is: whole, decimal, or one over another."""
    parts = text.replace("(", "").replace(")", "").replace(",", "").split("/")
    if len(parts) > 2 or len(text) > _MOST_CHARACTERS or "e" in text:
        return None
    try:
        above, below = Fraction(parts[0]), Fraction(parts[-1] if len(parts) == 2 else 1)
        return above / below
    except (ValueError, ZeroDivisionError):
        return None
