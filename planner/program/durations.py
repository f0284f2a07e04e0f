"""The duration of each instruction of a step, by the plan, and the deadline after which it counts as hanging.

An instruction waits for ranks that may be at any other instruction of the period, so its deadline is a multiple of a
whole period: twenty times the predicted one or, once periods were measured, five times the longest. It is at least a
minute, which allows for a busy machine and periods of milliseconds; before a period was measured it is at least ten
minutes, since libraries connect their ranks and compile in the first one. The time of reward and tool calls that fail
at their timeout is added. A rank that waits for dynamic sampling may wait for the maximum number of waves of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from meshwright.planner.job.rewards_and_tools import Reward, Tool
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.reward_workers import host_seconds
from meshwright.planner.program.controllers import ControllerSetting
from meshwright.planner.program.program import MoveWeights
from meshwright.profiles.packing import rows_per_replica
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.trace import instruction_name


class HeldBlocks(NamedTuple):
    """KV blocks that a replica's sequences hold while it generates: the mean over its seconds, and the peak."""

    mean: float
    peak: int


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The durations and other facts of one step.

    `seconds` has, by instruction name, one number for all ranks or one for each dp replica. `host_seconds` is how long
    host rewards take after the step's last response; None is the plan's prediction. `tail_seconds` has, by stage, the
    tails of stages that stream in other chunks than the plan's. `setting` is the controllers' decision for the period
    that generates the step.

    If lengths are sampled, `live_sequences` has, by stage, the mean number of sequences in flight on each replica,
    `held_blocks` the KV blocks that they hold (empty if not known), and `tokens_by_staleness` the response tokens by
    the number of actor updates between sampling and use.
    """

    seconds: Mapping[str, tuple[float, ...]]
    num_tokens: float  # response tokens of the step
    live_sequences: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    held_blocks: Mapping[str, tuple[HeldBlocks, ...]] = field(default_factory=dict)
    tokens_by_staleness: Mapping[int, int] = field(default_factory=dict)
    tail_seconds: Mapping[str, float] = field(default_factory=dict)
    host_seconds: float | None = None
    setting: ControllerSetting | None = None


class Durations(Protocol):
    """The work of every step; two calls for a step return the same work."""

    @property
    def name(self) -> str:
        """The kind of durations: `planned` or `sampled`."""
        ...

    def of_step(self, step: int, /) -> StepWork: ...


class Planned:
    """Durations in which each stage and refit takes its planned cost."""

    name = "planned"

    def __init__(self, plan: Plan) -> None:
        workload = plan.facts.workload
        self._work = StepWork(
            seconds={
                **{placement.stage: (placement.cost.total,) for placement in plan.placements},
                **refit_seconds(plan),
            },
            num_tokens=workload.batch_size * workload.sampled_lengths.mean,
        )

    def of_step(self, _step: int, /) -> StepWork:
        return self._work


@dataclass(frozen=True)
class Precomputed:
    """Precomputed work of the first steps; it has no state, so threads and processes can share it."""

    name: str
    works: tuple[StepWork, ...]

    def of_step(self, step: int, /) -> StepWork:
        return self.works[step]


def refit_seconds(plan: Plan) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each refit of the plan, by the name of its instruction."""
    return {instruction_name(MoveWeights.kind, r.source, r.target): (r.cost.total,) for r in plan.refits}


@dataclass(frozen=True)
class TransferDelays:
    """Delays after a producer has ended, in seconds.

    `transfers` is the delay until its output has arrived, by producer and consumer; `host_reward_seconds` the part of
    it that the plan expects host rewards to take. `tails` is the delay until a streaming consumer can end, by consumer.
    """

    transfers: Mapping[tuple[str, str], float]
    tails: Mapping[str, float]
    host_reward_seconds: float = 0.0


def transfer_delays(plan: Plan) -> TransferDelays:
    """Return the delays of a plan's transfers.

    Transfers of host rewards include the time of the rewards after the last response. A streaming stage still has to
    process its tail after the last chunk has arrived.
    """
    delays = {(edge.producer, edge.consumer): edge.cost.total - host_seconds(edge) for edge in plan.edges}
    waits = {edge.consumer: edge.cost.total for edge in plan.edges if edge.producer == GENERATE}
    delays |= {(edge.producer, edge.consumer): waits[edge.consumer] for edge in plan.graph.host_edges}
    tails = {p.stage: p.tail_seconds for p in plan.placements if p.schedule.chunk_tokens}
    return TransferDelays(delays, tails, max(map(host_seconds, plan.edges), default=0.0))


