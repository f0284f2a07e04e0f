"""Formulates a search case as a `Problem`; only here do seconds become ticks and bytes become memory units.

Ticks are rounded down, so that a lower bound in ticks is one in seconds. Units are rounded up, so that what fits in
units fits in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import NamedTuple, TypeAlias

import numpy as np

from meshwright.cost_models.protocol import CostModel, PlacedLayout, RefitTable
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import StageTransfer
from meshwright.planner.plan.evaluate import refit_name
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.pool_rules import first_ranks, pool_sizes, pool_step
from meshwright.planner.plan.reward_workers import reward_readers
from meshwright.planner.plan.steps_ahead import StepsAhead, synchronous
from meshwright.planner.search.choice_costs import Candidate
from meshwright.planner.search.frontiers import Frontier
from meshwright.planner.solver.problem import (
    MAX_SUM,
    CarriedPrecedence,
    Mode,
    Precedence,
    Problem,
    Resource,
    Run,
    Task,
    Transfer,
)
from meshwright.planner.solver.transfer_ticks import TransferTicks
from meshwright.profiles.elementwise import IntArray
from meshwright.profiles.hardware import AnyCluster, max_usable_bytes
from meshwright.profiles.layout import Layout
from meshwright.profiles.stages import GENERATE, StageGraph

MIN_UNIT_BYTES = 2**20
"""Smallest memory unit, small compared to any device.

It is doubled until the sum over all choices is one that the solver handles exactly.
"""

_TICKS_PER_STEP = 10**6
"""Maximum number of ticks in a step of the fastest choices; it has at least a tenth of this, unless ticks are longer
to stay within the solver's largest sum."""

_SUM_MARGIN = 2
"""The durations of the slowest choices of all stages add up to at most the solver's largest sum divided by this."""


ChoicesByMode: TypeAlias = Mapping[str, tuple[tuple[Ranks, Candidate], ...]]
"""The pool and the candidate that each mode of each task represents."""


@dataclass(frozen=True, kw_only=True)
class Formulation:
    """The problem, its units of time and memory, and the pool and candidate that each mode represents.

    If stages may be placed anywhere, the pool of a mode is the first one of its size.
    """

    problem: Problem
    tick_seconds: float
    unit_bytes: int
    option_choices: ChoicesByMode


def refits(graph: StageGraph) -> tuple[tuple[str, str, str], ...]:
    """Return for every refit its task, the stage that trains the weights and the stage that needs them."""
    return tuple((refit_name(t), graph.trainer_of(t), t) for t in graph.refit_targets)


def precedences(
    graph: StageGraph,
    transfers: Sequence[StageTransfer],
    ahead: StepsAhead,
    tick: float,
    may_stream: Callable[[StageTransfer], bool],
    *,
    late: Collection[str] = (),
) -> tuple[Precedence, ...]:
    """Return the precedences within a period: a stage waits for its weights, and for its inputs from the same step.

    Stages that are `late` also wait for the rewards of what was generated. `tick` is in seconds.
    """
    return (
        *(Precedence(refit_name(t), reader) for t in graph.refit_targets for reader in graph.refit_readers(t)),
        *(
            Precedence(
                transfer.producer,
                transfer.consumer,
                math.floor(transfer.cost.total / tick),
                streamed=may_stream(transfer),
                late=transfer.producer == GENERATE and transfer.consumer in late,
            )
            for transfer in transfers
            if ahead[transfer.producer] == ahead[transfer.consumer]
        ),
    )


def carried_precedences(
    transfers: Sequence[StageTransfer], ahead: StepsAhead, tick: float, late: Collection[str] = ()
) -> tuple[CarriedPrecedence, ...]:
    """Return the precedences across periods: a stage waits for inputs from stages that work further ahead.

    A period in whole ticks may be a tick longer than in seconds, so a lag is reduced by one tick for each period that
    it spans. A precedence whose lag vanishes is left out: it always holds, because every stage ends within its period.
    """
    between_periods = []
    for transfer in transfers:
        if num_periods := ahead[transfer.producer] - ahead[transfer.consumer]:
            lag, is_late = (
                math.floor(transfer.cost.total / tick) - num_periods,
                transfer.producer == GENERATE and transfer.consumer in late,
            )
            if lag > 0 or is_late:
                between_periods.append(
                    CarriedPrecedence(transfer.producer, transfer.consumer, num_periods, lag, is_late)
                )
    return tuple(between_periods)


