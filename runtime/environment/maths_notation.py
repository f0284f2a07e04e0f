"""Parses and compares short answers in LaTeX or plain text: numbers, fractions, mixed numbers, roots, powers, tuples,
sets.

    list = part {"," part}        part = sum | "(" list ")" | "[" list "]" | "\\{" list "\\}"
    sum = ["-"] product {("+" | "-") product}
    product = power {["*" | "/"] power}        power = atom ["^" atom]
    atom = number | letter | constant | fraction | root | "(" sum ")" | "{" sum "}"

Juxtaposed factors are multiplied, except that a whole number before a fraction of two whole numbers makes a mixed
number. A value is an exact quotient of two sums of monomials; a monomial is a product of powers of letters and, for
roots, of fractional powers of primes. Two values are compared by cross-multiplication. A text outside this grammar, too
long, nested too deeply or beyond a limit of the arithmetic has no value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

_MAX_TERMS = 60
_MAX_BITS = 4000
"""Largest size of a coefficient's numerator or denominator, in bits."""
_MAX_POWER = 100
_MAX_FACTOR = 1000
"""Limit of the trial division of a number under a root."""

Monomial: TypeAlias = tuple[tuple[str, Fraction], ...]
"""Pairs of letter and power, in ascending order; a prime under a root is named by its digits."""
Terms: TypeAlias = Mapping[Monomial, Fraction]


class NoValueError(Exception):
    """The expression has no value: it is not in the grammar, not defined or beyond a limit."""


@dataclass(frozen=True)
class Value:
    """A quotient of two sums."""

    numerator: Terms
    denominator: Terms

    def __add__(self, other: Value) -> Value:
        above = _sum(_product(self.numerator, other.denominator), _product(other.numerator, self.denominator))
        return Value(above, _product(self.denominator, other.denominator))

    def __mul__(self, other: Value) -> Value:
        return Value(_product(self.numerator, other.numerator), _product(self.denominator, other.denominator))

    def __neg__(self) -> Value:
        return self * number(-1)

    def divided_by(self, other: Value) -> Value:
        """Return the quotient. Raises NoValueError for a division by zero."""
        if not other.numerator:
            raise NoValueError
        return Value(_product(self.numerator, other.denominator), _product(self.denominator, other.numerator))

    def equals(self, other: Value) -> bool:
        """True if both are the same value. Raises NoValueError if the comparison exceeds a limit."""
        return _product(self.numerator, other.denominator) == _product(other.numerator, self.denominator)

    @property
    def rational(self) -> Fraction:
        """The value as a fraction. Raises NoValueError unless it is a rational number."""
        if set(self.numerator) <= {()} and set(self.denominator) == {()}:
            return self.numerator.get((), Fraction(0)) / self.denominator[()]
        raise NoValueError

    def power(self, exponent: Value) -> Value:
        """Return the value to a rational power.

        Raises NoValueError if the exponent is not rational or is too large, for a negative power of zero, and for a
        fractional power of anything but a product of nonnegative rational numbers and their roots.
        """
        n = exponent.rational
        if abs(n) > _MAX_POWER:
            raise NoValueError
        if n.denominator == 1:
            result = number(1)
            for _ in range(abs(n.numerator)):
                result = result * self
            return result if n >= 0 else number(1).divided_by(result)
        return Value(_root(self.numerator, n), _root(self.denominator, n))


def number(value: Fraction | int) -> Value:
    """Return a number as a value."""
    value = Fraction(value)
    return Value({(): value} if value else {}, {(): Fraction(1)})


def symbol(name: str) -> Value:
    """Return a variable, or a named constant such as pi, as a value."""
    return Value({((name, Fraction(1)),): Fraction(1)}, {(): Fraction(1)})


def _sum(left: Terms, right: Terms) -> Terms:
    total = dict(left)
    for monomial, coefficient in right.items():
        total[monomial] = total.get(monomial, Fraction(0)) + coefficient
    return _simplified(total)


def _product(left_terms: Terms, right_terms: Terms) -> Terms:
    product: dict[Monomial, Fraction] = {}
    for left, a in left_terms.items():
        for right, b in right_terms.items():
            monomial, coefficient = _multiply_monomials(left, right)
            product[monomial] = product.get(monomial, Fraction(0)) + a * b * coefficient
    return _simplified(product)


def _simplified(terms: Terms) -> Terms:
    nonzero = {monomial: coefficient for monomial, coefficient in terms.items() if coefficient}
    bits = (max(c.numerator.bit_length(), c.denominator.bit_length()) for c in nonzero.values())
    if len(nonzero) > _MAX_TERMS or max(bits, default=0) > _MAX_BITS:
        raise NoValueError
    return nonzero