MIN_SECONDS, _MIN_FIRST_SECONDS = 60.0, 600.0
"""Shortest deadlines: once a period was measured, and before."""
_PREDICTED_FACTOR, _MEASURED_FACTOR = 20.0, 5.0
"""Ratios of the deadline to the predicted period, and to the longest measured one."""
_TIMEOUT_FACTOR = 2.0
"""Ratio of the timeout of a collective to the deadline of an instruction."""

IMPORT_SECONDS = 120.0
"""Seconds within which a reward or tool process must have imported its function."""


class Deadlines:
    """The deadline of an instruction on one rank."""

    def __init__(self, plan: Plan, extra_seconds: float = 0.0) -> None:
        """`extra_seconds` is added to every deadline (see `failing_call_seconds`)."""
        self._extra_seconds = extra_seconds
        self._predicted, self._measured = plan.period_seconds, 0.0

    def record_period(self, seconds: float) -> None:
        """Record the seconds of a period."""
        self._measured = max(self._measured, seconds)

    def allowed_seconds(self) -> float:
        """Return the seconds that an instruction may take, including waiting for other ranks."""
        if self._measured:
            return self._extra_seconds + max(MIN_SECONDS, _MEASURED_FACTOR * self._measured)
        return self._extra_seconds + max(_MIN_FIRST_SECONDS, _PREDICTED_FACTOR * self._predicted)


def failing_call_seconds(plan: Plan, rewards: Sequence[Reward], tool: Tool | None) -> float:
    """Return the maximum seconds by which failing calls of a job's rewards and tool can delay an instruction.

    A replica has n rollouts that may wait at a time: its rows of a batch for the current step and for each step that
    generation is ahead, and all overcommitted sequences. W workers take the calls in order. Workers that always take
    the next call are done after at most the total time over W plus the longest call (Graham, Bounds on multiprocessing
    timing anomalies, 1969).

    A reward is called for a sample once in a batch of b and, if that fails, once alone, each time for at most
    `timeout_seconds`: 2 n / W + 1 + b times that in all, or n / W + 1 times without batches. A judge is retried for up
    to `retry_seconds`, and one more call may be running at the end. Rewards do not wait for each other. A rollout of k
    turns calls the tool k - 1 times in sequence: (k - 1) (n / W + 1) times its timeout. A function is imported before
    its first call. Calls that succeed are part of measured periods. A process that neither starts nor ends is left to
    the watchdog.
    """
    num_rollouts = _max_rollouts(plan)
    seconds = max((_reward_seconds(plan, reward, num_rollouts) for reward in rewards), default=0.0)
    if tool and (turns := plan.facts.workload.turns):
        rounds = num_rollouts / tool.workers + 1
        seconds += IMPORT_SECONDS + (turns.number.max - 1) * rounds * tool.timeout_seconds
    return seconds


def _reward_seconds(plan: Plan, reward: Reward, num_samples: int) -> float:
    workers = next((one.workers for one in plan.workers if one.reward == reward.name), 1)
    max_batch = min(reward.batch_size, num_samples)
    calls = num_samples / workers + 1 if max_batch == 1 else 2 * num_samples / workers + 1 + max_batch
    if reward.url:
        return reward.retry_seconds + (calls + 1) * reward.timeout_seconds
    return IMPORT_SECONDS + calls * reward.timeout_seconds


def _max_rollouts(plan: Plan) -> int:
    """Return the maximum number of rollouts of one replica whose calls may wait."""
    generation, workload = plan.placement(GENERATE), plan.facts.workload
    batch_size, schedule = max(workload.candidates.batch_size, workload.wave.batch_size), generation.schedule
    batches = max(generation.steps_ahead + 1, schedule.batches_in_flight)
    return rows_per_replica(batches * batch_size + schedule.overcommit, generation.layout.dp)[0]


def collective_timeout(plan: Plan, extra_seconds: float = 0.0) -> float:
    """Return the timeout of a collective, in seconds.

    It exceeds the deadline of every instruction, whose error names what hangs; a library can only report a timeout.
    """
    return _TIMEOUT_FACTOR * Deadlines(plan, extra_seconds).allowed_seconds() * max_waves_ratio(plan)


def max_waves_ratio(plan: Plan) -> float:
    """Return the ratio of the maximum number of waves of a step to the expected number; 1 without dynamic sampling."""
    workload = plan.facts.workload
    if not (sampling := workload.dynamic_sampling):
        return 1.0
    return sampling.max_waves(workload.num_prompts) / sampling.expected_waves(workload.num_prompts)
