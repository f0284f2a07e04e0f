"""What is computed of an array is, element by element, what is computed of each number."""

import numpy as np
import pytest

from meshwright.profiles import elementwise
from tests.seeds import seeds


@seeds(3, all=30)
def test_an_array_has_for_each_element_what_the_number_has(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    one, other = drawn.normal(0, 3, (2, 50))
    one[:5] = other[:5] = np.round(one[:5])  # equal ones, and whole ones
    pairs = list(zip(one.tolist(), other.tolist(), strict=True))
    for name in ("minimum", "maximum"):
        law = getattr(elementwise, name)
        assert law(one, other).tolist() == [law(a, b) for a, b in pairs]
        assert law(one, 0.5).tolist() == [law(a, 0.5) for a in one.tolist()]
    for name in ("ceil", "floor"):
        law = getattr(elementwise, name)
        assert law(one).tolist() == [law(a) for a in one.tolist()]
    chosen = elementwise.where(one <= other, one, other)
    assert chosen.tolist() == [elementwise.where(a <= b, a, b) for a, b in pairs]
    assert elementwise.sum_of([one, other]).tolist() == pytest.approx(
        [elementwise.sum_of(list(pair)) for pair in pairs]
    )


def test_a_sum_of_numbers_is_correctly_rounded_and_of_none_is_nothing() -> None:
    assert elementwise.sum_of([1e16, 1.0, -1e16]) == 1.0
    assert elementwise.sum_of([]) == 0.0