def _multiply_monomials(left: Monomial, right: Monomial) -> tuple[Monomial, Fraction]:
    """Return the product of two monomials, and the rational factor that comes out of its roots."""
    powers = dict(left)
    for name, power in right:
        powers[name] = powers.get(name, Fraction(0)) + power
    coefficient = Fraction(1)
    for name, power in powers.items():
        if abs(power) > _MAX_POWER:
            raise NoValueError
        if name.isdigit():  # a prime: only the fractional part of its power stays under the root
            whole = math.floor(power)
            coefficient *= Fraction(int(name)) ** whole
            powers[name] = power - whole
    return tuple(sorted((name, power) for name, power in powers.items() if power)), coefficient


def _root(terms: Terms, power: Fraction) -> Terms:
    """Return a fractional power of a nonnegative rational number times roots. Raises NoValueError for other terms."""
    if not terms and power > 0:
        return {}
    if len(terms) != 1:
        raise NoValueError
    ((monomial, coefficient),) = terms.items()
    if coefficient < 0 or (monomial and not all(name.isdigit() for name, _ in monomial)):
        raise NoValueError
    result: Terms = (
        {tuple((name, exponent * power) for name, exponent in monomial): Fraction(1)} if monomial else {(): Fraction(1)}
    )
    for whole, sign in ((coefficient.numerator, 1), (coefficient.denominator, -1)):
        for prime, count in _factors(whole).items():
            result = _product(result, dict([_multiply_monomials((), ((str(prime), sign * count * power),))]))
    return result


def _factors(whole: int) -> Mapping[int, int]:
    """Return the multiplicity of each prime factor; a remainder without small factors counts as a prime, or as the
    square of one."""
    multiplicities: dict[int, int] = {}
    factor = 2
    while factor * factor <= whole and factor <= _MAX_FACTOR:
        while whole % factor == 0:
            multiplicities[factor] = multiplicities.get(factor, 0) + 1
            whole //= factor
        factor += 1
    root = math.isqrt(whole)
    if root * root == whole and root > 1:
        return multiplicities | {root: 2}
    return multiplicities | ({whole: 1} if whole > 1 else {})


MAX_CHARACTERS = 300
_MAX_DEPTH, _MAX_DIGITS, _MAX_EXPONENT = 12, 200, 100

_TOKEN = re.compile(
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?P<exponent>[eE][+-]?\d+)?"
    r"|(?P<command>\\[a-zA-Z]+|\\[{}]|sqrt|pi)|(?P<letter>[a-zA-Z])|(?P<mark>\*\*|[-+*/^(){}\[\],])|(?P<blank>\s+)"
)
_OPENING = ("(", "[", "\\{")
_WORD = re.compile(r"(?<![a-zA-Z\\])(?!sqrt|pi(?![a-z]))[a-zA-Z]{2,}")
_PRODUCT_LETTERS = frozenset("abcxyzkmnpqrt")
"""Two of these letters side by side are a product; other pairs are a word, or the name of a line such as AB."""


@dataclass(frozen=True)
class AnswerList:
    """A list of values between two brackets; a set, or a list without brackets, is unordered."""

    brackets: str
    parts: tuple[Value | AnswerList, ...]


Answer: TypeAlias = Value | AnswerList


def parse_answer(text: str) -> Answer:
    """Parse an answer. Raises NoValueError if it has no value."""
    if len(text) > MAX_CHARACTERS or any(not _may_be_product(word) for word in _WORD.findall(text)):
        raise NoValueError
    return _Parser(_tokens(text)).parse()


def are_equal(one: Answer, other: Answer) -> bool:
    """True if two answers have the same values, part by part. Raises NoValueError if the comparison exceeds a limit."""
    if isinstance(one, Value) and isinstance(other, Value):
        return one.equals(other)
    if isinstance(one, Value) or isinstance(other, Value):
        return False
    if one.brackets != other.brackets or len(one.parts) != len(other.parts):
        return False
    if one.brackets not in ("", "\\{\\}"):
        return all(are_equal(a, b) for a, b in zip(one.parts, other.parts, strict=True))
    remaining = list(other.parts)
    for part in one.parts:
        match = next((index for index, candidate in enumerate(remaining) if are_equal(part, candidate)), None)
        if match is None:
            return False
        del remaining[match]
    return True


def _may_be_product(word: str) -> bool:
    return len(word) == 2 and set(word) <= _PRODUCT_LETTERS


def _tokens(text: str) -> list[str]:
    tokens, position = [""], 0
    depth = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NoValueError
        token = match.group()
        if match["number"] and depth and "," in token:  # inside brackets a comma separates parts
            token = token.partition(",")[0]
        depth += (token in ("(", "[", "\\{")) - (token in (")", "]", "\\}"))
        position += len(token)
        if not token.isspace():
            tokens.append(token)
        elif tokens[-1][-1:].isdigit():
            tokens.append(" ")  # "1 2" is not 12
    return [token for token in tokens if token]


