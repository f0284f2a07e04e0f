"""Enumerates every choice that the rules allow a stage, with its costs and refits, independently of the search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.protocol import CostModel, LayoutCosts, Memo, RefitQuery, StageQuery
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import Choice, query_for_choice, stage_transfers
from meshwright.planner.plan.layout_and_schedule_rules import available_bytes, schedules, streaming_rules
from meshwright.planner.plan.pool_rules import first_ranks, pool_sizes
from meshwright.planner.plan.reward_workers import earliest_reward_seconds, reward_readers
from meshwright.planner.plan.steps_ahead import SearchCase, SearchCaseKey, max_deferral
from meshwright.planner.proof.site_choices import (
    Allowance,
    ParetoFront,
    ScheduleFamily,
    ShortPeriod,
    TimeLowerBounds,
    group_by_family,
    legal_layouts,
)
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Stage, StageGraph


class Site(NamedTuple):
    """A layout on a part of the cluster; stages of one role on equal sites may share weights."""

    part: int
    layout: Layout


@dataclass(frozen=True)
class Refits:
    """Lower bounds on refit times, valid for every position of the two pools; equal transfers are costed once."""

    facts: Facts
    model: CostModel
    _seconds: Memo[object, float] = field(default_factory=Memo)

    def seconds(self, stage: Stage, sources: Sequence[Site], targets: Sequence[Site]) -> NDArray[np.float64]:
        """Return a lower bound on the seconds of a refit between each pair of sites, [sources, targets].

        For equal sites it is 0 if the stage may share a copy of the weights, else the least time to copy them. For
        different sites it depends only on their kinds (`_kind`).
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
        """Return the seconds between two different sites of each pair of kinds; 0 if there are no such sites."""
        weight_layouts = [targets[0].layout.weight_layout for targets in target_kinds]
        num_overlapping: Memo[object, int] = Memo()
        seconds = np.zeros((len(source_kinds), len(target_kinds)))
        for row, sources in enumerate(source_kinds):
            part, layout = sources[0]
            size, axes = layout.num_ranks, _axes(layout)
            for column, (targets, weight_layout) in enumerate(zip(target_kinds, weight_layouts, strict=True)):
                if len(sources) == len(targets) == 1 and sources[0] == targets[0]:
                    continue
                overlap = num_overlapping.memoize(
                    (axes, _axes(weight_layout)), partial(layout.max_overlapping_shards, weight_layout)
                )
                key = stage.name, part, size, overlap, targets[0].part, weight_layout
                seconds[row, column] = self._seconds.memoize(
                    key, partial(self._least_of_different, stage, sources, targets)
                )
        return seconds

    def _least_of_different(self, stage: Stage, sources: Sequence[Site], targets: Sequence[Site]) -> float:
        return self._least(stage, *next(pair for pair in product(sources, targets) if pair[0] != pair[1]))

    def _least(self, stage: Stage, source: Site, target: Site) -> float:
        """Return the shorter time of two cases: disjoint pools, and pools of which one contains the other."""
        sizes = source.layout.num_ranks, target.layout.num_ranks
        parts_of = self.facts.cluster.parts_of
        may_meet = any(one is other for one, other in product(parts_of(source.part), parts_of(target.part)))
        nested = {min(sizes)} if may_meet else set()
        disjoint = {0} if sum(sizes) <= self.facts.cluster.num_ranks else set()
        moves = (
            RefitQuery(
                model=self.facts.models.spec(stage.role),
                source=source.layout,
                target=target.layout,
                overlap=overlap,
                source_part=source.part,
                target_part=target.part,
                generates=stage.generates,
                quantises=stage.is_quantised,
            )
            for overlap in nested | disjoint
        )
        return min(self.model.refit_seconds(move).total for move in moves)


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


_PLAIN_AMOUNTS = ("seconds", "tail_seconds", "own", "weights", "transient")
AMOUNTS = ("ranks", *_PLAIN_AMOUNTS, "work", "tail_work", *(f"{name}_in_all" for name in _PLAIN_AMOUNTS[2:]))
"""The amounts of a choice.

They are: ranks; seconds and tail seconds; on a rank, resident bytes except shareable weights, shareable weights, and
transient bytes; ranks x seconds and ranks x tail seconds; and the three kinds of bytes on all ranks.
"""


@dataclass(frozen=True, eq=False)
class ChoiceSubset:
    """A subset of the choices of a stage: their indices, the least of each amount, and the indices of their sites."""

    indices: NDArray[np.int64]
    least: Mapping[str, float]
    sites: frozenset[int]


