"""Which sequence moves into which slot when some have ended: live ones stay next to each other, longer before shorter.

Rows of a decode step that lie next to each other attend together, as far as the longest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_LONG_ENOUGH = 0.75
"""Of the cached tokens of the one behind it: a sequence that has so many may stand before it. Sequences that are read
together then differ by little, and few moves keep them so."""


def compaction(lengths: Sequence[int], ended: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The moves from slot to slot, one after another, until the sequences that have not ended are in the first slots.

    `lengths` are the cached tokens of the sequences in the slots.
    """
    left = list(lengths)
    for index in reversed(range(len(ended))):
        if ended[index]:
            yield from _fill(left, index)


def _fill(lengths: list[int], freed: int) -> Iterator[tuple[int, int]]:
    """A sequence from behind moves into the freed slot, another one into the slot that this one leaves, and so on.

    Always the last one that is long enough to stand before the next. The sequence behind it is shorter by a quarter
    than the one before, so the moves are few.
    """
    while (last := freed + 1) < len(lengths):
        enough = _LONG_ENOUGH * lengths[last]
        while last + 1 < len(lengths) and lengths[last + 1] >= enough:
            last += 1
        yield last, freed
        lengths[freed] = lengths[last]
        freed = last
    lengths.pop()
