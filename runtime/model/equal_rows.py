"""Runs of adjacent packed rows with equal lengths, each of which is one attention call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class EqualRows(NamedTuple):
    """Adjacent rows in adjacent slots, each of `length` new tokens after `cached` tokens in the cache."""

    first_slot: int
    cached: int
    length: int
    num_rows: int = 1

    @property
    def num_keys(self) -> int:
        """Number of keys that the last token of each row sees."""
        return self.cached + self.length


def group_equal_rows(rows: Iterable[tuple[int, int, int]]) -> tuple[EqualRows, ...]:
    """Groups rows, each given as (slot, cached tokens, length), into as few runs as possible."""
    runs: list[EqualRows] = []
    for slot, cached, length in rows:
        if runs and (slot, cached, length) == (runs[-1].first_slot + runs[-1].num_rows, *runs[-1][1:3]):
            runs[-1] = runs[-1]._replace(num_rows=runs[-1].num_rows + 1)
        else:
            runs.append(EqualRows(slot, cached, length))
    return tuple(runs)