def formulate(
    facts: Facts,
    model: CostModel,
    frontiers: Sequence[Frontier],
    transfers: Sequence[StageTransfer],
    ahead: StepsAhead | None = None,
    *,
    by_pool: bool = False,
    is_timed: bool = True,
) -> Formulation:
    """Return the problem of one period. A stage waits for the stages that it reads from, if they work on the same step.

    Stages may be placed anywhere, unless some pools are excluded or `by_pool` gives every pool modes of its own.
    Unless `is_timed`, only memory matters, and refits take no time.
    Without `ahead` all stages work on the same step.
    """
    graph, ahead = facts.graph, ahead or synchronous(facts.graph)
    tick = _tick_seconds(frontiers, transfers)
    late = reward_readers(facts)
    anywhere = not by_pool and all(_is_every_pool(facts.cluster, frontier.pools) for frontier in frontiers)
    choices = {
        frontier.stage.name: tuple(
            (ranks, candidate)
            for ranks in frontier.pools
            if not (anywhere and ranks.first_rank)
            for candidate in frontier.candidates_on(ranks)
        )
        for frontier in frontiers
    }
    is_shareable = {name: graph.by_name[name].may_share for name in choices}
    unit_bytes = _unit_bytes(facts.cluster.num_ranks, choices)
    device_units = max_usable_bytes(facts.cluster) // unit_bytes

    def mode(ranks: Ranks, candidate: Candidate, is_shared: bool) -> Mode:
        part = facts.cluster.part_of_pool(ranks.ranks)
        return _mode(tick, unit_bytes, ranks, candidate, part=part, is_shared=is_shared)

    tasks = (
        *(
            Task(name, _with_one_copy_size([mode(*pair, is_shareable[name]) for pair in pairs]))
            for name, pairs in choices.items()
        ),
        *_missing_memory(facts.cluster, device_units, unit_bytes),
    )
    refits = tuple(
        _transfer(facts, model, tick, choices, target, anywhere=anywhere)
        if is_timed
        else Transfer(
            name=refit_name(target),
            source=graph.trainer_of(target),
            target=target,
            occupies="both",
            ticks=TransferTicks(),
        )
        for target in graph.refit_targets
    )
    problem = Problem(
        num_ranks=facts.cluster.num_ranks,
        device_units=device_units,
        tasks=tasks,
        activities=(*refits, *(Run(name=name, task=name) for name in choices)),
        precedences=precedences(
            graph, transfers, ahead, tick, lambda transfer: _may_stream(choices, transfer), late=late
        ),
        carried=carried_precedences(transfers, ahead, tick, late),
        sharing_groups=tuple(graph.sharers(role) for role in graph.train_stage),
        anywhere=anywhere,
        range_step=pool_step(facts.cluster.parts[0]) if anywhere else 0,
    )
    return Formulation(problem=problem, tick_seconds=tick, unit_bytes=unit_bytes, option_choices=choices)


def _unit_bytes(num_ranks: int, choices: ChoicesByMode) -> int:
    """Return the bytes of a memory unit.

    It is a power of two for which all choices on one rank add up to what the solver handles exactly.
    """
    changes = [0.0] * (num_ranks + 1)
    for pairs in choices.values():
        for ranks, candidate in pairs:
            num_bytes = candidate.resident_bytes + candidate.weights_bytes + candidate.transient_bytes
            changes[ranks.first_rank] += num_bytes
            changes[ranks.first_rank + ranks.num_ranks] -= num_bytes
    unit, max_bytes = MIN_UNIT_BYTES, max(accumulate(changes))
    while max_bytes / unit > MAX_SUM / _SUM_MARGIN:
        unit *= 2
    return unit


def _missing_memory(cluster: AnyCluster, device_units: int, unit_bytes: int) -> Iterator[Task]:
    """Yield tasks that never run and hold, on each part of the cluster, the memory that its devices lack.

    The devices of a part are compared with the largest ones in the cluster.
    """
    for first, part in zip(cluster.first_ranks, cluster.parts, strict=True):
        if lacking_units := device_units - part.device.usable_bytes // unit_bytes:
            place = Resource(first, part.num_ranks, "lacking")
            yield Task(f"lacking at {first}", (Mode(resource=place, ticks=0, resident_units=lacking_units),))


def _is_every_pool(cluster: AnyCluster, pools: Collection[Ranks]) -> bool:
    """True if these are all pools that the cluster can have, and all nodes are of one kind."""
    return len(cluster.parts) == 1 and len(pools) == sum(
        len(first_ranks(cluster, size)) for size in pool_sizes(cluster)
    )