@dataclass(frozen=True)
class Choices:
    """All choices of a stage: their amounts, [amounts, choices], and the index of each one's site."""

    amounts: NDArray[np.float64]
    site: NDArray[np.int64]

    def subset(self, indices: NDArray[np.int64]) -> ChoiceSubset:
        """Return the subset of the choices with these indices."""
        least = self.amounts[:, indices].min(axis=1).tolist() if len(indices) else ()
        return ChoiceSubset(indices, dict(zip(AMOUNTS, least, strict=False)), frozenset(self.site[indices].tolist()))

    def halves(
        self, indices: NDArray[np.int64], amount: str, most: float
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return those of the indices whose choices have at most `most` of an amount, and the others."""
        is_within = self.amounts[AMOUNTS.index(amount), indices] <= most
        return indices[is_within], indices[~is_within]

    @property
    def least(self) -> TimeLowerBounds:
        """The least tail seconds and tail work of all choices; infinite if there are none."""
        kinds = (AMOUNTS.index(f"tail_{kind}") for kind in ("seconds", "work"))
        return TimeLowerBounds(*(float(self.amounts[kind].min(initial=math.inf)) for kind in kinds))

    def allowed(self, allowance: Allowance, max_period_seconds: float = math.inf) -> Choices:
        """Return the choices within the allowance and the period."""
        seconds, tail, work = (self.amounts[AMOUNTS.index(name)] for name in ("seconds", "tail_seconds", "tail_work"))
        is_allowed = (tail <= allowance.seconds) & (work <= allowance.work) & (seconds <= max_period_seconds)
        return Choices(self.amounts[:, is_allowed], self.site[is_allowed])

    @cached_property
    def sites(self) -> tuple[int, ...]:
        """The indices of all sites, ascending."""
        return tuple(sorted(set(self.site.tolist())))


@dataclass(frozen=True)
class Space:
    """The choices of every stage in a search case, and the seconds between stages.

    `room_bytes` is the usable memory of the largest device. `lags` are the seconds of transfers within a period;
    `carried` has the transfers to later periods, as (number of periods, seconds). `refits` has the least seconds of
    every refit by its target stage, [sites of the training stage, sites of the target]. Stages in `late` read rewards
    from hosts, which arrive at least `arrival_seconds` after the start of generation.
    """

    graph: StageGraph
    num_ranks: int
    room_bytes: float
    search_case: SearchCase
    lags: Mapping[tuple[str, str], float]
    choices: Mapping[str, Choices]
    refits: Mapping[str, NDArray[np.float64]]
    carried: Mapping[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    arrival_seconds: float = 0.0
    _refit_seconds: Memo[object, float] = field(default_factory=Memo)

    @cached_property
    def ancestors(self) -> tuple[frozenset[int], ...]:
        """The positions of the stages that must end before each stage of the same period, by position."""
        ancestors: list[frozenset[int]] = []
        for name in self.graph.names:  # in topological order: a stage comes after those that it reads from
            producers = [self.graph.position[producer] for producer, consumer in self.lags if consumer == name]
            ancestors.append(frozenset(producers).union(*(ancestors[producer] for producer in producers)))
        return tuple(ancestors)

    def refit_seconds(self, target: str, sources: frozenset[int], targets: frozenset[int]) -> float:
        """Return the least seconds of a stage's refit between some sites of its training stage and some of its own."""

        def least() -> float:
            ends = ((self.graph.trainer_of(target), sources), (target, targets))
            indices = (np.searchsorted(self.choices[name].sites, sorted(sites)) for name, sites in ends)
            return float(self.refits[target][np.ix_(*indices)].min())

        return self._refit_seconds.memoize((target, sources, targets), least)


@dataclass(frozen=True)
class Enumeration:
    """Builds the space of each search case, with only the choices that fit in a period below `max_period_seconds`.

    The other choices take too long by themselves, or together with the fastest choices of the stages before and after
    them. Choices that two search cases have in common are costed once, and the choices of `longer`, an enumeration for
    longer periods, are not costed again.
    """

    facts: Facts
    model: CostModel
    max_period_seconds: float
    _choices: dict[tuple[str, SearchCaseKey], tuple[Allowance, Choices]] = field(default_factory=dict)
    sites: dict[Site, int] = field(default_factory=dict)
    longer: Enumeration | None = None
    _families: Memo[int, tuple[object, tuple[ScheduleFamily, ...]]] = field(default_factory=Memo)

    def of_shorter_periods(self, max_period_seconds: float) -> Enumeration:
        """Return the enumeration for periods below a smaller maximum, with the choices that a new one would have."""
        return replace(self, max_period_seconds=max_period_seconds, longer=self, _choices={})

    def spaces(self, search_cases: Sequence[SearchCase]) -> tuple[Space, ...]:
        """Return the spaces of some search cases.

        The last search cases are built first: their stages work furthest ahead, so that the fewest choices are pruned,
        and the other search cases reuse these choices.
        """
        return tuple(self.space(search_case) for search_case in reversed(search_cases))[::-1]

    def space(self, search_case: SearchCase) -> Space:
        """Return the space of a search case."""
        facts, ahead = self.facts, search_case.ahead
        edges = [
            (transfer, ahead[transfer.producer] - ahead[transfer.consumer])
            for transfer in stage_transfers(facts, self.model)
        ]
        lags = {(edge.producer, edge.consumer): edge.cost.total for edge, periods in edges if not periods}
        choices = self._allowed(search_case, lags)
        return Space(
            graph=facts.graph,
            num_ranks=facts.cluster.num_ranks,
            room_bytes=max(part.device.usable_bytes for part in facts.cluster.parts),
            search_case=search_case,
            lags=lags,
            choices=choices,
            carried={(edge.producer, edge.consumer): (periods, edge.cost.total) for edge, periods in edges if periods},
            late=frozenset(reward_readers(facts)),
            arrival_seconds=self._arrival_seconds,
            refits={stage.name: self._refits_of(stage, choices) for stage in facts.graph.stages if stage.needs_refit},
        )

    @cached_property
    def _arrival_seconds(self) -> float:
        return earliest_reward_seconds(self.facts)

    @cached_property
    def _refits(self) -> Refits:
        return Refits(self.facts, self.model)

    def _refits_of(self, stage: Stage, choices: Mapping[str, Choices]) -> NDArray[np.float64]:
        all_sites = list(self.sites)
        ends = (choices[name].sites for name in (self.facts.graph.trainer_of(stage.name), stage.name))
        sources, targets = ([all_sites[number] for number in indices] for indices in ends)
        return self._refits.seconds(stage, sources, targets)

    def _allowed(self, search_case: SearchCase, lags: Mapping[tuple[str, str], float]) -> dict[str, Choices]:
        """Return the choices of every stage within its allowance.

        Stages that take most of a period come first, because they limit the others most.
        """
        graph = self.facts.graph
        period = ShortPeriod(self.max_period_seconds, self.facts.cluster.num_ranks, graph.names, lags)
        by_stage: dict[str, Choices] = {}
        least = {stage.name: self._least_of(stage) for stage in graph.stages if not search_case.streams(stage)}
        for stage in sorted(graph.stages, key=lambda stage: (not stage.generates, not stage.trains)):
            by_stage[stage.name] = self._choices_of(stage, search_case, period.allowance_of(stage.name, least))
            least[stage.name] = by_stage[stage.name].least
        return {name: by_stage[name].allowed(period.allowance_of(name, least)) for name in graph.names}

    def _least_of(self, stage: Stage) -> TimeLowerBounds:
        """Return a lower bound on the times of a stage that does not stream, over all pools; no choice is costed."""
        model = self.facts.models.spec(stage.role)
        seconds_by_size = [
            (size, self.model.lower_bound_seconds(stage, model, size, part)) for part, size in self._kinds
        ]
        return TimeLowerBounds(
            min(seconds for _, seconds in seconds_by_size), min(size * seconds for size, seconds in seconds_by_size)
        )

    @cached_property
    def _kinds(self) -> list[tuple[int, int]]:
        """The kinds of pools: part of the cluster (or pair of parts), and size."""
        cluster = self.facts.cluster
        all_ranks = ((first, size) for size in pool_sizes(cluster) for first in first_ranks(cluster, size))
        return sorted({(cluster.part_of_pool(range(first, first + size)), size) for first, size in all_ranks})

    def _choices_of(self, stage: Stage, search_case: SearchCase, allowance: Allowance) -> Choices:
        key = stage.name, search_case.key_for(stage)
        if not self._has_choices(key, allowance):
            # A choice that another one beats is beaten by one that is as short, so that the rest needs no comparison.
            longer = self.longer
            self._choices[key] = (
                allowance,
                longer._choices[key][1].allowed(allowance, self.max_period_seconds)
                if longer is not None and longer._has_choices(key, allowance)
                else self._costed(stage, search_case, allowance),
            )
        return self._choices[key][1]

    def _has_choices(self, key: tuple[str, SearchCaseKey], allowance: Allowance) -> bool:
        return key in self._choices and self._choices[key][0].covers(allowance)

    def _costed(self, stage: Stage, search_case: SearchCase, allowance: Allowance) -> Choices:
        numbers, rows = [], []
        for site in self._sites_of(stage, allowance, streams=search_case.streams(stage)):
            for row in self._rows(stage, search_case, site, allowance):
                numbers.append(self.sites.setdefault(site, len(self.sites)))
                rows.append(row)
        plain = np.array(rows, dtype=np.float64).reshape(-1, 1 + len(_PLAIN_AMOUNTS)).T
        amounts = np.concatenate([plain, plain[0] * plain[1:]])
        return Choices(amounts, np.array(numbers, dtype=np.int64))

    def _sites_of(self, stage: Stage, allowance: Allowance, *, streams: bool) -> Iterator[Site]:
        """Yield every legal layout on every kind of pool, except kinds on which any layout is too slow."""
        model = self.facts.models.spec(stage.role)
        for part, size in self._kinds:
            least = self.model.lower_bound_seconds(stage, model, size, part)
            if least <= self.max_period_seconds and (streams or allowance.allows(size, least)):
                for layout in legal_layouts(self.facts, stage, size, part):
                    yield Site(part, layout)

    def _rows(
        self, stage: Stage, search_case: SearchCase, site: Site, allowance: Allowance
    ) -> Iterator[tuple[float, ...]]:
        """Yield ranks and plain amounts of a site's choices that fit, are fast enough and undominated
        (`ParetoFront`)."""
        (part, layout), deferral = site, max_deferral(search_case.ahead, self.facts.staleness)
        device_bytes, host_bytes = available_bytes(self.facts, part)
        legal = [
            family
            for family in self._families_of(stage, search_case, site)
            if not streaming_rules(self.facts, layout, family.plain, part)
        ]
        if not legal:
            return iter(())
        query = self._query(stage, search_case, site, legal[0].members[0][0])
        costs = self.model.on_layout(replace(query, max_deferral=deferral))
        front = ParetoFront(
            num_ranks=layout.num_ranks,
            may_share_weights=stage.may_share,
            max_period_seconds=self.max_period_seconds,
            allowance=allowance,
            costs=costs,
            least=lambda quickest: self._least_seconds(stage, search_case, site, quickest, costs),
            fits=lambda stage_bytes: stage_bytes.peak <= device_bytes and stage_bytes.host <= host_bytes,
        )
        for family in legal:
            front.add(family)
        return ((layout.num_ranks, *row) for row in front.rows)

    def _query(self, stage: Stage, search_case: SearchCase, site: Site, schedule: Schedule) -> StageQuery:
        deferral = max_deferral(search_case.ahead, self.facts.staleness)
        return query_for_choice(self.facts, stage, Choice(site.layout, schedule), deferral=deferral, part=site.part)

    def _families_of(self, stage: Stage, search_case: SearchCase, site: Site) -> tuple[ScheduleFamily, ...]:
        """Return all schedules of a site by family; on two kinds of nodes, their rows are split by speed."""
        facts, (part, layout) = self.facts, site
        all_schedules = schedules(facts, stage, layout, search_case)
        if len(facts.cluster.parts_of(part)) > 1:
            return group_by_family(
                self.model.with_row_split(self._query(stage, search_case, site, schedule)) for schedule in all_schedules
            )
        # Very many sites share one list of schedules. The list is kept with its families so that its id stays valid.
        _, families = self._families.memoize(id(all_schedules), lambda: (all_schedules, group_by_family(all_schedules)))
        return families

    def _least_seconds(
        self, stage: Stage, search_case: SearchCase, site: Site, quickest: Schedule, costs: LayoutCosts
    ) -> float:
        """Return a lower bound on the seconds of `quickest` and of its variants that recompute or offload.

        For a generation it is computed without simulation; for a schedule that streams it is 0.
        """
        if stage.generates:
            return self.model.generation_lower_bound(self._query(stage, search_case, site, quickest))
        return costs.seconds(quickest) if self.model.seconds_are_monotone and not quickest.chunk_tokens else 0.0
