"""A rehearsal runs the real launcher, processes, messages and executor, with devices that wait instead of computing.

It shows without any accelerator that a plan's program terminates on real processes, and what scheduling and messages
cost. Waits are multiplied by the speed of the rehearsal (`--speed`) and reported times are divided by it, so that they
compare with the plan's. Waits take no processor time; messages and the executor do, so the default speed leaves the
processors idle most of the time. The two rates below were measured on two cores of an AMD EPYC with rehearsals of the
example jobs 7b-16xa100 (2.5 s for 842 MiB) and long-tail-64 (5.8 s for 2244 MiB), 2026-11-21.
"""

from __future__ import annotations

import os
import queue
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist

from meshwright.planner.plan.cost_queries import field_bytes
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.check_program import require_sound
from meshwright.planner.program.durations import Durations, Precomputed
from meshwright.planner.program.program import MoveWeights, Program, RunStage, Send, lower
from meshwright.planner.simulation.simulate import StepTimes, simulate
from meshwright.profiles.errors import BadInput
from meshwright.profiles.trace import Span
from meshwright.runtime.device.process_groups import collective_timeout
from meshwright.runtime.execution.executor import Executor, steady_now
from meshwright.runtime.execution.rehearsal_device import RehearsalDevice
from meshwright.runtime.launch.launch import MESSAGES_ONLY, launch
from meshwright.runtime.messages.experience import ExperienceTransport, StepExperience
from meshwright.runtime.messages.streaming import Streaming
from meshwright.runtime.messages.transport import Barriers, ProcessRanks, Transport
from meshwright.runtime.records.results import Rehearsal

_SECONDS_PER_BYTE = 2.6e-9
"""Processor seconds for each byte of a message: packing, sending and receiving over loopback, and unpacking."""
_SECONDS_PER_INSTRUCTION = 0.4e-3
"""Processor seconds of an instruction on each rank that executes it, with the fixed cost of a message."""
_WAITS_TO_WORK = 10.0
"""Minimum ratio of the wall seconds of a step to the seconds that each processor works in it."""
_MIN_STEP_SECONDS = 2.0
"""Minimum wall seconds of a step: every wait ends some milliseconds late, which must not matter."""


def num_processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def processor_seconds(plan: Plan) -> float:
    """Estimate the processor seconds of all ranks together in one rehearsed step."""
    workload, instructions = plan.facts.workload, lower(plan).instructions
    num_bytes = sum(
        len(one.targets) * field_bytes(workload, field)
        for one in instructions
        if isinstance(one, Send)
        for field in one.fields
    )
    return num_bytes * _SECONDS_PER_BYTE + sum(len(one.ranks) for one in instructions) * _SECONDS_PER_INSTRUCTION


def default_speed(plan: Plan) -> float:
    """Return the smallest multiplier of waits, at most 1, at which the processors are still idle most of the time."""
    step_seconds = max(_MIN_STEP_SECONDS, _WAITS_TO_WORK * processor_seconds(plan) / num_processors())
    return min(1.0, step_seconds / plan.period_seconds)


CLOCK = "rehearsed"
DEFAULT_PROCESSES = 16
"""Maximum number of processes that ranks are spread over by default."""
_MAX_PROCESSES = 64
"""Maximum number of processes with any --ranks-per-process: each imports torch."""
_MAX_RANKS = 4096
"""Maximum number of ranks: each is a thread."""


@dataclass(frozen=True, kw_only=True)
class RehearsalRequest:
    """The rehearsal that every process takes part in; several threads read `durations` at once."""

    plan: Plan
    durations: Durations
    steps: int
    seed: int
    speed: float
    ranks_per_process: int
    began: float


@dataclass(frozen=True, kw_only=True)
class RankRehearsal:
    """Spans of one rank over the measured periods, in wall seconds.

    `ends` are the ends of these periods and of the one before them; `processor_seconds` is the processor time that the
    rank's process had used at each.
    """

    rank: int
    periods: tuple[tuple[Span, ...], ...]
    ends: tuple[float, ...]
    processor_seconds: tuple[float, ...]


