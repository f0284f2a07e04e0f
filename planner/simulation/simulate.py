"""The simulated clock: many steps of a plan's program in virtual time, and what every rank waited for meanwhile."""

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
from meshwright.planner.program.controllers import Setting, facts_of
from meshwright.planner.program.instruction_durations import Durations, Planned, StepWork, lags_of
from meshwright.planner.program.program import Program, Receive, RunStage, lower
from meshwright.planner.simulation.cache_use import together
from meshwright.planner.simulation.deferral import steps_to_grow
from meshwright.planner.simulation.events import RankProgram, Record, Replica, play, score
from meshwright.profiles.errors import BadInput
from meshwright.profiles.packing import rows_of_replicas
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.trace import LIVE, MEMORY, RESIDENT, Span

CLOCK = "simulated"

_MOST_SPANS = 500_000
"""Kept in memory and drawn: a GiB or so."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of the steps that were kept, in their order, and their mean and percentiles."""

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
    """A part of the time, 0 to 1, and what it was spent on or waited for."""

    what: str
    share: float


@dataclass(frozen=True, kw_only=True)
class Use:
    """How some ranks spent the kept steps, on average: stages and refits they were busy with, what they waited for."""

    name: str
    ranks: tuple[int, ...]
    idle_share: float
    busy: tuple[TimeShare, ...]
    waits: tuple[TimeShare, ...]


