"""The least that refits of a stage take between the sites of the training stage and its own."""

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
    """A layout on a part of the cluster: stages of a role whose sites are equal may share weights."""

    part: int
    layout: Layout


@dataclass(frozen=True)
class Refits:
    """Those of some facts by a cost model, wherever the pools lie; moves that are alike are costed once."""

    facts: Facts
    model: CostModel
    _known: dict[object, float] = field(default_factory=dict)

    def seconds(self, stage: Stage, sources: Sequence[Site], targets: Sequence[Site]) -> NDArray[np.float64]:
        """The least seconds, [sources, targets]: none where the two may be one copy, a copy within ranks where they are
        cut alike and may not, and otherwise what depends on their kinds alone (`Move`)."""
        ours, theirs = _by_kind(sources), _by_kind(targets)
        found = self._between(stage, list(ours.values()), list(theirs.values()))
        numbered = ({kind: number for number, kind in enumerate(kinds)} for kinds in (ours, theirs))
        rows, columns = (
            [number[_kind(site)] for site in sites] for number, sites in zip(numbered, (sources, targets), strict=True)
        )
        found = found[np.ix_(rows, columns)]
        place = {site: column for column, site in enumerate(targets)}
        for row, source in enumerate(sources):
            if source in place:
                found[row, place[source]] = 0.0 if stage.may_share else self._least(stage, source, source)
        return found

    def _between(
        self, stage: Stage, ours: Sequence[Sequence[Site]], theirs: Sequence[Sequence[Site]]
    ) -> NDArray[np.float64]:
        """Of different sites of each two kinds; nothing where there are none."""
        cuts = [targets[0].layout.cut for targets in theirs]
        slices: dict[object, int] = {}
        found = np.zeros((len(ours), len(theirs)))
        for row, sources in enumerate(ours):
            part, layout = sources[0]
            size, axes = layout.num_ranks, _axes(layout)
            for column, (targets, cut) in enumerate(zip(theirs, cuts, strict=True)):
                pair = axes, _axes(cut)
                if pair not in slices:
                    slices[pair] = layout.slices_for(cut)
                key = stage.name, part, size, slices[pair], targets[0].part, cut
                if key not in self._known:
                    different = next((pair for pair in product(sources, targets) if pair[0] != pair[1]), None)
                    if different is None:
                        continue
                    self._known[key] = self._least(stage, *different)
                found[row, column] = self._known[key]
        return found

    def _least(self, stage: Stage, source: Site, target: Site) -> float:
        """Of pools that are apart, and of pools one within the other."""
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
    """What of a site a move of its weights sees."""
    return site.part, site.layout.num_ranks, _axes(site.layout)


def _axes(layout: Layout) -> tuple[int, int, int, int]:
    """Those that cut weights."""
    return layout.tp, layout.pp, layout.ep, layout.etp


def _by_kind(sites: Sequence[Site]) -> dict[object, list[Site]]:
    """The sites that are the same but for what a move of their weights does not see."""
    kinds: dict[object, list[Site]] = {}
    for site in sites:
        kinds.setdefault(_kind(site), []).append(site)
    return kinds
