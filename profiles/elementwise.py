"""Arithmetic that reads the same for a number and for an array of numbers, element by element.

A formula of the cost models is written once with these functions: the search applies it to the columns of a table of
choices, and the verifier to one plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]

N = TypeVar("N", float, FloatArray)
"""Seconds, bytes or a count: of one choice, or of several choices, [choices]."""

N_co = TypeVar("N_co", float, FloatArray, covariant=True)


def minimum(one: N, other: N | float) -> N:
    """Return the smaller of two numbers, or of each pair of elements."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.minimum(one, other)
    return min(one, other)


def maximum(one: N, other: N | float) -> N:
    """Return the larger of two numbers, or of each pair of elements."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return max(one, other)


def ceil(number: N) -> N:
    """Return the number, or each element, rounded up to an integer."""
    rounded: Any = np.ceil(number) if isinstance(number, np.ndarray) else math.ceil(number)
    return rounded  # type: ignore[no-any-return]  # same type as the argument


def floor(number: N) -> N:
    """Return the number, or each element, rounded down to an integer."""
    rounded: Any = np.floor(number) if isinstance(number, np.ndarray) else math.floor(number)
    return rounded  # type: ignore[no-any-return]  # same type as the argument


def where(condition: bool | BoolArray, one: N | float, other: N) -> N:
    """Return `one` where the condition holds, and `other` elsewhere."""
    chosen: Any = np.where(condition, one, other) if isinstance(condition, np.ndarray) else one if condition else other
    return chosen  # type: ignore[no-any-return]  # same type as `other`


def sum_of(amounts: Sequence[N]) -> N:
    """Return the sum of numbers, correctly rounded, or of arrays of one shape."""
    is_column = amounts and isinstance(amounts[0], np.ndarray)
    added: Any = sum(amounts[1:], start=amounts[0]) if is_column else math.fsum(amounts)
    return added  # type: ignore[no-any-return]  # same type as the amounts
