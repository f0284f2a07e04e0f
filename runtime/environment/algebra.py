"""Exact values of short expressions: quotients of sums of products of numbers, roots and letters.

A value is a numerator over a denominator, each a sum of monomials with rational coefficients; a monomial is powers of
letters and of the primes under roots. Two values are equal where they are when multiplied out. All of it has limits, so
that no expression takes long: whatever is beyond them has no value here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

_MOST_TERMS = 60
_MOST_BITS = 4000
"""Of a coefficient."""
_LARGEST_POWER = 100
_LARGEST_FACTOR = 1000
"""Larger primes under a root are not looked for."""

Monomial: TypeAlias = tuple[tuple[str, Fraction], ...]
"""Powers by letter, ascending; a prime under a root is named by its digits."""
Terms: TypeAlias = Mapping[Monomial, Fraction]


class NoValueError(Exception):
    """An expression that has no value here."""


@dataclass(frozen=True)
class Value:
    """A quotient of two sums."""

    above: Terms
    below: Terms

    def __add__(self, other: Value) -> Value:
        above = _sum(_product(self.above, other.below), _product(other.above, self.below))
        return Value(above, _product(self.below, other.below))

    def __mul__(self, other: Value) -> Value:
        return Value(_product(self.above, other.above), _product(self.below, other.below))

    def __neg__(self) -> Value:
        return self * number(-1)

    def over(self, other: Value) -> Value:
        """The quotient. Raises NoValueError for one by nothing."""
        if not other.above:
            raise NoValueError
        return Value(_product(self.above, other.below), _product(self.below, other.above))

    def equals(self, other: Value) -> bool:
        """Whether both are one value. Raises NoValueError where that takes too much to see."""
        return _product(self.above, other.below) == _product(other.above, self.below)

    @property
    def rational(self) -> Fraction:
        """The number that it is. Raises NoValueError for any other value."""
        if set(self.above) <= {()} and set(self.below) == {()}:
            return self.above.get((), Fraction(0)) / self.below[()]
        raise NoValueError

    def power(self, exponent: Value) -> Value:
        """A whole power, or a root of a number that is not negative. Raises NoValueError for any other or large one."""
        n = exponent.rational
        if abs(n) > _LARGEST_POWER:
            raise NoValueError
        if n.denominator == 1:
            found = number(1)
            for _ in range(abs(n.numerator)):
                found = found * self
            return found if n >= 0 else number(1).over(found)
        return Value(_root(self.above, n), _root(self.below, n))


def number(value: Fraction | int) -> Value:
    """The value of a number."""
    value = Fraction(value)
    return Value({(): value} if value else {}, {(): Fraction(1)})


def letter(name: str) -> Value:
    """The value of a letter or of a constant that has a name."""
    return Value({((name, Fraction(1)),): Fraction(1)}, {(): Fraction(1)})


def _sum(one: Terms, other: Terms) -> Terms:
    found = dict(one)
    for monomial, coefficient in other.items():
        found[monomial] = found.get(monomial, Fraction(0)) + coefficient
    return _limited(found)


def _product(one: Terms, other: Terms) -> Terms:
    found: dict[Monomial, Fraction] = {}
    for left, a in one.items():
        for right, b in other.items():
            monomial, coefficient = _times(left, right)
            found[monomial] = found.get(monomial, Fraction(0)) + a * b * coefficient
    return _limited(found)


def _limited(terms: Terms) -> Terms:
    found = {monomial: coefficient for monomial, coefficient in terms.items() if coefficient}
    bits = (max(c.numerator.bit_length(), c.denominator.bit_length()) for c in found.values())
    if len(found) > _MOST_TERMS or max(bits, default=0) > _MOST_BITS:
        raise NoValueError
    return found


def _times(left: Monomial, right: Monomial) -> tuple[Monomial, Fraction]:
    """The product of two monomials, and the whole number that comes out of its roots."""
    powers = dict(left)
    for name, power in right:
        powers[name] = powers.get(name, Fraction(0)) + power
    coefficient = Fraction(1)
    for name, power in powers.items():
        if abs(power) > _LARGEST_POWER:
            raise NoValueError
        if name.isdigit():  # a prime: of its power, less than one stays under a root
            whole = math.floor(power)
            coefficient *= Fraction(int(name)) ** whole
            powers[name] = power - whole
    return tuple(sorted((name, power) for name, power in powers.items() if power)), coefficient


def _root(terms: Terms, power: Fraction) -> Terms:
    """A power, no whole one, of a sum of one term whose coefficient is positive."""
    if not terms and power > 0:
        return {}
    if len(terms) != 1:
        raise NoValueError
    ((monomial, coefficient),) = terms.items()
    if coefficient < 0 or (monomial and not all(name.isdigit() for name, _ in monomial)):
        raise NoValueError
    found: Terms = (
        {tuple((name, own * power) for name, own in monomial): Fraction(1)} if monomial else {(): Fraction(1)}
    )
    for whole, sign in ((coefficient.numerator, 1), (coefficient.denominator, -1)):
        for prime, count in _factors(whole).items():
            found = _product(found, dict([_times((), ((str(prime), sign * count * power),))]))
    return found


def _factors(whole: int) -> Mapping[int, int]:
    """How often each factor is in a whole number; what is left of it without small ones is one factor."""
    found: dict[int, int] = {}
    factor = 2
    while factor * factor <= whole and factor <= _LARGEST_FACTOR:
        while whole % factor == 0:
            found[factor] = found.get(factor, 0) + 1
            whole //= factor
        factor += 1
    root = math.isqrt(whole)
    if root * root == whole and root > 1:
        return found | {root: 2}
    return found | ({whole: 1} if whole > 1 else {})