def _tick_seconds(frontiers: Sequence[Frontier], transfers: Sequence[StageTransfer]) -> float:
    """Return a power of ten for which a step, with every stage at its fastest, has 100,000 to a million ticks.

    It is larger if the slowest choices and the transfers between stages would otherwise add up to more than the
    solver's largest sum.
    """
    seconds_by_stage = [
        [candidate.seconds for candidates in frontier.candidates.values() for candidate in candidates]
        for frontier in frontiers
    ]
    step = math.fsum(min(seconds, default=0.0) for seconds in seconds_by_stage) or 1.0
    slowest = math.fsum(max(seconds, default=0.0) for seconds in seconds_by_stage)
    latest = max(
        (
            candidate.late_seconds
            for frontier in frontiers
            for candidates in frontier.candidates.values()
            for candidate in candidates
        ),
        default=0.0,
    )
    slowest += math.fsum(transfer.cost.total + latest for transfer in transfers)
    digits = math.floor(math.log10(step)) + 1 - math.log10(_TICKS_PER_STEP)
    return float(10.0 ** max(digits, math.ceil(math.log10(max(slowest, step) * _SUM_MARGIN / MAX_SUM))))


def _mode(tick: float, unit_bytes: int, ranks: Ranks, candidate: Candidate, *, part: int, is_shared: bool) -> Mode:
    """Build the mode of one choice on one pool.

    Weights that no other stage may share belong to the stage alone, and may be offloaded.
    """
    weights = math.ceil(candidate.weights_bytes / unit_bytes)
    return Mode(
        resource=Resource(ranks.first_rank, ranks.num_ranks, _resource_layout_name(part, candidate.layout)),
        ticks=math.floor(candidate.seconds / tick),
        early_ticks=_early_ticks(tick, candidate),
        late_ticks=math.floor(candidate.late_seconds / tick),
        resident_units=weights + math.ceil(candidate.private_bytes / unit_bytes),
        shared_units=weights if is_shared else 0,
        transient_units=math.ceil(candidate.transient_bytes / unit_bytes),
    )


def _with_one_copy_size(modes: Sequence[Mode]) -> tuple[Mode, ...]:
    """Return the modes with the same shared units wherever they have the same resource.

    They differ for interleaved pipelines of a model whose layers differ, by their number of chunks. No other stage
    shares these weights, so that the least of them may stand for all.
    """
    least: dict[Resource, int] = {}
    for mode in modes:
        least[mode.resource] = min(mode.shared_units, least.get(mode.resource, mode.shared_units))
    return tuple(
        mode if mode.shared_units == least[mode.resource] else replace(mode, shared_units=least[mode.resource])
        for mode in modes
    )


def _resource_layout_name(part: int, layout: Layout) -> str:
    """Name a layout on a part of the cluster; equal names mean that weights can be shared.

    Every interleaved pipeline has the same name whatever its number of chunks: no other stage shares its weights, and
    refits from it do not depend on the number.
    """
    if layout.vpp > 2:
        layout = replace(layout, vpp=2)
    return f"{layout}@{part}" if part else str(layout)


def _may_stream(choices: ChoicesByMode, transfer: StageTransfer) -> bool:
    """True if some choice of the consumer reads chunks while generation continues."""
    options = choices[transfer.consumer]
    return transfer.producer == GENERATE and any(candidate.schedule.chunk_tokens for _, candidate in options)


def _early_ticks(tick: float, candidate: Candidate) -> int:
    """Return how many ticks before the end of generation a streaming stage may start.

    They are rounded up to keep the lower bound valid.
    """
    if not candidate.schedule.chunk_tokens:
        return 0
    early = math.ceil((candidate.seconds - candidate.tail_seconds) / tick)
    return min(early, math.floor(candidate.seconds / tick))


def _transfer(
    facts: Facts, model: CostModel, tick: float, choices: ChoicesByMode, target: str, *, anywhere: bool
) -> Transfer:
    """Build the refit of one stage: its ticks from every layout of its role's training stage to each layout of its
    own."""
    source, stage = facts.graph.trainer_of(target), facts.graph.by_name[target]
    overlaps = _overlaps([pool for pool, _ in choices[source]], [pool for pool, _ in choices[target]])
    if anywhere:  # two pools are then disjoint, if both fit, or nested
        overlaps = {
            (one, other): (0, min(one, other)) if one + other <= facts.cluster.num_ranks else (min(one, other),)
            for one, other in overlaps
        }
    sources, targets = (_shards(facts.cluster, choices[end]) for end in (source, target))
    pairs = _refit_pairs(sources, targets)
    rows = np.array(
        [
            (position, pair.source, pair.target, overlap)
            for position, pair in enumerate(pairs)
            for overlap in overlaps.get((sources[pair.source].num_ranks, targets[pair.target].num_ranks), ())
        ],
        dtype=np.int64,
    ).reshape(-1, 4)
    pair_index, source_index, target_index, overlap = rows.T
    refits = RefitTable(
        model=facts.models.spec(stage.role),
        sources=tuple(PlacedLayout(one.part, one.layout) for one in sources),
        targets=tuple(PlacedLayout(other.part, other.layout) for other in targets),
        source_index=source_index,
        target_index=target_index,
        overlap=overlap,
        generates=stage.generates,
        quantises=stage.is_quantised,
    )
    numbers, overlap_index = np.unique(overlap, return_inverse=True)
    ticks = np.zeros((len(pairs), len(numbers)), dtype=np.int64)
    if len(rows):
        ticks[pair_index, overlap_index] = np.floor(model.seconds_of_refits(refits) / tick)
    return Transfer(
        name=refit_name(target),
        source=source,
        target=target,
        occupies="both",
        ticks=_ticks_of_pairs(sources, targets, pairs, numbers.tolist(), ticks),
    )


