"""Every choice that the rules allow a stage, and what the cost model says of it: enumerated anew, for no search's word
is taken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.question import CostModel, LayoutCosts, Move
from meshwright.planner.plan.calls import Choice, call_of
from meshwright.planner.plan.edges import handovers
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pools import first_ranks, pool_sizes
from meshwright.planner.plan.rules import layout_rules, offered_layouts, room_on, schedules, streaming_rules
from meshwright.planner.plan.steps_ahead import Scope, ScopeKey, max_deferral
from meshwright.planner.proof.allowance import Allowance, Least, ShortTurn
from meshwright.profiles.layout import Layout, divisors
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.stages import Stage, StageGraph

_PLAIN = ("seconds", "tail_seconds", "own", "weights", "transient")
AMOUNTS = ("ranks", *_PLAIN, "work", "tail_work", *(f"{name}_in_all" for name in _PLAIN[2:]))
"""Of a choice: ranks; seconds, and those that remain when what it streams has ended; bytes on a rank that stay, but for
weights that stages of its role may share, these weights, and bytes that are there while it runs; and the last five
times the ranks."""


class Site(NamedTuple):
    """A layout on a part of the cluster: stages of a role whose sites are equal may share weights."""

    part: int
    layout: Layout


@dataclass(frozen=True)
class Some:
    """Some of the choices of a stage by their numbers, the least of their amounts, and their sites' numbers."""

    numbers: NDArray[np.int64]
    least: Mapping[str, float]
    sites: frozenset[int]


@dataclass(frozen=True)
class Choices:
    """All that a stage may choose: of each its amounts, `[amounts, choices]`, and the number of its site."""

    amounts: NDArray[np.float64]
    site: NDArray[np.int64]

    def some(self, numbers: NDArray[np.int64]) -> Some:
        """The choices with these numbers."""
        least = self.amounts[:, numbers].min(axis=1).tolist() if len(numbers) else ()
        return Some(numbers, dict(zip(AMOUNTS, least, strict=False)), frozenset(self.site[numbers].tolist()))

    @property
    def least(self) -> Least:
        """What every one of them takes at least; nothing takes forever where there are none."""
        kinds = (AMOUNTS.index(f"tail_{kind}") for kind in ("seconds", "work"))
        return Least(*(float(self.amounts[kind].min(initial=math.inf)) for kind in kinds))

    def allowed(self, allowance: Allowance) -> Choices:
        """Those that are in a turn that leaves so much to them."""
        seconds, work = (self.amounts[AMOUNTS.index(f"tail_{kind}")] for kind in ("seconds", "work"))
        kept = (seconds <= allowance.seconds) & (work <= allowance.work)
        return Choices(self.amounts[:, kept], self.site[kept])

    @cached_property
    def sites(self) -> tuple[int, ...]:
        """The numbers of all, ascending."""
        return tuple(sorted(set(self.site.tolist())))


@dataclass(frozen=True)
class Space:
    """The choices of every stage under a scope; the seconds of what is handed over within a turn; and the least seconds
    of every refit by the stage that it serves, [sites of the training stage, sites of the stage]."""

    graph: StageGraph
    num_ranks: int
    room_bytes: float
    scope: Scope
    lags: Mapping[tuple[str, str], float]
    choices: Mapping[str, Choices]
    refits: Mapping[str, NDArray[np.float64]]
    _known: dict[object, float] = field(default_factory=dict)

    def refit_seconds(self, target: str, sources: frozenset[int], targets: frozenset[int]) -> float:
        """The least of a refit of a stage between some sites of the training stage and some of its own."""
        key = target, sources, targets
        if key not in self._known:
            ends = ((self.graph.trainer_of(target), sources), (target, targets))
            found = (np.searchsorted(self.choices[name].sites, sorted(some)) for name, some in ends)
            self._known[key] = float(self.refits[target][np.ix_(*found)].min())
        return self._known[key]


