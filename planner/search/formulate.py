"""Formulates the search as a `Problem`: seconds become ticks and bytes become blocks here and nowhere else.

Ticks are rounded down, so that a bound in ticks is a bound in seconds; blocks are rounded up, so that what fits in
blocks fits in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from meshwright.cost_models.question import CostModel, Move
from meshwright.planner.plan.edges import Handover
from meshwright.planner.plan.evaluate import refit_name
from meshwright.planner.plan.host_workers import reward_readers
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.pools import first_ranks, pool_sizes, pool_step
from meshwright.planner.plan.steps_ahead import StepsAhead, synchronous
from meshwright.planner.search.candidates import Candidate
from meshwright.planner.search.frontier import Frontier
from meshwright.planner.solver.problem import (
    MAX_SUM,
    CallOptions,
    CallRun,
    CarriedPrecedence,
    Option,
    Place,
    Precedence,
    Problem,
    Transfer,
)
from meshwright.profiles.cluster import AnyCluster, most_usable_bytes
from meshwright.profiles.layout import Layout
from meshwright.profiles.stages import GENERATE, Role, StageGraph

BLOCK_BYTES = 2**20
"""Of a block of memory, at least: fine beside any device. Of so many or so large choices that their blocks would add up
to more than a solver handles exactly, blocks are twice as large, or more."""

_TICKS_PER_STEP = 10**6
"""Ticks in about one step: the bound is then good to a few millionths."""

_ROOM = 2
"""Of the largest sum of durations, the part that the slowest choices of all stages may take is one in so many."""


Behind: TypeAlias = Mapping[str, tuple[tuple[Ranks, Candidate], ...]]
"""The pool and the candidate behind each option of each call."""

_Known: TypeAlias = dict[tuple[Role, int, int, int, str, bool, int, bool], int]
"""Ticks of the moves of a role's weights, by all that these depend on: see `Move`."""


@dataclass(frozen=True, kw_only=True)
class Formulation:
    """The problem, the length of its tick, the size of its block, and the candidate and pool behind each option of each
    call.

    Where stages may be anywhere, the pool behind an option is the first of its size.
    """

    problem: Problem
    tick_seconds: float
    block_bytes: int
    behind: Behind


def refits(graph: StageGraph) -> tuple[tuple[str, str, str], ...]:
    """Of every refit its task, the stage that trains the weights and the stage that needs them."""
    return tuple((refit_name(t), graph.trainer_of(t), t) for t in graph.refit_targets)


def precedences(
    graph: StageGraph,
    handovers: Sequence[Handover],
    ahead: StepsAhead,
    tick: float,
    may_stream: Callable[[Handover], bool],
    *,
    late: Collection[str] = (),
) -> tuple[Precedence, ...]:
    """What waits for what in a turn: stages for their weights, and for the stages that they read from and that work on
    the same step. Stages that are `late` wait for rewards of what is generated too."""
    return (
        *(Precedence(refit_name(t), reader) for t in graph.refit_targets for reader in graph.refit_readers(t)),
        *(
            Precedence(
                h.producer,
                h.consumer,
                math.floor(h.cost.total / tick),
                streamed=may_stream(h),
                late=h.producer == GENERATE and h.consumer in late,
            )
            for h in handovers
            if ahead[h.producer] == ahead[h.consumer]
        ),
    )


def carried(
    handovers: Sequence[Handover], ahead: StepsAhead, tick: float, late: Collection[str] = ()
) -> tuple[CarriedPrecedence, ...]:
    """What waits for what across turns: a stage for those that it reads from and that work further ahead.

    A turn of whole ticks may be a tick longer than one of seconds, and so may each turn in between: lags are shorter by
    as much. What then takes no time is never late, as every stage ends within its turn.
    """
    found = []
    for h in handovers:
        if turns := ahead[h.producer] - ahead[h.consumer]:
            lag, is_late = math.floor(h.cost.total / tick) - turns, h.producer == GENERATE and h.consumer in late
            if lag > 0 or is_late:
                found.append(CarriedPrecedence(h.producer, h.consumer, turns, lag, is_late))
    return tuple(found)


