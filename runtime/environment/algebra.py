"""Exact arithmetic on quotients of sums of products of numbers, roots and letters.

A value is a numerator over a denominator, each a sum of monomials with rational coefficients. A monomial holds powers
of letters and of the primes under roots. Two values are compared by cross-multiplication. Sizes are limited so that no
expression takes long; an expression beyond a limit has no value here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

_MAX_TERMS = 60
_MAX_BITS = 4000
"""Largest size of a coefficient's numerator or denominator, in bits."""
_MAX_POWER = 100
_MAX_FACTOR = 1000
"""Largest factor that is searched for in a number under a root."""

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

        Raises NoValueError if the exponent is not rational or too large, and for a root unless it is of a rational
        number that is not negative.
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
    """Return a fractional power of a rational number that is not negative; other terms have no value."""
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
    """Return prime factors by multiplicity; a remainder without small factors counts as a prime or as its square."""
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
