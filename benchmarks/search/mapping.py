"""HybridFlow's auto-mapping (arXiv:2409.19256, algorithms 1 and 2) on our cost model.

    for every placement, a partition of the models into sets that share devices
        for every allocation of devices to the sets in which all models fit
            each model gets the parallelism that is fastest on its set's devices
            cost = sum over the phases (generation, preparation, training) of the slowest set,
                   a set's models running one after another
    answer = the placement and allocation of the least cost

As there, the actor generates in a layout of its own, and is resharded from its training layout; every other model has
one layout. Sets get powers of two of the devices, as our pools do. The answer is then timed by our evaluator, which
lets every stage start as soon as it can.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.search.by_hand import WHOLE_BATCHES, synchronous
from benchmarks.search.unproven import unproven
from meshwright.cost_models.protocol import CostModel, RefitQuery
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.evaluate import refit_name
from meshwright.planner.plan.pins import Pin, Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.pool_rules import pool_sizes
from meshwright.planner.plan.steps_ahead import synchronous as no_stage_ahead
from meshwright.planner.search.assemble import Pick
from meshwright.planner.search.choice_costs import Candidate
from meshwright.planner.search.frontiers import frontier
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.stages import Role

Seconds = tuple[float, float, float]
"""Of the three phases: generation, preparation, training."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run some models on one set of devices: seconds of each phase, bytes on a rank, candidates by stage."""

    seconds: Seconds
    resident_bytes: float
    transient_bytes: float
    chosen: Mapping[str, Candidate]

    def beside(self, other: Way, more_seconds: float = 0.0, shared_bytes: float = 0.0) -> Way:
        """Both, one after another on the same devices; `more_seconds` of generation go into resharding."""
        generation, preparation, training = (a + b for a, b in zip(self.seconds, other.seconds, strict=True))
        return Way(
            seconds=(generation + more_seconds, preparation, training),
            resident_bytes=self.resident_bytes + other.resident_bytes - shared_bytes,
            transient_bytes=max(self.transient_bytes, other.transient_bytes),
            chosen={**self.chosen, **other.chosen},
        )

    @property
    def peak_bytes(self) -> float:
        return self.resident_bytes + self.transient_bytes


def auto_mapping(facts: Facts, model: CostModel) -> Plan | None:
    """The plan of the mapping that the algorithm answers; None when no mapping fits."""
    facts = synchronous(facts)
    usable = facts.cluster.device.usable_bytes
    sizes_of_sets = pool_sizes(facts.cluster)
    known = {(role, size): _ways(facts, model, role, size) for role in PPO_GRAPH.roles for size in sizes_of_sets}
    groups = {group for placement in partitions(PPO_GRAPH.roles) for group in placement}
    fastest = {
        (group, size): _fastest(usable, [known[role, size] for role in group])
        for group in groups
        for size in sizes_of_sets
    }
    best: tuple[float, Mapping[str, Pick]] | None = None
    for placement in partitions(PPO_GRAPH.roles):
        for sizes in allocations(facts.cluster.num_ranks, len(placement)):
            sets = [fastest[pair] for pair in zip(placement, sizes, strict=True)]
            ways = [way for way in sets if way is not None]
            cost = sum(max(way.seconds[phase] for way in ways) for phase in range(3)) if ways else math.inf
            if len(ways) == len(sets) and (best is None or cost < best[0]):
                best = cost, _picks(sizes, ways)
    if best is None:
        return None
    order = (*map(refit_name, facts.graph.refit_targets), *(stage.name for stage in PPO_GRAPH.stages))
    return unproven(
        facts, model, name="HybridFlow auto-mapping", picks=best[1], order=order, ahead=no_stage_ahead(facts.graph)
    )


def partitions(roles: Sequence[Role]) -> Iterator[tuple[tuple[Role, ...], ...]]:
    """Every way to part the models into sets: Bell(4) = 15 of them for four models."""
    if not roles:
        yield ()
        return
    first, rest = roles[0], roles[1:]
    for smaller in partitions(rest):
        yield ((first,), *smaller)
        for index, group in enumerate(smaller):
            yield (*smaller[:index], (first, *group), *smaller[index + 1 :])


def allocations(num_ranks: int, num_sets: int) -> Iterator[tuple[int, ...]]:
    """Every way to give all ranks to so many sets, a power of two to each unless one set has them all."""
    if num_sets == 1:
        yield (num_ranks,)
        return
    size = 1
    while size <= num_ranks - (num_sets - 1):
        for others in allocations(num_ranks - size, num_sets - 1):
            if all(other & (other - 1) == 0 for other in others):
                yield (size, *others)
        size *= 2