def formulate(
    facts: Facts,
    model: CostModel,
    frontiers: Sequence[Frontier],
    handovers: Sequence[Handover],
    ahead: StepsAhead | None = None,
    *,
    by_pool: bool = False,
) -> Formulation:
    """The problem of one turn: a stage waits for the stages that it reads from and that work on the same step.

    Stages may be anywhere, unless some pools are excluded or it is asked that every pool has options of its own. They
    all work on the same step where `ahead` is not given.
    """
    graph, ahead = facts.graph, ahead or synchronous(facts.graph)
    tick = _tick_seconds(frontiers, handovers)
    late = reward_readers(facts)
    anywhere = not by_pool and all(_is_every_block(facts.cluster, found.pools) for found in frontiers)
    behind = {
        found.stage.name: tuple(
            (ranks, candidate)
            for ranks in found.pools
            if not (anywhere and ranks.first_rank)
            for candidate in found.on(ranks)
        )
        for found in frontiers
    }
    shared = {name: graph.by_name[name].may_share for name in behind}
    block_bytes = _block_bytes(facts.cluster.num_ranks, behind)
    device_blocks = most_usable_bytes(facts.cluster) // block_bytes

    def option(ranks: Ranks, candidate: Candidate, is_shared: bool) -> Option:
        part = facts.cluster.part_of_pool(ranks.ranks)
        return _option(tick, block_bytes, ranks, candidate, part=part, is_shared=is_shared)

    calls = (
        *(CallOptions(name, tuple(option(*pair, shared[name]) for pair in pairs)) for name, pairs in behind.items()),
        *_lacking(facts.cluster, device_blocks, block_bytes),
    )
    known: _Known = {}
    transfers = tuple(
        _transfer(facts, model, tick, behind, target, known=known, anywhere=anywhere) for target in graph.refit_targets
    )
    problem = Problem(
        num_ranks=facts.cluster.num_ranks,
        device_blocks=device_blocks,
        calls=calls,
        tasks=(*transfers, *(CallRun(name=name, call=name) for name in behind)),
        precedences=precedences(
            graph, handovers, ahead, tick, lambda handover: _may_stream(behind, handover), late=late
        ),
        carried=carried(handovers, ahead, tick, late),
        copies=tuple(graph.sharers(role) for role in graph.train_stage),
        anywhere=anywhere,
        step=pool_step(facts.cluster.parts[0]) if anywhere else 0,
    )
    return Formulation(problem=problem, tick_seconds=tick, block_bytes=block_bytes, behind=behind)


def _block_bytes(num_ranks: int, behind: Behind) -> int:
    """A power of two such that the blocks of all choices that may be on a rank add up to what a solver handles."""
    opens = [0.0] * (num_ranks + 1)
    for pairs in behind.values():
        for ranks, one in pairs:
            num_bytes = one.resident_bytes + one.weights_bytes + one.transient_bytes
            opens[ranks.first_rank] += num_bytes
            opens[ranks.first_rank + ranks.num_ranks] -= num_bytes
    block, most = BLOCK_BYTES, max(accumulate(opens))
    while most / block > MAX_SUM / _ROOM:
        block *= 2
    return block


def _lacking(cluster: AnyCluster, device_blocks: int, block_bytes: int) -> Iterator[CallOptions]:
    """Calls that never run: what the devices of a part have less than the largest ones is held there by one."""
    for first, part in zip(cluster.first_ranks, cluster.parts, strict=True):
        if lacking := device_blocks - part.device.usable_bytes // block_bytes:
            place = Place(first, part.num_ranks, "lacking")
            yield CallOptions(f"lacking at {first}", (Option(place=place, ticks=0, resident_blocks=lacking),))


def _is_every_block(cluster: AnyCluster, pools: Collection[Ranks]) -> bool:
    """Whether these are all that a pool may be, and all nodes are of one kind."""
    return len(cluster.parts) == 1 and len(pools) == sum(
        len(first_ranks(cluster, size)) for size in pool_sizes(cluster)
    )


def _tick_seconds(frontiers: Sequence[Frontier], handovers: Sequence[Handover]) -> float:
    """A power of ten such that a step, if every stage ran at its fastest, has about a million ticks; fewer when the
    slowest choices of a large cluster, and what is handed over, would otherwise have too many to be added up."""
    every = [[c.seconds for found in fs.candidates.values() for c in found] for fs in frontiers]
    step = math.fsum(min(seconds, default=0.0) for seconds in every) or 1.0
    slowest = math.fsum(max(seconds, default=0.0) for seconds in every)
    latest = max((c.late_seconds for fs in frontiers for found in fs.candidates.values() for c in found), default=0.0)
    slowest += math.fsum(h.cost.total + latest for h in handovers)
    digits = math.floor(math.log10(step)) + 1 - math.log10(_TICKS_PER_STEP)
    return float(10.0 ** max(digits, math.ceil(math.log10(max(slowest, step) * _ROOM / MAX_SUM))))


def _option(tick: float, block_bytes: int, ranks: Ranks, candidate: Candidate, *, part: int, is_shared: bool) -> Option:
    """One choice on one pool; weights that no other stage may use belong to one stage, and may wait in the host."""
    weights = math.ceil(candidate.weights_bytes / block_bytes)
    return Option(
        place=Place(ranks.first_rank, ranks.num_ranks, _place_name(part, candidate.layout)),
        ticks=math.floor(candidate.seconds / tick),
        early_ticks=_early_ticks(tick, candidate),
        late_ticks=math.floor(candidate.late_seconds / tick),
        resident_blocks=weights + math.ceil(candidate.private_bytes / block_bytes),
        shared_blocks=weights if is_shared else 0,
        transient_blocks=math.ceil(candidate.transient_bytes / block_bytes),
    )


def _place_name(part: int, layout: Layout) -> str:
    """Weights cut alike on different kinds of nodes are at different places. Pipelines in chunks are at one, however
    many the chunks: no other stage shares them, and they are refit as any other number of them is."""
    if layout.vpp > 2:
        layout = replace(layout, vpp=2)
    return f"{layout}@{part}" if part else str(layout)


