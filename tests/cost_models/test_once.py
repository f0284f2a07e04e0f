"""An answer is computed for each key, and not again."""

from __future__ import annotations

from meshwright.cost_models.once import Once


def test_an_answer_is_computed_once_for_each_key() -> None:
    squares: Once[int, int] = Once()
    computed: list[int] = []

    def square(number: int) -> int:
        def make() -> int:
            computed.append(number)
            return number * number

        return squares.of(number, make)

    assert [square(number) for number in (3, 0, 3, 0)] == [9, 0, 9, 0]
    assert computed == [3, 0]
