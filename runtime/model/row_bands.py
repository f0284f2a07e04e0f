"""Rows of a decode step that attend together, so that short ones do not read as far as the longest of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

_CALL = 256
"""What one more call is worth, in tokens of rows: 5 to 15 us of two heads of 16 on a CPU core, less of wider ones."""


def bands(lengths: Sequence[int]) -> Iterator[slice]:
    """Neighbouring rows, each band cut in two where that saves most, as long as it saves more than a call."""
    return _cut(lengths, slice(0, len(lengths)))


def _cut(lengths: Sequence[int], rows: slice) -> Iterator[slice]:
    """A band reads as far for each of its rows as for the longest."""
    own = lengths[rows]
    whole = len(own) * max(own, default=0)
    if len(own) > 1 and whole > 2 * _CALL:
        before, behind = list(accumulate(own, max)), list(accumulate(reversed(own), max))[::-1]
        read, cut = min((cut * before[cut - 1] + (len(own) - cut) * behind[cut], cut) for cut in range(1, len(own)))
        if read + _CALL < whole:
            yield from _cut(lengths, slice(rows.start, rows.start + cut))
            yield from _cut(lengths, slice(rows.start + cut, rows.stop))
            return
    yield rows