def _may_stream(behind: Behind, handover: Handover) -> bool:
    """Whether some choice of the consumer reads chunks while the producer goes on."""
    chosen = behind[handover.consumer]
    return handover.producer == GENERATE and any(candidate.schedule.chunk_tokens for _, candidate in chosen)


def _early_ticks(tick: float, candidate: Candidate) -> int:
    """Ticks before the end of what a stage streams at which it may start; rounded up, so that a bound stays one."""
    if not candidate.schedule.chunk_tokens:
        return 0
    early = math.ceil((candidate.seconds - candidate.tail_seconds) / tick)
    return min(early, math.floor(candidate.seconds / tick))


def _transfer(
    facts: Facts,
    model: CostModel,
    tick: float,
    behind: Behind,
    target: str,
    *,
    known: _Known,
    anywhere: bool,
) -> Transfer:
    """The refit of one stage from the training stage of its role, between every two layouts they may have.

    `known` grows.
    """
    role, source = facts.graph.by_name[target].role, facts.graph.trainer_of(target)
    spec, stage = facts.models.spec(role), facts.graph.by_name[target]
    overlaps = _overlaps([pool for pool, _ in behind[source]], [pool for pool, _ in behind[target]])
    if anywhere:
        overlaps = {
            (one, other): (0, min(one, other)) if one + other <= facts.cluster.num_ranks else (min(one, other),)
            for one, other in overlaps
        }

    def ticks_between(one: _Shard, other: _Shard) -> list[tuple[int, int]]:
        """By what the pools have in common."""
        slices, found = one.layout.slices_for(other.layout), []
        for overlap in overlaps.get((one.num_ranks, other.num_ranks), ()):
            key = role, one.part, one.num_ranks, slices, other.cut, one.name == other.name, overlap, stage.generates
            if key not in known:
                move = Move(
                    model=spec,
                    source=one.layout,
                    target=other.layout,
                    overlap=overlap,
                    source_part=one.part,
                    target_part=other.part,
                    generates=stage.generates,
                    quantises=stage.is_quantised,
                )
                known[key] = math.floor(model.move_seconds(move).total / tick)
            found.append((overlap, known[key]))
        return found

    sources, targets = (_shards(facts.cluster, behind[end]) for end in (source, target))
    ticks = _between_all(sources, targets, ticks_between)
    return Transfer(name=refit_name(target), source=source, target=target, occupies="both", ticks=ticks)


class _Shard(NamedTuple):
    """A layout on a part of the cluster; `cut` names those that cut weights alike there."""

    part: int
    layout: Layout
    num_ranks: int
    name: str
    cut: str


def _between_all(
    sources: Sequence[_Shard],
    targets: Sequence[_Shard],
    ticks_between: Callable[[_Shard, _Shard], list[tuple[int, int]]],
) -> dict[tuple[str, str, int], int]:
    """The ticks between all layouts, asked once for those that cut weights alike.

    A layout that stays the same keeps weights in place, and is asked for itself.
    """
    found: dict[tuple[str, str, int], int] = {}
    by_target = _by_cut(targets)
    for ones in _by_cut(sources):
        row = []
        for others in by_target:
            pair = next(((one, other) for one in ones for other in others if one.name != other.name), None)
            if pair:
                row += [(other.name, *lasts) for lasts in ticks_between(*pair) for other in others]
        for one in ones:
            found.update({(one.name, other, overlap): lasts for other, overlap, lasts in row})
    named = {other.name: other for other in targets}
    for one in sources:
        if one.name in named:
            found.update(
                {(one.name, one.name, overlap): lasts for overlap, lasts in ticks_between(one, named[one.name])}
            )
    return found


def _by_cut(shards: Sequence[_Shard]) -> list[list[_Shard]]:
    """Those that cut weights alike together."""
    found: dict[str, list[_Shard]] = {}
    for shard in shards:
        found.setdefault(shard.cut, []).append(shard)
    return list(found.values())


def _shards(cluster: AnyCluster, pairs: Sequence[tuple[Ranks, Candidate]]) -> list[_Shard]:
    """The layouts of some pools, each once for each part."""
    found = dict.fromkeys((cluster.part_of_pool(ranks.ranks), candidate.layout) for ranks, candidate in pairs)
    shards = (
        _Shard(part, one, one.num_ranks, _place_name(part, one), _place_name(part, one.cut)) for part, one in found
    )
    return list({shard.name: shard for shard in shards}.values())


def _overlaps(sources: Sequence[Ranks], targets: Sequence[Ranks]) -> dict[tuple[int, int], tuple[int, ...]]:
    """How many ranks pools of two sizes can have in common."""
    found: dict[tuple[int, int], set[int]] = {}
    for one in dict.fromkeys(sources):
        for other in dict.fromkeys(targets):
            place, there = (Place(r.first_rank, r.num_ranks, "") for r in (one, other))
            found.setdefault((one.num_ranks, other.num_ranks), set()).add(place.overlap(there))
    return {sizes: tuple(sorted(overlaps)) for sizes, overlaps in found.items()}