class _Shard(NamedTuple):
    """A layout on a part of the cluster; layouts with the same `weights_name` shard the weights in the same way."""

    part: int
    layout: Layout
    num_ranks: int
    name: str
    weights_name: str


class _RefitPair(NamedTuple):
    """A source and a target, by their positions, between whose layouts a refit is costed.

    It stands for all pairs of layouts that shard the weights in the same two ways or, if it `is_in_place`, from one
    layout to the same layout, for itself alone.
    """

    source: int
    target: int
    is_in_place: bool


def _refit_pairs(sources: Sequence[_Shard], targets: Sequence[_Shard]) -> list[_RefitPair]:
    """Return a pair of different layouts for every two ways to shard the weights, and every pair of equal layouts."""
    position = {other.name: index for index, other in enumerate(targets)}
    in_place = [(index, position[one.name]) for index, one in enumerate(sources) if one.name in position]
    target_groups = _by_weights(targets).values()
    pairs = []
    for source_group in _by_weights(sources).values():
        for target_group in target_groups:
            all_pairs = product(source_group, target_group)
            moved = next((pair for pair in all_pairs if sources[pair[0]].name != targets[pair[1]].name), None)
            if moved:
                pairs.append(_RefitPair(*moved, is_in_place=False))
    return [*pairs, *(_RefitPair(*pair, is_in_place=True) for pair in in_place)]


def _ticks_of_pairs(
    sources: Sequence[_Shard],
    targets: Sequence[_Shard],
    pairs: Sequence[_RefitPair],
    overlaps: Sequence[int],
    ticks: IntArray,
) -> TransferTicks:
    """Return the ticks between all layouts from those of some pairs, [pairs, overlaps]."""
    groups = [_by_weights(shards) for shards in (sources, targets)]
    source_class, target_class = (
        {shards[index].name: number for number, group in enumerate(of_end.values()) for index in group}
        for shards, of_end in zip((sources, targets), groups, strict=True)
    )
    moved = np.zeros((*map(len, groups), len(overlaps)), dtype=np.int64)
    in_place: dict[str, IntArray] = {}
    for pair, row in reversed([*zip(pairs, ticks, strict=True)]):  # the pairs that stand for others come last
        name = sources[pair.source].name
        moved[source_class[name], target_class[targets[pair.target].name]] = row
        if pair.is_in_place:
            in_place[name] = row
    positions = {number: position for position, number in enumerate(overlaps)}
    return TransferTicks(source_class, target_class, positions, moved, in_place)


def _by_weights(shards: Sequence[_Shard]) -> dict[str, list[int]]:
    """Group the positions of the shards that shard the weights in the same way."""
    groups: dict[str, list[int]] = {}
    for index, shard in enumerate(shards):
        groups.setdefault(shard.weights_name, []).append(index)
    return groups


def _shards(cluster: AnyCluster, pairs: Sequence[tuple[Ranks, Candidate]]) -> list[_Shard]:
    """Return the distinct layouts on some pools, once for each part of the cluster."""
    distinct = dict.fromkeys((cluster.part_of_pool(ranks.ranks), candidate.layout) for ranks, candidate in pairs)
    shards = (
        _Shard(
            part,
            layout,
            layout.num_ranks,
            _resource_layout_name(part, layout),
            _resource_layout_name(part, layout.weight_layout),
        )
        for part, layout in distinct
    )
    return list({shard.name: shard for shard in shards}.values())


def _overlaps(sources: Sequence[Ranks], targets: Sequence[Ranks]) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return for each pair of pool sizes the possible numbers of ranks in common."""
    by_sizes: dict[tuple[int, int], set[int]] = {}
    for source in dict.fromkeys(sources):
        for target in dict.fromkeys(targets):
            source_place, target_place = (Resource(r.first_rank, r.num_ranks, "") for r in (source, target))
            by_sizes.setdefault((source.num_ranks, target.num_ranks), set()).add(source_place.overlap(target_place))
    return {sizes: tuple(sorted(overlaps)) for sizes, overlaps in by_sizes.items()}
