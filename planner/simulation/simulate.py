"""Simulates many steps of a plan's program in virtual time, and reports what every rank did and waited for.

`simulated_generation` simulates generation with sampled lengths, and `flight` decides when its periods end.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwright.planner.plan.evaluate import resident_bytes
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.check_program import require_sound
from meshwright.planner.program.controllers import ControllerSetting, setting_facts
from meshwright.planner.program.durations import Durations, Planned, StepWork, transfer_delays
from meshwright.planner.program.program import Program, Receive, RunStage, lower
from meshwright.planner.simulation.events import RankProgram, Record, Replica, group_ranks, simulate_events
from meshwright.planner.simulation.pacing import ramp_up_steps
from meshwright.planner.simulation.simulated_flight import combined_use
from meshwright.profiles.errors import BadInput
from meshwright.profiles.packing import rows_per_replica
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.trace import MEMORY, NUM_LIVE, RESIDENT, Span

CLOCK = "simulated"

_MAX_SPANS = 500_000
"""Maximum number of spans of a timeline: they take about a GiB of memory."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of the reported steps in order, with their mean and percentiles."""

    seconds: tuple[float, ...]
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> StepTimes:
        ordered = sorted(seconds)
        p50, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
        return cls(seconds=tuple(seconds), mean=statistics.fmean(seconds), p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True)
class TimeShare:
    """A share of the time, 0 to 1, and the stage, refit or transfer that it was spent on or waiting for."""

    what: str
    share: float


@dataclass(frozen=True, kw_only=True)
class TimeUse:
    """The mean time use of some ranks over the reported steps: what they were busy with and what they waited for."""

    name: str
    ranks: tuple[int, ...]
    idle_share: float
    busy: tuple[TimeShare, ...]
    waits: tuple[TimeShare, ...]


