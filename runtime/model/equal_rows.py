"""Packed rows that are alike and next to each other, which attention takes in one call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class EqualRows(NamedTuple):
    """Rows one behind the other, in slots one behind the other, of `length` tokens each behind `cached` others."""

    first_slot: int
    cached: int
    length: int
    num_rows: int = 1

    @property
    def num_keys(self) -> int:
        """That the last token of each row sees."""
        return self.cached + self.length


def equal_rows(rows: Iterable[tuple[int, int, int]]) -> tuple[EqualRows, ...]:
    """Rows of so many runs as they need, each row given by its slot, its cached tokens and its length."""
    runs: list[EqualRows] = []
    for slot, cached, length in rows:
        if runs and (slot, cached, length) == (runs[-1].first_slot + runs[-1].num_rows, *runs[-1][1:3]):
            runs[-1] = runs[-1]._replace(num_rows=runs[-1].num_rows + 1)
        else:
            runs.append(EqualRows(slot, cached, length))
    return tuple(runs)
