"""Values are exact: sums, products, quotients, powers and roots of numbers and letters."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from meshwright.runtime.environment.maths_notation import NoValueError, Value, number, symbol


def drawn(draw: random.Random, depth: int) -> tuple[Value, float]:
    """A value, and what floats make of it."""
    kind = draw.choice(["number", "number", "sum", "product", "quotient", "root", "power"] if depth else ["number"])
    if kind == "number":
        whole = draw.randint(1, 12)
        return number(whole), float(whole)
    one, x = drawn(draw, depth - 1)
    if kind == "root":
        whole = draw.randint(1, 60)
        return number(whole).power(number(Fraction(1, 2))), math.sqrt(whole)
    if kind == "power":
        return one.power(number(2)), x**2
    other, y = drawn(draw, depth - 1)
    if kind == "sum":
        return one + other, x + y
    return (one * other, x * y) if kind == "product" else (one.divided_by(other), x / y)


def test_values_are_equal_where_their_floats_are() -> None:
    """Where they have a value: terms are limited."""
    draw, num_equal = random.Random(0), 0
    for _ in range(400):
        try:
            (one, x), (other, y) = drawn(draw, 2), drawn(draw, 2)
            assert one.equals(other) == math.isclose(x, y, rel_tol=1e-12), (x, y)
            assert (one + other).equals(other + one)
            assert (one + other + -other).equals(one)
            assert (one * other).divided_by(other).equals(one)
        except NoValueError:
            continue
        num_equal += x == y
    assert num_equal > 3


def test_powers_of_letters_are_multiplied_out() -> None:
    x = symbol("x")
    assert ((x + number(1)) * (x + number(-1))).equals(x.power(number(2)) + number(-1))
    assert not x.equals(symbol("y"))
    assert x.divided_by(x).equals(number(1))


def test_roots_leave_what_is_no_square() -> None:
    half = number(Fraction(1, 2))
    assert number(72).power(half).equals(number(6) * number(2).power(half))
    assert number(Fraction(9, 4)).power(half).equals(number(Fraction(3, 2)))
    assert number(10**40).power(half).equals(number(10**20))


@pytest.mark.parametrize("power", [Fraction(101), Fraction(-101), Fraction(201, 2)])
def test_what_is_beyond_the_limits_has_no_value(power: Fraction) -> None:
    with pytest.raises(NoValueError):
        number(2).power(number(power))


def test_what_has_no_exact_value_has_none() -> None:
    with pytest.raises(NoValueError):
        number(1).divided_by(number(0))
    with pytest.raises(NoValueError):
        number(-1).power(number(Fraction(1, 2)))
    with pytest.raises(NoValueError):
        symbol("x").power(number(Fraction(1, 2)))
    with pytest.raises(NoValueError):
        _ = symbol("x").rational
