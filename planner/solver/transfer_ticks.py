"""How long weights take from each layout of one task to each layout of another.

Many layouts shard the weights in the same way, and transfers from and to them take equally long. They are in one class,
so that a table of classes stands for a table of layouts, which is much larger.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TransferTicks:
    """The ticks of a transfer by the layouts of its source and its target, and by the number of their common ranks.

    `sources` and `targets` have the class of each layout, and `overlaps` the positions of the numbers of common ranks.
    `moved` has the ticks between two classes, [source classes, target classes, overlaps], and `in_place` those from a
    layout to the same layout where they differ, [overlaps] each. What is missing takes no time.
    """

    sources: Mapping[str, int] = field(default_factory=dict)
    targets: Mapping[str, int] = field(default_factory=dict)
    overlaps: Mapping[int, int] = field(default_factory=dict)
    moved: Array = field(default_factory=lambda: np.zeros((0, 0, 0), dtype=np.int64))
    in_place: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def from_mapping(cls, ticks: Mapping[tuple[str, str, int], int]) -> TransferTicks:
        """Return ticks that are given by (source layout, target layout, number of common ranks)."""
        sources, targets, overlaps = (
            {key: position for position, key in enumerate(dict.fromkeys(keys))}
            for keys in (zip(*ticks, strict=True) if ticks else ((), (), ()))
        )
        moved = np.zeros((len(sources), len(targets), len(overlaps)), dtype=np.int64)
        for (source, target, overlap), duration in ticks.items():
            moved[sources[source], targets[target], overlaps[overlap]] = duration
        return cls(sources, targets, overlaps, moved)

    def between(self, source: str, target: str, overlap: int) -> int:
        """Return the ticks from one layout to another with `overlap` ranks in common."""
        position = self.overlaps.get(overlap)
        if position is None or source not in self.sources or target not in self.targets:
            return 0
        return int(self._row(source, target)[position])

    def _row(self, source: str, target: str) -> Array:
        """Return the ticks between two layouts, [overlaps]."""
        if source == target and source in self.in_place:
            return self.in_place[source]
        row: Array = self.moved[self.sources[source], self.targets[target]]
        return row

    @cached_property
    def longest(self) -> int:
        """The ticks of the longest transfer."""
        between = self.moved[np.ix_([*set(self.sources.values())], [*set(self.targets.values())])]
        return max(int(between.max(initial=0)), *(int(row.max(initial=0)) for row in self.in_place.values()), 0)

    def __eq__(self, other: object) -> bool:
        """True if every transfer takes as long as in `other`."""
        if not isinstance(other, TransferTicks):
            return NotImplemented
        names = self.sources.keys(), self.targets.keys(), self.overlaps
        if names != (other.sources.keys(), other.targets.keys(), other.overlaps):
            return False
        pairs = product(self.sources, self.targets)
        return all(np.array_equal(self._row(*pair), other._row(*pair)) for pair in pairs)

    __hash__ = None  # type: ignore[assignment]

    def among(self, sources: Collection[str], targets: Collection[str]) -> TransferTicks:
        """Return the ticks between some of the layouts."""
        return replace(
            self,
            sources={name: of_class for name, of_class in self.sources.items() if name in sources},
            targets={name: of_class for name, of_class in self.targets.items() if name in targets},
            in_place={name: row for name, row in self.in_place.items() if name in sources and name in targets},
        )

    def keys_of_sources(self, *, ticks: int = 1) -> dict[str, Hashable]:
        """Return a key for each source layout; two are equal if all transfers from them take as many multiples of
        `ticks`, rounded down."""
        moved, classes = self.moved // ticks, sorted(set(self.targets.values()))
        rows = {of_class: moved[of_class, classes].tobytes() for of_class in set(self.sources.values())}
        return {name: (rows[of_class], self._own_row(name, ticks)) for name, of_class in self.sources.items()}

    def keys_of_targets(self, *, ticks: int = 1) -> dict[str, Hashable]:
        """Return a key for each target layout, as `keys_of_sources` does."""
        moved, classes = self.moved // ticks, sorted(set(self.sources.values()))
        rows = {of_class: moved[classes, of_class].tobytes() for of_class in set(self.targets.values())}
        return {name: (rows[of_class], self._own_row(name, ticks)) for name, of_class in self.targets.items()}

    def _own_row(self, name: str, ticks: int) -> Hashable:
        """Return what distinguishes a layout from others of its class: the transfer to itself, if it takes longer or
        shorter than those to others."""
        if name not in self.in_place or name not in self.sources or name not in self.targets:
            return None
        own, others = self.in_place[name] // ticks, self.moved[self.sources[name], self.targets[name]] // ticks
        return None if np.array_equal(own, others) else (name, own.tobytes())

    def merged(self, representative: Mapping[str, str]) -> TransferTicks:
        """Return the least ticks between any two layouts with the same representatives.

        Layouts without a representative are left out.
        """
        sources, of_source = _classes_by_representative(self.sources, representative)
        targets, of_target = _classes_by_representative(self.targets, representative)
        moved = np.full((len(sources), len(targets), len(self.overlaps)), np.iinfo(np.int64).max, dtype=np.int64)
        by_target = np.full((self.moved.shape[0], len(targets), len(self.overlaps)), np.iinfo(np.int64).max)
        for position, classes in enumerate(of_target):
            by_target[:, position] = self.moved[:, classes].min(axis=1)
        for position, classes in enumerate(of_source):
            moved[position] = by_target[classes].min(axis=0)
        for name, row in self.in_place.items():
            if name in self.sources and name in self.targets and name in representative:
                at = sources[representative[name]], targets[representative[name]]
                moved[at] = np.minimum(moved[at], row)
        return TransferTicks(sources, targets, self.overlaps, moved)


def _classes_by_representative(
    class_of: Mapping[str, int], representative: Mapping[str, str]
) -> tuple[dict[str, int], list[list[int]]]:
    """Return a class for each representative, and for each of these the classes that it represents."""
    represented: dict[str, set[int]] = {}
    for name, of_class in class_of.items():
        if name in representative:
            represented.setdefault(representative[name], set()).add(of_class)
    return {name: index for index, name in enumerate(represented)}, [sorted(found) for found in represented.values()]