@dataclass(frozen=True)
class Enumeration:
    """The spaces of some facts by a cost model, without what is in no plan of less than `most_seconds` a turn: choices
    that take longer, alone or with the least of what comes before and after. Those that are the same in two scopes are
    costed once."""

    facts: Facts
    model: CostModel
    most_seconds: float
    _choices: dict[tuple[str, ScopeKey], tuple[Allowance, Choices]] = field(default_factory=dict)
    _sites: dict[Site, int] = field(default_factory=dict)

    def spaces(self, scopes: Sequence[Scope]) -> tuple[Space, ...]:
        """Those of some scopes; the last come first, where stages work ahead and least is left out."""
        return tuple(self.space(scope) for scope in reversed(scopes))[::-1]

    def space(self, scope: Scope) -> Space:
        """All of a scope."""
        facts, ahead = self.facts, scope.ahead
        edges = (h for h in handovers(facts, self.model) if ahead[h.producer] == ahead[h.consumer])
        lags = {(edge.producer, edge.consumer): edge.cost.total for edge in edges}
        choices = self._allowed(scope, lags)
        return Space(
            graph=facts.graph,
            num_ranks=facts.cluster.num_ranks,
            room_bytes=max(part.device.usable_bytes for part in facts.cluster.parts),
            scope=scope,
            lags=lags,
            choices=choices,
            refits={stage.name: self._refits(stage, choices) for stage in facts.graph.stages if stage.is_refit},
        )

    def _allowed(self, scope: Scope, lags: Mapping[tuple[str, str], float]) -> dict[str, Choices]:
        """The choices of every stage. What takes most of a turn comes first, and leaves the less to the others."""
        graph = self.facts.graph
        turn = ShortTurn(self.most_seconds, self.facts.cluster.num_ranks, graph.names, lags)
        found: dict[str, Choices] = {}
        least = {stage.name: self._least_of(stage) for stage in graph.stages if not scope.streams(stage)}
        for stage in sorted(graph.stages, key=lambda stage: (not stage.generates, not stage.trains)):
            found[stage.name] = self._choices_of(stage, scope, turn.left_to(stage.name, least))
            least[stage.name] = found[stage.name].least
        return {name: found[name].allowed(turn.left_to(name, least)) for name in graph.names}

    def _least_of(self, stage: Stage) -> Least:
        """By arithmetic, of a stage that streams nothing, on any pool."""
        model = self.facts.models.spec(stage.role)
        known = [(size, self.model.least_seconds(stage, model, size, part)) for part, size in self._kinds]
        return Least(min(seconds for _, seconds in known), min(size * seconds for size, seconds in known))

    @cached_property
    def _kinds(self) -> list[tuple[int, int]]:
        """Of pools: the part of the cluster or the pair, and their size."""
        cluster = self.facts.cluster
        every = ((first, size) for size in pool_sizes(cluster) for first in first_ranks(cluster, size))
        return sorted({(cluster.part_of_pool(range(first, first + size)), size) for first, size in every})

    def _choices_of(self, stage: Stage, scope: Scope, allowance: Allowance) -> Choices:
        key = stage.name, scope.of(stage)
        if key not in self._choices or not self._choices[key][0].holds(allowance):
            numbers, rows = [], []
            for site in self._sites_of(stage, allowance, streams=scope.streams(stage)):
                for row in self._rows(stage, scope, site, allowance):
                    numbers.append(self._sites.setdefault(site, len(self._sites)))
                    rows.append(row)
            plain = np.array(rows, dtype=np.float64).reshape(-1, 1 + len(_PLAIN)).T
            amounts = np.concatenate([plain, plain[0] * plain[1:]])
            self._choices[key] = allowance, Choices(amounts, np.array(numbers, dtype=np.int64))
        return self._choices[key][1]

    def _sites_of(self, stage: Stage, allowance: Allowance, *, streams: bool) -> Iterator[Site]:
        """Every layout that breaks no rule, on every kind of pool that is not too slow whatever the layout."""
        model = self.facts.models.spec(stage.role)
        for part, size in self._kinds:
            least = self.model.least_seconds(stage, model, size, part)
            if least <= self.most_seconds and (streams or allowance.allows(size, least)):
                for layout in _layouts(self.facts, stage, size):
                    if not layout_rules(self.facts, stage, layout, part):
                        yield Site(part, layout)

    def _rows(self, stage: Stage, scope: Scope, site: Site, allowance: Allowance) -> Iterator[tuple[float, ...]]:
        """The ranks and plain amounts of every schedule on a site that fits device and host, and is not too slow."""
        facts, model, (part, layout) = self.facts, self.model, site
        deferral, is_pair = max_deferral(scope.ahead, facts.staleness), len(facts.cluster.parts_of(part)) > 1
        device_bytes, host_bytes = room_on(facts, part)
        too_large: set[Schedule] = set()
        allowed: dict[Schedule, bool] = {}
        costs: LayoutCosts | None = None
        for plain in schedules(facts, stage, layout, scope):
            asked = call_of(facts, stage, Choice(layout, plain), deferral=deferral, part=part)
            schedule = model.dealt(asked) if is_pair else plain
            family, quickest = _alike(schedule)
            if family in too_large or streaming_rules(facts, layout, schedule, part):
                continue
            if costs is None:
                call = call_of(facts, stage, Choice(layout, schedule), deferral=deferral, part=part)
                costs = model.on_layout(replace(call, max_deferral=deferral))
            if quickest not in allowed:
                least = self._least_seconds(stage, site, quickest, deferral, costs)
                allowed[quickest] = allowance.allows(layout.num_ranks, least)
            if not allowed[quickest]:
                continue
            held = costs.bytes(schedule)
            if held.peak > device_bytes or held.host > host_bytes:
                if model.memory_grows:  # a family's choices come with the smaller ones first
                    too_large.add(family)
                continue
            seconds = costs.seconds(schedule)
            tail = costs.tail_seconds(schedule) if schedule.chunk_tokens else seconds
            if seconds <= self.most_seconds and allowance.allows(layout.num_ranks, tail):
                weights = held.weights if stage.may_share else 0.0
                yield layout.num_ranks, seconds, tail, held.resident - weights, weights, held.transient

    def _least_seconds(self, stage: Stage, site: Site, quickest: Schedule, deferral: int, costs: LayoutCosts) -> float:
        """Seconds below which no schedule is that differs from this one in what only takes longer: of a generation they
        are told without playing its turns, and none of what streams."""
        if stage.generates:
            choice = Choice(site.layout, quickest)
            return self.model.least_generation_seconds(
                call_of(self.facts, stage, choice, deferral=deferral, part=site.part)
            )
        return costs.seconds(quickest) if self.model.seconds_grow and not quickest.chunk_tokens else 0.0

    def _refits(self, stage: Stage, choices: Mapping[str, Choices]) -> NDArray[np.float64]:
        """The least that refits of a stage take, wherever the pools lie: none where the two may be one copy, a copy
        within ranks where they are cut alike and may not, and otherwise what depends on their kinds alone (`Move`)."""
        numbered = list(self._sites)
        ends = (choices[name].sites for name in (self.facts.graph.trainer_of(stage.name), stage.name))
        sources, targets = ([numbered[number] for number in some] for some in ends)
        found = np.zeros((len(sources), len(targets)), dtype=np.float64)
        known: dict[object, float] = {}
        for rows, columns in product(_by_kind(sources), _by_kind(targets)):
            apart = ((sources[row], targets[column]) for row in rows for column in columns)
            pair = next(((one, other) for one, other in apart if one != other), None)
            if pair:
                source, target = pair
                slices = source.layout.slices_for(target.layout)
                key = source.part, source.layout.num_ranks, slices, target.part, target.layout.cut
                if key not in known:
                    known[key] = self._least_move(stage, source, target)
                found[np.ix_(rows, columns)] = known[key]
        place = {site: column for column, site in enumerate(targets)}
        for row, source in enumerate(sources):
            if source in place:
                found[row, place[source]] = 0.0 if stage.may_share else self._least_move(stage, source, source)
        return found

    def _least_move(self, stage: Stage, source: Site, target: Site) -> float:
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