@dataclass(frozen=True)
class Stale:
    """The part of the response tokens, 0 to 1, that are used `staleness` actor updates after they were drawn."""

    staleness: int
    share: float


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """How much of its planned cache of `blocks` a replica of a generation stage uses while it generates: on average
    over its seconds, and in the round of a replica that needs most. Above 1 sequences would wait or give way, which is
    not simulated. Both are None where they are not known: of rollouts of several turns.
    """

    stage: str
    blocks: int
    mean_share: float | None
    peak_share: float | None


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What the simulated clock says of a plan.

    `durations` names where the seconds of the instructions come from, and `engine` what generates; `staleness` and
    `caches` are told where lengths are drawn, `settings` has what controllers decided for each step.
    """

    clock: str
    durations: str
    engine: str
    plan_seconds: float
    steps: StepTimes
    tokens_per_second: float  # response tokens
    cluster: Use
    pools: tuple[Use, ...]
    ranks: tuple[Use, ...]
    num_events: int
    staleness: tuple[Stale, ...] = ()
    caches: tuple[CacheUse, ...] = ()
    settings: tuple[Setting, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def mean_staleness(self) -> float:
        """Actor updates, on average over the response tokens."""
        return sum(one.staleness * one.share for one in self.staleness)


def simulate(
    plan: Plan, durations: Durations | None = None, *, steps: int = 20, warm_up: int | None = None, traced: bool = False
) -> Simulation:
    """Runs `warm_up` + `steps` steps and reports the last `steps` of them; spans only when `traced`.

    Unless told otherwise, one step passes first, two more for each step that a sequence may be stale, and those in
    which the overcommit grows. Where stages work ahead, as many steps follow as they are ahead, so that every turn that
    is reported is full. Raises BadInput when the plan's program is not sound.
    """
    durations = durations or Planned(plan)
    program = lower(plan)
    require_sound(program, plan.graph)
    if traced:
        _require_few_spans(program, steps)
    begin = first_step(plan) if warm_up is None else warm_up
    kept = range(begin, begin + steps)
    works = [durations.of_step(step) for step in range(kept.stop + program.most_ahead)]
    parts = score(program, plan.facts.cluster.num_ranks, _split(works), _replica_of(plan))
    account = _Account(parts, kept)
    spans: list[Span] = []
    for record in play(parts, works, lags_of(plan)):
        account.add(record)
        if traced and record.turn in kept:
            spans += _spans(plan, parts, record, works[record.step])
    ends = [account.end_of(turn) for turn in range(kept.start - 1, kept.stop)]
    seconds = [b - a for a, b in pairwise(ends)]
    return Simulation(
        clock=CLOCK,
        durations=durations.name,
        engine=plan.facts.engine,
        plan_seconds=plan.period_seconds,
        steps=StepTimes.of(seconds),
        tokens_per_second=sum(work.num_tokens for work in works[kept.start : kept.stop]) / math.fsum(seconds),
        cluster=account.use("all ranks", range(plan.facts.cluster.num_ranks)),
        pools=tuple(account.use(pool.name, pool.ranks) for pool in plan.pools),
        ranks=tuple(account.use(f"rank {rank}", (rank,)) for rank in range(plan.facts.cluster.num_ranks)),
        num_events=account.num_events,
        staleness=_staleness(works[kept.start : kept.stop]),
        caches=tuple(_cache_uses(plan, works[kept.start : kept.stop])),
        settings=tuple(work.setting for work in works[kept.start : kept.stop] if work.setting),
        spans=tuple(sorted(spans, key=lambda span: (span.start_seconds, span.rank))),
    )


def _require_few_spans(program: Program, steps: int) -> None:
    """Raises BadInput for a timeline that would take a machine's memory."""
    a_step = sum(len(instruction.ranks) for instruction in program.instructions)
    if steps * a_step > _MOST_SPANS:
        most = max(1, _MOST_SPANS // a_step)
        raise BadInput(f"a timeline of {steps} steps has {steps * a_step} spans; give --steps {most} at most.")


def first_step(plan: Plan) -> int:
    """The first step that a simulation reports: the ones before it fill what is in flight."""
    placement = plan.placement(GENERATE)
    num_rows = rows_of_replicas(plan.facts.workload.batch_size, placement.layout.dp)[-1]
    return 1 + 2 * plan.staleness + steps_to_grow(placement.schedule.overcommit // placement.layout.dp, num_rows)


def _cache_uses(plan: Plan, works: Sequence[StepWork]) -> Iterator[CacheUse]:
    """Of the stages whose lengths are drawn."""
    for placement in plan.placements:
        stage = placement.stage
        if stage not in works[0].held_blocks:
            continue
        blocks = plan.facts.workload.wave.cache_need(placement.schedule, placement.layout.dp).blocks
        held = [one for work in works for one in work.held_blocks[stage]]
        mean, peak = None, None
        if held:
            found = together(held, (seconds for work in works for seconds in work.seconds[stage]))
            mean, peak = found.mean / blocks, found.most / blocks
        yield CacheUse(stage=stage, blocks=blocks, mean_share=mean, peak_share=peak)


def _staleness(works: Iterable[StepWork]) -> tuple[Stale, ...]:
    tokens: Counter[int] = Counter()
    for work in works:
        tokens.update(work.tokens_by_staleness)
    return tuple(Stale(staleness, number / tokens.total()) for staleness, number in sorted(tokens.items()))


def _split(works: Iterable[StepWork]) -> frozenset[str]:
    """The stages whose replicas take times of their own."""
    return frozenset(name for work in works for name, seconds in work.seconds.items() if len(seconds) > 1)


def _replica_of(plan: Plan) -> Replica:
    def replica(stage: str, rank: int) -> int:
        return plan.placement(stage).layout.coordinates(rank - plan.pool_of(stage).first_rank).dp

    return replica


def _spans(plan: Plan, parts: RankProgram, record: Record, work: StepWork) -> Iterator[Span]:
    """One span for each rank of the group; a receive's begins when the rank comes to it, as a measured one does."""
    if record.number == len(parts.program.instructions):
        return
    instruction = parts.program.instructions[record.number]
    waited = {"waited_seconds": record.start - record.arrived} if record.start > record.arrived else {}
    for rank in parts.groups[record.group]:
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
    """Bytes on the rank while the stage runs, and without it, as the plan counts them; sequences in flight if known."""
    resident = math.fsum(resident_bytes(plan, p) for p in plan.placements if rank in plan.pool(p.pool).ranks)
    memory = {MEMORY: resident + plan.placement(stage).transient.total, RESIDENT: resident}
    live = work.live_sequences.get(stage)
    decided = facts_of(work.setting) if work.setting and plan.stage(stage).generates else {}
    return memory | decided | ({LIVE: live[_replica_of(plan)(stage, rank)]} if live else {})


class _Account:
    """Adds up what each group does and waits for in the turns that are kept."""

    def __init__(self, parts: RankProgram, kept: range) -> None:
        self._parts, self._kept = parts, kept
        instructions = parts.program.instructions
        self._names = [*(instruction.name for instruction in instructions), ""]
        self._receives = {index for index, one in enumerate(instructions) if isinstance(one, Receive)}
        producers = {stream.consumer: stream.producer for stream in parts.program.streams}
        self._fed_by = {index: producers[name] for index, name in enumerate(self._names) if name in producers}
        self._busy: list[dict[str, float]] = [defaultdict(float) for _ in parts.groups]
        self._waits: list[dict[str, float]] = [defaultdict(float) for _ in parts.groups]
        self._group_of = {rank: group for group, ranks in enumerate(parts.groups) for rank in ranks}
        self._ends: dict[int, float] = {}
        self.num_events = 0

    def end_of(self, turn: int) -> float:
        """When the last group ended a turn; 0 for a turn before all others."""
        return self._ends.get(turn, 0.0)

    def add(self, record: Record) -> None:
        self.num_events += 1
        turn, _, number, group, arrived, start, end, cause, starved = record
        if number == len(self._names) - 1:
            self._ends[turn] = max(end, self._ends.get(turn, 0.0))
        if turn not in self._kept:
            return
        if start > arrived:
            self._waits[group][cause] += start - arrived
        if end > start:
            if number in self._receives:
                self._waits[group][f"hand-over from {cause}"] += end - start
            else:
                self._busy[group][self._names[number]] += end - start - starved
                if starved:
                    self._waits[group][self._fed_by[number]] += starved

    def use(self, name: str, ranks: Sequence[int]) -> Use:
        """The use of these ranks on average over the kept turns."""
        elapsed = (self.end_of(self._kept.stop - 1) - self.end_of(self._kept.start - 1)) * len(ranks)
        busy, waits = (self._shares(part, ranks, elapsed) for part in (self._busy, self._waits))
        return Use(name=name, ranks=tuple(ranks), idle_share=1 - sum(b.share for b in busy), busy=busy, waits=waits)

    def _shares(self, part: list[dict[str, float]], ranks: Sequence[int], elapsed: float) -> tuple[TimeShare, ...]:
        """Largest first."""
        total: dict[str, float] = defaultdict(float)
        for rank in ranks:
            for what, seconds in part[self._group_of[rank]].items():
                total[what] += seconds
        found = [TimeShare(what, seconds / elapsed) for what, seconds in total.items()]
        return tuple(sorted(found, key=lambda share: -share.share))
