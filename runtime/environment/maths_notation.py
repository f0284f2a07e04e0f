r"""Reads short answers in LaTeX or plain text: numbers, fractions, mixed numbers, roots, powers, tuples, sets.

    list = part {"," part}        part = sum | "(" list ")" | "[" list "]" | "\{" list "\}"
    sum = ["-"] product {("+" | "-") product}
    product = power {["*" | "/"] power}        power = atom ["^" atom]

Juxtaposed factors are multiplied, but for a whole number before a fraction of two: that is a mixed number. What is not
of this grammar, too long or nested too deep has no value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from meshwright.runtime.environment.algebra import NoValueError, Value, letter, number

MOST_CHARACTERS = 300
_DEEPEST, _MOST_DIGITS, _LARGEST_EXPONENT = 12, 200, 100

_TOKEN = re.compile(
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?P<exponent>[eE][+-]?\d+)?"
    r"|(?P<command>\\[a-zA-Z]+|\\[{}]|sqrt|pi)|(?P<letter>[a-zA-Z])|(?P<mark>\*\*|[-+*/^(){}\[\],])|(?P<blank>\s+)"
)
_OPEN = ("(", "[", "\\{")
_WORD = re.compile(r"(?<![a-zA-Z\\])(?!sqrt|pi(?![a-z]))[a-zA-Z]{2,}")
_MULTIPLIED = frozenset("abcxyzkmnpqrt")
"""Two of these beside each other are a product; other letters are a word, or the name of a line."""


@dataclass(frozen=True)
class Several:
    """Parts between two marks: ordered but in a set and where there are no marks."""

    marks: str
    parts: tuple[Value | Several, ...]


Answer: TypeAlias = Value | Several


def read(text: str) -> Answer:
    """The value of an answer. Raises NoValueError for one that has none."""
    if len(text) > MOST_CHARACTERS or any(not _may_be_product(word) for word in _WORD.findall(text)):
        raise NoValueError
    return _Reader(_tokens(text)).whole()


def are_equal(one: Answer, other: Answer) -> bool:
    """Whether two answers have one value, part by part. Raises NoValueError where that takes too much to see."""
    if isinstance(one, Value) and isinstance(other, Value):
        return one.equals(other)
    if isinstance(one, Value) or isinstance(other, Value):
        return False
    if one.marks != other.marks or len(one.parts) != len(other.parts):
        return False
    if one.marks not in ("", "\\{\\}"):
        return all(are_equal(a, b) for a, b in zip(one.parts, other.parts, strict=True))
    left = list(other.parts)
    for part in one.parts:
        same = next((index for index, wanted in enumerate(left) if are_equal(part, wanted)), None)
        if same is None:
            return False
        del left[same]
    return True


def _may_be_product(word: str) -> bool:
    return len(word) == 2 and set(word) <= _MULTIPLIED


def _tokens(text: str) -> list[str]:
    found, place = [""], 0
    depth = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise NoValueError
        token = match.group()
        if match["number"] and depth and "," in token:  # between marks a comma parts
            token = token.partition(",")[0]
        depth += (token in ("(", "[", "\\{")) - (token in (")", "]", "\\}"))
        place += len(token)
        if not token.isspace():
            found.append(token)
        elif found[-1][-1:].isdigit():
            found.append(" ")  # "1 2" is not 12
    return [token for token in found if token]


class _Reader:
    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens, self._place, self._depth = tokens, 0, 0

    @property
    def _next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self, *wanted: str) -> str:
        """The next token where it is one of these, else nothing."""
        token = self._next
        if token not in wanted or not token:
            return ""
        self._place += 1
        return token

    def _skip_blank(self) -> None:
        self._take(" ")

    def whole(self) -> Answer:
        found = self._list("")
        if self._next:
            raise NoValueError
        return found

    def _list(self, opening: str) -> Answer:
        parts = [self._part()]
        self._skip_blank()
        while self._take(","):
            self._skip_blank()
            parts.append(self._part())
            self._skip_blank()
        end = self._take(")", "]", "\\}") if opening else ""
        if opening and (not end or (opening == "\\{") != (end == "\\}")):
            raise NoValueError
        if len(parts) == 1 and opening in ("", "(") and end in ("", ")"):
            return parts[0]
        return Several(opening + end, tuple(parts))

    def _part(self) -> Answer:
        """A sum, or more than one between marks, which no sum goes on from."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise NoValueError
        start = self._place
        if opening := self._take(*_OPEN):
            inside = self._list(opening)
            if isinstance(inside, Several):
                self._depth -= 1
                return inside
            self._place = start
        found = self._sum()
        self._depth -= 1
        return found

    def _sum(self) -> Value:
        self._skip_blank()
        sign = self._take("-", "+")
        found = self._product()
        found = -found if sign == "-" else found
        self._skip_blank()
        while sign := self._take("+", "-"):
            self._skip_blank()
            term = self._product()
            found = found + (-term if sign == "-" else term)
            self._skip_blank()
        return found

    def _product(self) -> Value:
        found = self._power()
        while True:
            blank = self._take(" ")
            mark = self._take("*", "/", "\\cdot", "\\times", "\\div")
            if mark:
                self._skip_blank()
                sign = self._take("-")
                factor = self._power()
                factor = -factor if sign else factor
                found = found.over(factor) if mark in ("/", "\\div") else found * factor
            elif self._next and self._next not in ("+", "-", ",", ")", "]", "}", "\\}"):
                if (blank and self._next[0].isdigit()) or self._next[0] in ".0123456789":
                    raise NoValueError  # two numbers side by side are no product
                found = found * self._power()
            else:
                return found

    def _power(self) -> Value:
        start = self._place
        found = self._atom()
        whole = self._place == start + 1 and self._tokens[start].isdigit()
        if whole and (fraction := self._fraction_behind()):
            return found + fraction
        if self._take("^", "**"):
            sign = self._take("-")
            exponent = self._atom()
            return found.power(-exponent if sign else exponent)
        return found

    def _fraction_behind(self) -> Value | None:
        """The fraction of a mixed number, whose whole part was just read: one of two whole numbers, less than 1."""
        start = self._place
        try:
            if self._take(" ") and self._next.isdigit():
                above = self._atom()
                fraction = above.over(self._atom()) if self._take("/") else None
            else:
                fraction = self._atom() if self._next in _FRACTIONS else None
            if fraction is not None and 0 < fraction.rational < 1 and self._next != "^":
                return fraction
        except NoValueError:
            pass
        self._place = start
        return None

    def _atom(self) -> Value:
        token = self._next
        if not token:
            raise NoValueError
        self._depth += 1
        if self._depth > _DEEPEST:
            raise NoValueError
        self._place += 1
        found = self._read_atom(token)
        self._depth -= 1
        return found

    def _read_atom(self, token: str) -> Value:
        if token[0].isdigit() or token[0] == ".":
            return _number(token)
        if token in ("(", "{"):
            inside = self._sum()
            self._skip_blank()
            if not self._take(")" if token == "(" else "}"):
                raise NoValueError
            return inside
        if token in _FRACTIONS:
            above = self._argument()
            return above.over(self._argument())
        if token in ("\\sqrt", "sqrt", "√"):
            return self._read_root()
        if token in ("\\pi", "pi"):
            return letter("\\pi")
        if token == "\\infty" or (len(token) == 1 and token.isalpha()) or token in _GREEK:
            return letter(token)
        raise NoValueError

    def _argument(self) -> Value:
        """In braces, or a single digit or letter: \\frac12 is a half."""
        self._skip_blank()
        token = self._next
        if token.isdigit() and len(token) > 1:
            self._tokens = [*self._tokens[: self._place], token[0], token[1:], *self._tokens[self._place + 1 :]]
        return self._atom()

    def _read_root(self) -> Value:
        degree = Fraction(2)
        if self._take("["):
            degree = self._sum().rational
            if not self._take("]") or degree.denominator != 1 or degree < 2:
                raise NoValueError
        return self._argument().power(number(1 / degree))


_FRACTIONS = ("\\frac", "\\dfrac", "\\tfrac", "\\cfrac")
_GREEK = tuple(f"\\{name}" for name in ("alpha", "beta", "gamma", "theta", "lambda", "mu", "phi", "omega", "sigma"))


def _number(token: str) -> Value:
    """Whole or decimal, with thousands parted by commas, perhaps times a power of ten."""
    digits, _, exponent = token.lower().replace(",", "").partition("e")
    if len(digits) > _MOST_DIGITS or (exponent and abs(int(exponent[:8])) > _LARGEST_EXPONENT):
        raise NoValueError
    return number(Fraction(digits) * Fraction(10) ** int(exponent or 0))
