"""Every choice that the rules allow a stage, and what the cost model says of it: enumerated anew, for no search's word
is taken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.question import Call, CostModel, LayoutCosts
from meshwright.planner.plan.calls import Choice, call_of
from meshwright.planner.plan.edges import handovers
from meshwright.planner.plan.host_workers import arrival_seconds, reward_readers
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pools import first_ranks, pool_sizes
from meshwright.planner.plan.rules import room_on, schedules, streaming_rules
from meshwright.planner.plan.steps_ahead import Scope, ScopeKey, max_deferral
from meshwright.planner.proof.allowance import Allowance, Least, ShortTurn
from meshwright.planner.proof.front import Front
from meshwright.planner.proof.legal import Family, families_in, legal_layouts
from meshwright.planner.proof.refits import Refits, Site
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Stage, StageGraph

_PLAIN = ("seconds", "tail_seconds", "own", "weights", "transient")
AMOUNTS = ("ranks", *_PLAIN, "work", "tail_work", *(f"{name}_in_all" for name in _PLAIN[2:]))
"""Of a choice: ranks; seconds, and those that remain when what it streams has ended; bytes on a rank that stay, but for
weights that stages of its role may share, these weights, and bytes that are there while it runs; and the last five
times the ranks."""


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
    """The choices of every stage under a scope; the seconds of what is handed over within a turn, and of what is handed
    to a turn that comes later, with by how many turns; the least seconds of every refit by the stage that it serves,
    [sites of the training stage, sites of the stage]; and the seconds from the start of a generation before which the
    stages that are `late` do not have the rewards that they read."""

    graph: StageGraph
    num_ranks: int
    room_bytes: float
    scope: Scope
    lags: Mapping[tuple[str, str], float]
    choices: Mapping[str, Choices]
    refits: Mapping[str, NDArray[np.float64]]
    carried: Mapping[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    arrival_seconds: float = 0.0
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
    sites: dict[Site, int] = field(default_factory=dict)
    _families: dict[int, tuple[object, tuple[Family, ...]]] = field(default_factory=dict)

    def spaces(self, scopes: Sequence[Scope]) -> tuple[Space, ...]:
        """Those of some scopes; the last come first, where stages work ahead and least is left out."""
        return tuple(self.space(scope) for scope in reversed(scopes))[::-1]

    def space(self, scope: Scope) -> Space:
        """All of a scope."""
        facts, ahead = self.facts, scope.ahead
        edges = [(h, ahead[h.producer] - ahead[h.consumer]) for h in handovers(facts, self.model)]
        lags = {(edge.producer, edge.consumer): edge.cost.total for edge, turns in edges if not turns}
        choices = self._allowed(scope, lags)
        return Space(
            graph=facts.graph,
            num_ranks=facts.cluster.num_ranks,
            room_bytes=max(part.device.usable_bytes for part in facts.cluster.parts),
            scope=scope,
            lags=lags,
            choices=choices,
            carried={(edge.producer, edge.consumer): (turns, edge.cost.total) for edge, turns in edges if turns},
            late=frozenset(reward_readers(facts)),
            arrival_seconds=self._arrival_seconds,
            refits={stage.name: self._refits_of(stage, choices) for stage in facts.graph.stages if stage.is_refit},
        )

    @cached_property
    def _arrival_seconds(self) -> float:
        return arrival_seconds(self.facts)

    @cached_property
    def _refits(self) -> Refits:
        return Refits(self.facts, self.model)

    def _refits_of(self, stage: Stage, choices: Mapping[str, Choices]) -> NDArray[np.float64]:
        numbered = list(self.sites)
        ends = (choices[name].sites for name in (self.facts.graph.trainer_of(stage.name), stage.name))
        sources, targets = ([numbered[number] for number in some] for some in ends)
        return self._refits.seconds(stage, sources, targets)

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
                    numbers.append(self.sites.setdefault(site, len(self.sites)))
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
                for layout in legal_layouts(self.facts, stage, size, part):
                    yield Site(part, layout)

    def _rows(self, stage: Stage, scope: Scope, site: Site, allowance: Allowance) -> Iterator[tuple[float, ...]]:
        """The ranks and plain amounts of what a site has that fits, is not too slow and not beaten (`Front`)."""
        (part, layout), deferral = site, max_deferral(scope.ahead, self.facts.staleness)
        device_bytes, host_bytes = room_on(self.facts, part)
        legal = [
            family
            for family in self._families_of(stage, scope, site)
            if not streaming_rules(self.facts, layout, family.plain, part)
        ]
        if not legal:
            return iter(())
        asked = self._call(stage, scope, site, legal[0].members[0][0])
        costs = self.model.on_layout(replace(asked, max_deferral=deferral))
        front = Front(
            num_ranks=layout.num_ranks,
            shares=stage.may_share,
            most_seconds=self.most_seconds,
            allowance=allowance,
            costs=costs,
            least=lambda quickest: self._least_seconds(stage, scope, site, quickest, costs),
            fits=lambda held: held.peak <= device_bytes and held.host <= host_bytes,
        )
        for family in legal:
            front.add(family)
        return ((layout.num_ranks, *row) for row in front.rows)

    def _call(self, stage: Stage, scope: Scope, site: Site, schedule: Schedule) -> Call:
        deferral = max_deferral(scope.ahead, self.facts.staleness)
        return call_of(self.facts, stage, Choice(site.layout, schedule), deferral=deferral, part=site.part)

    def _families_of(self, stage: Stage, scope: Scope, site: Site) -> tuple[Family, ...]:
        """All schedules of a site; on two kinds of nodes with their rows dealt."""
        facts, (part, layout) = self.facts, site
        every = schedules(facts, stage, layout, scope)
        if len(facts.cluster.parts_of(part)) > 1:
            return families_in(self.model.dealt(self._call(stage, scope, site, one)) for one in every)
        if id(every) not in self._families:  # very many sites have the same, which is kept with its families
            self._families[id(every)] = every, families_in(every)
        return self._families[id(every)][1]

    def _least_seconds(self, stage: Stage, scope: Scope, site: Site, quickest: Schedule, costs: LayoutCosts) -> float:
        """Seconds below which no schedule is that differs from this one in what only takes longer: of a generation they
        are told without playing its turns, and none of what streams."""
        if stage.generates:
            return self.model.least_generation_seconds(self._call(stage, scope, site, quickest))
        return costs.seconds(quickest) if self.model.seconds_grow and not quickest.chunk_tokens else 0.0