def _by_kind(sites: Sequence[Site]) -> list[list[int]]:
    """The positions of the sites that are the same but for what a move of their weights does not see."""
    kinds: dict[object, list[int]] = {}
    for position, (part, layout) in enumerate(sites):
        kinds.setdefault((part, layout.num_ranks, layout.tp, layout.pp, layout.ep, layout.etp), []).append(position)
    return list(kinds.values())


@lru_cache(maxsize=4096)  # many layouts have the same schedules
def _alike(schedule: Schedule) -> tuple[Schedule, Schedule]:
    """The smallest of those that take more memory with their rows, and the quickest of those that keep less."""
    family = replace(schedule, micro_batch_size=1, micro_batch_tokens=0, generation_slots=0)
    return family, replace(schedule, recompute=Recompute.NONE, offload=Offload.NONE)


def _layouts(facts: Facts, stage: Stage, num_ranks: int) -> Iterator[Layout]:
    """Every way to write a number of ranks as tp x pp x cp x dp, with what else a layout has; legal or not."""
    num_layers = facts.models.spec(stage.role).num_layers if stage.trains else 1
    for tp in divisors(num_ranks):
        for pp in divisors(num_ranks // tp):
            for cp in divisors(num_ranks // (tp * pp)):
                dp = num_ranks // (tp * pp * cp)
                for sp in (False, True) if tp > 1 else (False,):
                    for layout in offered_layouts(facts, stage, Layout(tp=tp, pp=pp, dp=dp, sp=sp, cp=cp)):
                        for vpp in divisors(num_layers) if pp > 1 else (1,):
                            yield replace(layout, vpp=vpp)