def rehearse(
    plan: Plan,
    durations: Durations,
    *,
    steps: int = 3,
    speed: float | None = None,
    seed: int = 0,
    ranks_per_process: int | None = None,
) -> Rehearsal:
    """Rehearse `steps` steps of a valid plan on this machine, after one warm-up step.

    `seed` seeds the sampled lengths. `speed` is a time scale: a wait takes `speed` times its planned seconds, by
    default `default_speed`.

    Raises BadInput for a program that is not sound, or that is too large for one machine, and RunFailed when a rank
    fails.
    """
    program = lower(plan)
    require_sound(program, plan.graph)
    num_ranks = plan.facts.cluster.num_ranks
    ranks_per_process = min(num_ranks, ranks_per_process or -(-num_ranks // DEFAULT_PROCESSES))
    num_processes = -(-num_ranks // ranks_per_process)
    _require_within_limits(num_ranks, num_processes)
    speed = default_speed(plan) if speed is None else speed
    if speed <= 0:
        raise BadInput(f"--speed {speed} is not above 0; 0.1 rehearses in a tenth of the time.")
    request = RehearsalRequest(
        plan=plan,
        durations=Precomputed(
            durations.name, tuple(durations.of_step(n) for n in range(steps + 1 + program.max_steps_ahead))
        ),
        steps=steps,
        seed=seed,
        speed=speed,
        ranks_per_process=ranks_per_process,
        began=steady_now(),
    )
    rehearsals_by_process = launch(
        run_process,
        request,
        num_ranks=num_processes,  # the launcher starts one process for each of its ranks
        setup=MESSAGES_ONLY,
        preload="meshwright.runtime.execution.rehearse",
    )
    rehearsals = [one for process in sorted(rehearsals_by_process) for one in rehearsals_by_process[process]]
    return _report(request, rehearsals, num_processes)


def _require_within_limits(num_ranks: int, num_processes: int) -> None:
    """Raise BadInput for more ranks or processes than one machine can hold."""
    if num_ranks > _MAX_RANKS:
        raise BadInput(
            f"a rehearsal has a thread for each rank, and the plan has {num_ranks}; rehearse a plan of at most "
            f"{_MAX_RANKS} ranks."
        )
    if num_processes > _MAX_PROCESSES:
        raise BadInput(
            f"{num_processes} processes exceed the limit of {_MAX_PROCESSES} on one machine; raise --ranks-per-process."
        )


def _report(request: RehearsalRequest, rehearsals: Sequence[RankRehearsal], num_processes: int) -> Rehearsal:
    """Return the results of a rehearsal from those of all ranks."""
    ends = [max(times) for times in zip(*(one.ends for one in rehearsals), strict=True)]
    seconds = [(b - a) / request.speed for a, b in pairwise(ends)]
    measured = [span for one in rehearsals for spans in one.periods for span in spans]
    rehearsed = StepTimes.of(seconds)
    simulated = simulate(request.plan, request.durations, steps=request.steps, warm_up=1).steps
    return Rehearsal(
        clock=CLOCK,
        durations=request.durations.name,
        speed=request.speed,
        num_processes=num_processes,
        ranks_per_process=request.ranks_per_process,
        steps=rehearsed,
        simulated=simulated,
        overhead_wall_seconds=statistics.median(_seconds_between_instructions(rehearsals)),
        num_instructions=len(measured),
        message_bytes=sum(span.facts["num_bytes"] for span in measured if span.kind == "send") / request.steps,
        processor_seconds=_processor_seconds(rehearsals, request.ranks_per_process) / request.steps,
        num_processors=num_processors(),
        error=rehearsed.mean / simulated.mean - 1,
        excess_seconds=(rehearsed.mean - simulated.mean) * request.speed,
        spans=tuple(_scaled(span, ends[0], request.speed) for span in measured),
    )


def _seconds_between_instructions(rehearsals: Iterable[RankRehearsal]) -> list[float]:
    """Return the wall seconds between successive instructions of a period, on every rank."""
    return [
        following.start_seconds - one.end_seconds
        for rehearsal in rehearsals
        for spans in rehearsal.periods
        for one, following in pairwise(spans)
    ]


def _processor_seconds(rehearsals: Iterable[RankRehearsal], ranks_per_process: int) -> float:
    """Return the processor seconds of all processes over the measured periods, read from the first rank of each."""
    return sum(
        one.processor_seconds[-1] - one.processor_seconds[0] for one in rehearsals if one.rank % ranks_per_process == 0
    )


def _scaled(span: Span, began: float, speed: float) -> Span:
    """Return the span in seconds of the plan since the start of the first measured step."""
    return Span(
        step=span.step,
        instruction=span.instruction,
        kind=span.kind,
        rank=span.rank,
        start_seconds=(span.start_seconds - began) / speed,
        end_seconds=(span.end_seconds - began) / speed,
        clock=span.clock,
        facts=span.facts,
    )


def run_process(request: RehearsalRequest) -> list[RankRehearsal]:
    """Run one process of the rehearsal, with a thread for each rank that it hosts.

    Raises the first error of any rank; the other threads then end with the process.
    """
    ranks_per_process, num_ranks = request.ranks_per_process, request.plan.facts.cluster.num_ranks
    first = dist.get_rank() * ranks_per_process
    ranks = range(first, min(first + ranks_per_process, num_ranks))
    program, process = lower(request.plan), ProcessRanks(ranks_per_process)
    all_ranks = tuple(range(num_ranks))
    barriers = Barriers((all_ranks, *_rank_sets(program)), ranks_per_process)
    group = dist.new_group(backend="gloo", timeout=collective_timeout())
    assert group is not None
    done: queue.SimpleQueue[RankRehearsal | BaseException] = queue.SimpleQueue()

    def run(rank: int) -> None:
        try:
            done.put(_run_rank(request, program, barriers, Transport(group, rank=rank, process=process)))
        except BaseException as error:
            done.put(error)

    for rank in ranks:
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True).start()
    rehearsals = []
    for _ in ranks:
        outcome = done.get()
        if isinstance(outcome, BaseException):
            raise outcome
        rehearsals.append(outcome)
    barriers.close()
    dist.destroy_process_group(group)
    return sorted(rehearsals, key=lambda one: one.rank)


def _rank_sets(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that synchronise, for each stage and refit."""
    return tuple(tuple(sorted(i.ranks)) for i in program.instructions if isinstance(i, RunStage | MoveWeights))


def _run_rank(request: RehearsalRequest, program: Program, barriers: Barriers, transport: Transport) -> RankRehearsal:
    """Run one rank from the first period to the last; where no stage runs ahead, a barrier separates periods."""
    plan = request.plan
    device = RehearsalDevice(
        plan,
        transport.rank,
        barriers,
        request.durations,
        Streaming(plan, transport),
        speed=request.speed,
        seed=request.seed,
    )
    batches: dict[int, StepExperience] = {}
    rows = range(plan.facts.workload.batch_size)

    def batch_of(step: int) -> StepExperience:
        return batches.setdefault(step, StepExperience(step=step, rows=rows))

    executor = Executor(
        device,
        ExperienceTransport(transport),
        batch_of,
        rank=transport.rank,
        start_seconds=request.began,
        clock=CLOCK,
        hosts=device,
    )
    all_ranks = tuple(range(plan.facts.cluster.num_ranks))
    measured = range(1, request.steps + 1)
    steps = range(measured.stop + program.max_steps_ahead)
    measured_periods: list[tuple[Span, ...]] = []
    ends: list[float] = []
    processor_seconds: list[float] = []
    barriers.wait(all_ranks)
    for period in program.periods(steps):
        spans = executor.execute(program, period, steps).spans
        batches.pop(period, None)
        if program.max_steps_ahead == 0:
            barriers.wait(all_ranks)
        if period in measured:
            measured_periods.append(spans)
        if period + 1 in measured or period in measured:
            ends.append(steady_now() - request.began)
            processor_seconds.append(time.process_time())
    executor.flush()
    barriers.wait(all_ranks)
    return RankRehearsal(
        rank=transport.rank,
        periods=tuple(measured_periods),
        ends=tuple(ends),
        processor_seconds=tuple(processor_seconds),
    )