class _Parser:
    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens, self._position, self._depth = tokens, 0, 0

    @property
    def _next(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _take(self, *expected: str) -> str:
        """Consume and return the next token if it is one of these, else return an empty text."""
        token = self._next
        if token not in expected or not token:
            return ""
        self._position += 1
        return token

    def _skip_blank(self) -> None:
        self._take(" ")

    def parse(self) -> Answer:
        answer = self._list("")
        if self._next:
            raise NoValueError
        return answer

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
        return AnswerList(opening + end, tuple(parts))

    def _part(self) -> Answer:
        """Parse a sum, or a bracketed list of several values, which cannot be an operand."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NoValueError
        start = self._position
        if opening := self._take(*_OPENING):
            inside = self._list(opening)
            if isinstance(inside, AnswerList):
                self._depth -= 1
                return inside
            self._position = start
        total = self._sum()
        self._depth -= 1
        return total

    def _sum(self) -> Value:
        self._skip_blank()
        sign = self._take("-", "+")
        total = self._product()
        total = -total if sign == "-" else total
        self._skip_blank()
        while sign := self._take("+", "-"):
            self._skip_blank()
            term = self._product()
            total = total + (-term if sign == "-" else term)
            self._skip_blank()
        return total

    def _product(self) -> Value:
        product = self._power()
        while True:
            blank = self._take(" ")
            mark = self._take("*", "/", "\\cdot", "\\times", "\\div")
            if mark:
                self._skip_blank()
                sign = self._take("-")
                factor = self._power()
                factor = -factor if sign else factor
                product = product.divided_by(factor) if mark in ("/", "\\div") else product * factor
            elif self._next and self._next not in ("+", "-", ",", ")", "]", "}", "\\}"):
                if (blank and self._next[0].isdigit()) or self._next[0] in ".0123456789":
                    raise NoValueError  # two numbers side by side are not a product
                product = product * self._power()
            else:
                return product

    def _power(self) -> Value:
        start = self._position
        base = self._atom()
        is_whole = self._position == start + 1 and self._tokens[start].isdigit()
        if is_whole and (fraction := self._mixed_fraction()):
            return base + fraction
        if self._take("^", "**"):
            sign = self._take("-")
            exponent = self._atom()
            return base.power(-exponent if sign else exponent)
        return base

    def _mixed_fraction(self) -> Value | None:
        """Parse the fraction below 1 that follows the whole part of a mixed number; return None if there is none."""
        start = self._position
        try:
            if self._take(" ") and self._next.isdigit():
                numerator = self._atom()
                fraction = numerator.divided_by(self._atom()) if self._take("/") else None
            else:
                fraction = self._atom() if self._next in _FRACTIONS else None
            if fraction is not None and 0 < fraction.rational < 1 and self._next != "^":
                return fraction
        except NoValueError:
            pass
        self._position = start
        return None

    def _atom(self) -> Value:
        token = self._next
        if not token:
            raise NoValueError
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NoValueError
        self._position += 1
        value = self._parse_atom(token)
        self._depth -= 1
        return value

    def _parse_atom(self, token: str) -> Value:
        if token[0].isdigit() or token[0] == ".":
            return _number(token)
        if token in ("(", "{"):
            inside = self._sum()
            self._skip_blank()
            if not self._take(")" if token == "(" else "}"):
                raise NoValueError
            return inside
        if token in _FRACTIONS:
            numerator = self._argument()
            return numerator.divided_by(self._argument())
        if token in ("\\sqrt", "sqrt", "√"):
            return self._parse_root()
        if token in ("\\pi", "pi"):
            return symbol("\\pi")
        if token == "\\infty" or (len(token) == 1 and token.isalpha()) or token in _GREEK:
            return symbol(token)
        raise NoValueError

    def _argument(self) -> Value:
        """Parse an argument in braces, or a single digit or letter: \\frac12 is a half."""
        self._skip_blank()
        token = self._next
        if token.isdigit() and len(token) > 1:
            self._tokens = [*self._tokens[: self._position], token[0], token[1:], *self._tokens[self._position + 1 :]]
        return self._atom()

    def _parse_root(self) -> Value:
        degree = Fraction(2)
        if self._take("["):
            degree = self._sum().rational
            if not self._take("]") or degree.denominator != 1 or degree < 2:
                raise NoValueError
        return self._argument().power(number(1 / degree))


_FRACTIONS = ("\\frac", "\\dfrac", "\\tfrac", "\\cfrac")
_GREEK = tuple(f"\\{name}" for name in ("alpha", "beta", "gamma", "theta", "lambda", "mu", "phi", "omega", "sigma"))


def _number(token: str) -> Value:
    """Return a whole or decimal number, with commas between thousands and an optional exponent of ten."""
    digits, _, exponent = token.lower().replace(",", "").partition("e")
    if len(digits) > _MAX_DIGITS or (exponent and abs(int(exponent[:8])) > _MAX_EXPONENT):
        raise NoValueError
    return number(Fraction(digits) * Fraction(10) ** int(exponent or 0))
