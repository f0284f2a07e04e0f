"""A plain value is the same behind JSON, and a value that is none is given by number."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as values

from meshwright.runtime.environment.plain_values import decode, encode, plain_base, update_in_place

SIMPLE = (
    values.none() | values.booleans() | values.integers() | values.floats(allow_nan=False) | values.text(max_size=5)
)
KEYS = values.integers() | values.text(max_size=3) | values.tuples(values.integers())
PLAIN = values.recursive(
    SIMPLE | values.binary(max_size=5) | values.fractions() | values.complex_numbers(allow_nan=False) | values.dates(),
    lambda inner: values.lists(inner, max_size=3) | values.dictionaries(KEYS, inner, max_size=3),
    max_leaves=4,
)


def through_json(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, lambda _: {"mine": 7}))), lambda message: message)


@settings(max_examples=40)
@given(PLAIN)
def test_a_plain_value_is_the_same_behind_a_message(value: Any) -> None:
    found = through_json(value)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        *((1, (2,)), {1, 2}, frozenset({1}), bytearray(b"a"), range(1, 9, 2), 10**5000, -(2**53), ..., int, ValueError),
        *(Counter("aab"), OrderedDict(a=1), deque([1], 3), Decimal("1.50"), Fraction(1, 3), timedelta(1, 2, 3)),
        *(datetime(2026, 1, 2, 3, 4, 5, 6), date(2026, 1, 2), {"int": 1}, {"mine": 0}, {"a": 1, "b": 2}, "\ud800"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_the_standard_library_are_plain(value: Any) -> None:
    assert through_json(value) == value
    assert type(through_json(value)) is type(value)


def test_arrays_keep_their_shape_and_type_and_a_dictionary_with_a_default_becomes_one_without() -> None:
    array = numpy.arange(6, dtype=numpy.int16).reshape(2, 3)
    found = through_json(array)
    assert (found == array).all()
    assert found.dtype == array.dtype
    assert through_json(numpy.float32(1.5)) == 1.5
    counted = through_json(defaultdict(int, a=1))
    assert counted == {"a": 1}
    assert counted["b"] == 0


def test_anything_else_is_given_by_number() -> None:
    point = namedtuple("point", "x y")(1, 2)
    one = IntEnum("Number", "one").one
    for value in (object(), point, one, len, print, numpy.array([object()])):
        assert through_json(value) == {"mine": 7}
    assert plain_base(point) == (1, 2)
    assert type(plain_base(one)) is int
    assert plain_base(object()) is None


@pytest.mark.parametrize("message", [{"int": "x"}, {"type": "print"}, {"Fraction": [1, "a"]}, {"dict": [1]}])
def test_a_message_that_is_none_is_refused(message: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode(message, dict)


def test_what_has_changed_is_changed_in_place_with_what_it_holds() -> None:
    inner = [1, 2]
    outer: list[Any] = [inner, {"a": inner}, 3]
    update_in_place(outer, [[2, 1], {"a": [9]}])
    assert outer == [[2, 1], {"a": [9]}]
    assert outer[0] is inner
    queue = deque([1])
    update_in_place(queue, deque([2, 3]))
    assert list(queue) == [2, 3]
    with pytest.raises(ValueError, match="changed its type"):
        update_in_place(outer, {})