def _picks(sizes: Sequence[int], ways: Sequence[Way]) -> dict[str, Pick]:
    """The largest set first, so that every pool begins at a multiple of its size."""
    picks: dict[str, Pick] = {}
    first = 0
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        ranks, chosen = Ranks(first, sizes[index]), ways[index].chosen
        picks |= {stage: Pick(ranks, candidate.choice) for stage, candidate in chosen.items()}
        first += sizes[index]
    return picks


def _fastest(usable: int, models: Sequence[Sequence[Way]]) -> Way | None:
    """The models of a set, each as fast as memory lets all of them be."""
    together: Sequence[Way] = models[0]
    for ways in models[1:]:
        pairs = (one.beside(other) for one in together for other in ways)
        together = undominated(pair for pair in pairs if pair.peak_bytes <= usable)
    fitting = [way for way in together if way.peak_bytes <= usable]
    return min(fitting, key=lambda way: math.fsum(way.seconds), default=None)


def _ways(facts: Facts, model: CostModel, role: Role, size: int) -> tuple[Way, ...]:
    """Every undominated way to run one model on so many devices."""
    found: dict[str, tuple[Way, ...]] = {}
    for stage in (stage for stage in PPO_GRAPH.stages if stage.role is role):
        pins = (*WHOLE_BATCHES, Pin(stage.name, "pool", Ranks(0, size)))
        candidates = frontier(facts, model, stage, pins).candidates_on(Ranks(0, size))
        found[stage.name] = tuple(map(_alone(stage.name), candidates))
    if role not in PPO_GRAPH.train_stage:
        (only,) = found.values()
        return undominated(only)
    trained = PPO_GRAPH.train_stage[role]
    ways = found.pop(trained)
    scoring = next(name for name in found if not PPO_GRAPH.by_name[name].generates)
    ways = undominated(
        one.beside(other, shared_bytes=_weights(other, scoring))
        for one in ways
        for other in found[scoring]
        if _layout(one, trained) == _layout(other, scoring)
    )
    for name in (name for name in found if PPO_GRAPH.by_name[name].generates):
        resharded = _resharder(facts, model, trained, name)
        ways = undominated(resharded(one, other) for one in ways for other in found[name])
    return ways


def _resharder(facts: Facts, model: CostModel, trained: str, name: str) -> Callable[[Way, Way], Way]:
    """Puts training and generation side by side: resharded, unless they have one layout and share their weights."""
    spec = facts.models.spec(PPO_GRAPH.by_name[name].role)
    known: dict[tuple[Layout, Layout], float] = {}

    def seconds(source: Layout, target: Layout) -> float:
        if (source, target) not in known:
            move = RefitQuery(model=spec, source=source, target=target, overlap=source.num_ranks)
            known[source, target] = model.refit_seconds(move).total
        return known[source, target]

    def resharded(one: Way, other: Way) -> Way:
        source, target = _layout(one, trained), _layout(other, name)
        if source == target:
            return one.beside(other, shared_bytes=_weights(other, name))
        return one.beside(other, more_seconds=seconds(source, target))

    return resharded


def _alone(stage: str) -> Callable[[Candidate], Way]:
    """The way to run one stage that each of its candidates is."""
    kind = PPO_GRAPH.by_name[stage]

    def way(candidate: Candidate) -> Way:
        total = candidate.seconds
        seconds = (total * kind.generates, total * (not kind.generates and not kind.trains), total * kind.trains)
        return Way(
            seconds=seconds,
            resident_bytes=candidate.resident_bytes,
            transient_bytes=candidate.transient_bytes,
            chosen={stage: candidate},
        )

    return way


def _layout(way: Way, stage: str) -> Layout:
    return way.chosen[stage].layout


def _weights(way: Way, stage: str) -> float:
    return way.chosen[stage].weights_bytes


def undominated(ways: Iterable[Way]) -> tuple[Way, ...]:
    """The ways that no other beats in seconds, resident and transient bytes."""
    kept: list[Way] = []
    steps: list[tuple[float, float]] = []  # resident bytes ascending, least transient bytes so far descending
    for way in sorted(ways, key=lambda way: (math.fsum(way.seconds), way.resident_bytes, way.transient_bytes)):
        resident, transient = way.resident_bytes, way.transient_bytes
        at = bisect_right(steps, (resident, math.inf))
        if at and steps[at - 1][1] <= transient:
            continue
        kept.append(way)
        after = next((i for i in range(at, len(steps)) if steps[i][1] < transient), len(steps))
        steps[at:after] = [(resident, transient)]
    return tuple(kept)
