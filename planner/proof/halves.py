"""The halves of many splits of a case, bounded together in arrays.

The prover compares splits with them; what a proof states is computed again for each of its cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.planner.proof.case_bounds import CaseBounds, Pair
from meshwright.planner.proof.cases import Case
from meshwright.planner.proof.document import Overlap, Split
from meshwright.planner.proof.space import AMOUNTS
from meshwright.profiles.elementwise import BoolArray, FloatArray, IntArray


class _Change(NamedTuple):
    """A half in which one stage has fewer choices than in the case that is split: their indices."""

    half: int
    stage: str
    indices: IntArray


class Halves(CaseBounds[FloatArray]):
    """The halves of several splits of one case, [halves]: both halves of the first split, then those of the next.

    Every half must have choices of every stage, unlike that of any split in a proof.
    """

    def __init__(self, case: Case, splits: Sequence[Split | Overlap]) -> None:
        self.space, self._case, self._splits = case.space, case, splits
        self._may_share: dict[Pair, BoolArray] = {}
        self._changes = [
            _Change(2 * number + second, split.stage, indices)
            for number, split in enumerate(splits)
            if isinstance(split, Split)
            for second, indices in enumerate(
                self.space.choices[split.stage].halves(
                    case.remaining[split.stage].indices, split.amount, split.upper_bound
                )
            )
        ]

    @cached_property
    def least(self) -> Mapping[str, Mapping[str, FloatArray]]:
        tables = {
            name: np.repeat(np.array([list(amounts.values())]).T, 2 * len(self._splits), axis=1)
            for name, amounts in self._case.least.items()
        }
        for half, stage, indices in self._changes:
            tables[stage][:, half] = self.space.choices[stage].amounts[:, indices].min(axis=1)
        return {name: dict(zip(AMOUNTS, table, strict=True)) for name, table in tables.items()}

    def pools_intersect(self, one: str, other: str) -> BoolArray:
        return self._is_half_of_overlap(one, other, 0) | self._case.pools_intersect(one, other)

    def pools_are_disjoint(self, one: str, other: str) -> BoolArray:
        return self._is_half_of_overlap(one, other, 1) | self._case.pools_are_disjoint(one, other)

    def _is_half_of_overlap(self, one: str, other: str, second: int) -> BoolArray:
        """True for the first or second halves of splits by the overlap of two pools, [halves]."""
        is_half = np.full(2 * len(self._splits), False)
        for number, split in enumerate(self._splits):
            if isinstance(split, Overlap) and set(split.overlap) == {one, other}:
                is_half[2 * number + second] = True
        return is_half

    def may_share_weights(self, one: str, other: str) -> BoolArray:
        pair = frozenset((one, other))
        if pair not in self._may_share:
            may_share = np.full(2 * len(self._splits), self._case.may_share_weights(one, other))
            if may_share.any():
                for changed, unchanged in ((one, other), (other, one)):
                    is_common = self._is_site[unchanged]
                    for half, stage, indices in self._changes:
                        if stage == changed:
                            may_share[half] = is_common[self.space.choices[stage].site[indices]].any()
            self._may_share[pair] = may_share
        return self._may_share[pair]

    @cached_property
    def _is_site(self) -> Mapping[str, BoolArray]:
        """True for the sites that a stage has in the case, [sites], by stage."""
        is_site = {name: np.full(self._num_sites, False) for name in self.names}
        for name, remaining in self._case.remaining.items():
            is_site[name][list(remaining.sites)] = True
        return is_site

    @property
    def _num_sites(self) -> int:
        return 1 + max(choices.sites[-1] for choices in self.space.choices.values())

    def least_refit_seconds(self, target: str) -> FloatArray:
        source, remaining = self.space.graph.trainer_of(target), self._case.remaining
        least = np.full(2 * len(self._splits), self._case.least_refit_seconds(target))
        for half, stage, indices in self._changes:
            if stage in (source, target):
                sites = {name: remaining[name].sites for name in (source, target)}
                sites[stage] = frozenset(self.space.choices[stage].site[indices].tolist())
                least[half] = self.space.refit_seconds(target, sites[source], sites[target])
        return least
