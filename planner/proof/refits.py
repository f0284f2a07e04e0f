"""Computes the least seconds of a stage's refits between the sites of its training stage and its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.question import CostModel, Move
from meshwright.planner.plan.job import Facts
from meshwright.profiles.layout import Layout
from meshwright.profiles.stages import Stage


class Site(NamedTuple):
    """A layout on a part of the cluster; stages of one role on equal sites may share weights."""

    part: int
    layout: Layout


@dataclass(frozen=True)
class Refits:
    """The refits of some facts by a cost model, wherever the pools lie; equal transfers are costed once."""

    facts: Facts
    model: CostModel
    _known: dict[object, float] = field(default_factory=dict)

    def seconds(self, stage: Stage, sources: Sequence[Site], targets: Sequence[Site]) -> NDArray[np.float64]:
        """Return the least seconds, [sources, targets].

        They are 0 if the two sites may share a copy. If they shard weights in the same way but may not share, they are
        those of a copy within the ranks. Otherwise they depend only on the kinds of the sites (`Move`).
        """
        sources_by_kind, targets_by_kind = _by_kind(sources), _by_kind(targets)
        seconds = self._between(stage, list(sources_by_kind.values()), list(targets_by_kind.values()))
        indices = ({kind: index for index, kind in enumerate(kinds)} for kinds in (sources_by_kind, targets_by_kind))
        rows, columns = (
            [index[_kind(site)] for site in sites] for index, sites in zip(indices, (sources, targets), strict=True)
        )
        seconds = seconds[np.ix_(rows, columns)]
        column_of = {site: column for column, site in enumerate(targets)}
        for row, source in enumerate(sources):
            if source in column_of:
                seconds[row, column_of[source]] = 0.0 if stage.may_share else self._least(stage, source, source)
        return seconds

    def _between(
        self, stage: Stage, source_kinds: Sequence[Sequence[Site]], target_kinds: Sequence[Sequence[Site]]
    ) -> NDArray[np.float64]:
        """Return the seconds between different sites of every two kinds; 0 if there are none."""
        cuts = [targets[0].layout.weight_layout for targets in target_kinds]
        slices: dict[object, int] = {}
        seconds = np.zeros((len(source_kinds), len(target_kinds)))
        for row, sources in enumerate(source_kinds):
            part, layout = sources[0]
            size, axes = layout.num_ranks, _axes(layout)
            for column, (targets, cut) in enumerate(zip(target_kinds, cuts, strict=True)):
                pair = axes, _axes(cut)
                if pair not in slices:
                    slices[pair] = layout.max_overlapping_shards(cut)
                key = stage.name, part, size, slices[pair], targets[0].part, cut
                if key not in self._known:
                    distinct_sites = next((pair for pair in product(sources, targets) if pair[0] != pair[1]), None)
                    if distinct_sites is None:
                        continue
                    self._known[key] = self._least(stage, *distinct_sites)
                seconds[row, column] = self._known[key]
        return seconds

    def _least(self, stage: Stage, source: Site, target: Site) -> float:
        """Return the least over disjoint pools and over pools of which one contains the other."""
        sizes = source.layout.num_ranks, target.layout.num_ranks
        parts_of = self.facts.cluster.parts_of
        may_meet = any(one is other for one, other in product(parts_of(source.part), parts_of(target.part)))
        nested = {min(sizes)} if may_meet else set()
        apart = {0} if sum(sizes) <= self.facts.cluster.num_ranks else set()
        moves = (
            Move(
                model=self.facts.models.spec(stage.role),
                source=source.layout,
                target=target.layout,
                overlap=overlap,
                source_part=source.part,
                target_part=target.part,
                generates=stage.generates,
                quantises=stage.is_quantised,
            )
            for overlap in nested | apart
        )
        return min(self.model.move_seconds(move).total for move in moves)


def _kind(site: Site) -> tuple[int, int, tuple[int, int, int, int]]:
    """Return the properties of a site that a transfer of its weights depends on."""
    return site.part, site.layout.num_ranks, _axes(site.layout)


def _axes(layout: Layout) -> tuple[int, int, int, int]:
    """Return the degrees that shard weights."""
    return layout.tp, layout.pp, layout.ep, layout.etp


def _by_kind(sites: Sequence[Site]) -> dict[object, list[Site]]:
    """Group the sites by the properties that a transfer of their weights depends on."""
    kinds: dict[object, list[Site]] = {}
    for site in sites:
        kinds.setdefault(_kind(site), []).append(site)
    return kinds