@dataclass(frozen=True)
class StalenessShare:
    """The share of response tokens, 0 to 1, that are used `staleness` actor updates after they were sampled."""

    staleness: int
    share: float


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """The use of a replica's planned KV cache of `blocks` blocks during generation.

    `mean_share` is over the seconds of generation, `peak_share` over rounds and replicas. Above 1, sequences would
    wait or be pre-empted, which is not simulated. Both are None for multi-turn rollouts.
    """

    stage: str
    blocks: int
    mean_share: float | None
    peak_share: float | None


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of a simulation.

    `durations` names the source of the instructions' seconds, `engine` the generation engine. `staleness` and `caches`
    are reported if lengths are sampled; `settings` has the controllers' decision for each step.
    """

    clock: str
    durations: str
    engine: str
    plan_seconds: float
    steps: StepTimes
    tokens_per_second: float  # response tokens
    cluster: TimeUse
    pools: tuple[TimeUse, ...]
    ranks: tuple[TimeUse, ...]
    num_events: int
    staleness: tuple[StalenessShare, ...] = ()
    caches: tuple[CacheUse, ...] = ()
    settings: tuple[ControllerSetting, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def mean_staleness(self) -> float:
        """The mean staleness over the response tokens, in actor updates."""
        return sum(one.staleness * one.share for one in self.staleness)


def simulate(
    plan: Plan, durations: Durations | None = None, *, steps: int = 20, warm_up: int | None = None, traced: bool = False
) -> Simulation:
    """Simulate `warm_up` + `steps` steps and report the last `steps` of them, with spans if `traced`.

    By default the warm-up is one step, plus two for each step of staleness, plus the steps in which the overcommit
    grows. If stages work n steps ahead, n more steps are simulated after the reported ones, so that every reported
    period is full. Raises BadInput if the plan's program is not sound.
    """
    durations = durations or Planned(plan)
    program = lower(plan)
    require_sound(program, plan.graph)
    if traced:
        _require_few_spans(program, steps)
    first_reported = first_step(plan) if warm_up is None else warm_up
    reported = range(first_reported, first_reported + steps)
    works = [durations.of_step(step) for step in range(reported.stop + program.max_steps_ahead)]
    rank_program = group_ranks(program, plan.facts.cluster.num_ranks, _stages_by_replica(works), _replica_of(plan))
    account = _Account(rank_program, reported)
    spans: list[Span] = []
    for record in simulate_events(rank_program, works, transfer_delays(plan)):
        account.add(record)
        if traced and record.period in reported:
            spans += _spans(plan, rank_program, record, works[record.step])
    ends = [account.end_of(period) for period in range(reported.start - 1, reported.stop)]
    seconds = [b - a for a, b in pairwise(ends)]
    return Simulation(
        clock=CLOCK,
        durations=durations.name,
        engine=plan.facts.engine,
        plan_seconds=plan.period_seconds,
        steps=StepTimes.of(seconds),
        tokens_per_second=sum(work.num_tokens for work in works[reported.start : reported.stop]) / math.fsum(seconds),
        cluster=account.use("all ranks", range(plan.facts.cluster.num_ranks)),
        pools=tuple(account.use(pool.name, pool.ranks) for pool in plan.pools),
        ranks=tuple(account.use(f"rank {rank}", (rank,)) for rank in range(plan.facts.cluster.num_ranks)),
        num_events=account.num_events,
        staleness=_staleness(works[reported.start : reported.stop]),
        caches=tuple(_cache_uses(plan, works[reported.start : reported.stop])),
        settings=tuple(work.setting for work in works[reported.start : reported.stop] if work.setting),
        spans=tuple(sorted(spans, key=lambda span: (span.start_seconds, span.rank))),
    )


def _require_few_spans(program: Program, steps: int) -> None:
    """Raise BadInput for a timeline that would take too much memory."""
    spans_per_step = sum(len(instruction.ranks) for instruction in program.instructions)
    if steps * spans_per_step > _MAX_SPANS:
        max_steps = max(1, _MAX_SPANS // spans_per_step)
        raise BadInput(
            f"a timeline of {steps} steps has {steps * spans_per_step} spans; give --steps {max_steps} at most."
        )


def first_step(plan: Plan) -> int:
    """Return the first step that a simulation reports by default, once the sequences in flight have reached their usual
    number."""
    placement = plan.placement(GENERATE)
    num_rows = rows_per_replica(plan.facts.workload.batch_size, placement.layout.dp)[-1]
    return 1 + 2 * plan.staleness + ramp_up_steps(placement.schedule.overcommit // placement.layout.dp, num_rows)


def _cache_uses(plan: Plan, works: Sequence[StepWork]) -> Iterator[CacheUse]:
    """Yield the cache use of the stages whose lengths are sampled."""
    for placement in plan.placements:
        stage = placement.stage
        if stage not in works[0].held_blocks:
            continue
        blocks = plan.facts.workload.wave.cache_need(placement.schedule, placement.layout.dp).blocks
        uses = [one for work in works for one in work.held_blocks[stage]]
        mean, peak = None, None
        if uses:
            use = combined_use(uses, (seconds for work in works for seconds in work.seconds[stage]))
            mean, peak = use.mean / blocks, use.peak / blocks
        yield CacheUse(stage=stage, blocks=blocks, mean_share=mean, peak_share=peak)


def _staleness(works: Iterable[StepWork]) -> tuple[StalenessShare, ...]:
    tokens: Counter[int] = Counter()
    for work in works:
        tokens.update(work.tokens_by_staleness)
    return tuple(StalenessShare(staleness, number / tokens.total()) for staleness, number in sorted(tokens.items()))


def _stages_by_replica(works: Iterable[StepWork]) -> frozenset[str]:
    """Return the stages whose replicas have durations of their own."""
    return frozenset(name for work in works for name, seconds in work.seconds.items() if len(seconds) > 1)


def _replica_of(plan: Plan) -> Replica:
    def replica(stage: str, rank: int) -> int:
        return plan.placement(stage).layout.coordinates(rank - plan.pool_of(stage).first_rank).dp

    return replica


def _spans(plan: Plan, rank_program: RankProgram, record: Record, work: StepWork) -> Iterator[Span]:
    """Yield one span for each rank of the group; a receive starts when the rank arrives, as a measured one does."""
    if record.number == len(rank_program.program.instructions):
        return
    instruction = rank_program.program.instructions[record.number]
    waited = {"waited_seconds": record.start - record.arrived} if record.start > record.arrived else {}
    for rank in rank_program.groups[record.group]:
        yield Span(
            step=record.step,
            instruction=instruction.name,
            kind=instruction.kind,
            rank=rank,
            start_seconds=record.arrived if isinstance(instruction, Receive) else record.start,
            end_seconds=record.end,
            clock=CLOCK,
            facts=waited | (_facts(plan, instruction.stage, rank, work) if isinstance(instruction, RunStage) else {}),
        )


def _facts(plan: Plan, stage: str, rank: int, work: StepWork) -> dict[str, float]:
    """Return the planned bytes on the rank with and without the stage, and its mean live sequences if known."""
    resident = math.fsum(resident_bytes(plan, p) for p in plan.placements if rank in plan.pool(p.pool).ranks)
    memory = {MEMORY: resident + plan.placement(stage).transient.total, RESIDENT: resident}
    live = work.live_sequences.get(stage)
    decided = setting_facts(work.setting) if work.setting and plan.stage(stage).generates else {}
    return memory | decided | ({NUM_LIVE: live[_replica_of(plan)(stage, rank)]} if live else {})


class _Account:
    """Accumulates the busy and waiting seconds of each group over the reported periods."""

    def __init__(self, rank_program: RankProgram, reported: range) -> None:
        self._rank_program, self._reported = rank_program, reported
        instructions = rank_program.program.instructions
        self._names = [*(instruction.name for instruction in instructions), ""]
        self._receives = {index for index, one in enumerate(instructions) if isinstance(one, Receive)}
        producers = {stream.consumer: stream.producer for stream in rank_program.program.streams}
        self._fed_by = {index: producers[name] for index, name in enumerate(self._names) if name in producers}
        self._busy: list[dict[str, float]] = [defaultdict(float) for _ in rank_program.groups]
        self._waits: list[dict[str, float]] = [defaultdict(float) for _ in rank_program.groups]
        self._group_of = {rank: group for group, ranks in enumerate(rank_program.groups) for rank in ranks}
        self._ends: dict[int, float] = {}
        self.num_events = 0

    def end_of(self, period: int) -> float:
        """Return when the last group ended a period; 0 for a period before all others."""
        return self._ends.get(period, 0.0)

    def add(self, record: Record) -> None:
        self.num_events += 1
        period, _, number, group, arrived, start, end, cause, stream_wait = record
        if number == len(self._names) - 1:
            self._ends[period] = max(end, self._ends.get(period, 0.0))
        if period not in self._reported:
            return
        if start > arrived:
            self._waits[group][cause] += start - arrived
        if end > start:
            if number in self._receives:
                self._waits[group][f"transfer from {cause}"] += end - start
            else:
                self._busy[group][self._names[number]] += end - start - stream_wait
                if stream_wait:
                    self._waits[group][self._fed_by[number]] += stream_wait

    def use(self, name: str, ranks: Sequence[int]) -> TimeUse:
        """Return the mean use of these ranks over the reported periods."""
        elapsed = (self.end_of(self._reported.stop - 1) - self.end_of(self._reported.start - 1)) * len(ranks)
        busy, waits = (self._shares(part, ranks, elapsed) for part in (self._busy, self._waits))
        return TimeUse(name=name, ranks=tuple(ranks), idle_share=1 - sum(b.share for b in busy), busy=busy, waits=waits)

    def _shares(self, part: list[dict[str, float]], ranks: Sequence[int], elapsed: float) -> tuple[TimeShare, ...]:
        """Return the shares of the elapsed time, largest first."""
        total: dict[str, float] = defaultdict(float)
        for rank in ranks:
            for what, seconds in part[self._group_of[rank]].items():
                total[what] += seconds
        shares = [TimeShare(what, seconds / elapsed) for what, seconds in total.items()]
        return tuple(sorted(shares, key=lambda share: -share.share))
