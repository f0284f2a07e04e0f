"""Deadlines of instructions: how long one may take before a run counts as hanging, from the plan and measured periods.

An instruction waits for ranks that may do anything else of a period meanwhile, so its deadline is a multiple of a whole
period: twenty times the predicted one or, once periods were measured, five times the longest. It is at least a minute,
which allows for a busy machine and periods of milliseconds; before a period was measured it is at least ten minutes,
since libraries connect their ranks and compile in the first one. Calls of rewards and tools that fail at their timeout
are added. A rank that waits for dynamic sampling may wait for the most waves that a step may take.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.environment.rewards import Reward
from meshwright.planner.environment.tool import Tool
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.packing import rows_per_replica
from meshwright.profiles.stages import GENERATE

MIN_SECONDS, _LEAST_AT_FIRST_SECONDS = 60.0, 600.0
_OF_PREDICTED, _OF_MEASURED = 20.0, 5.0
_TIMEOUT_OF_DEADLINE = 2.0

IMPORT_SECONDS = 120.0
"""Seconds within which a reward or tool process must have imported its function."""


class Deadlines:
    """The deadline of an instruction on one rank."""

    def __init__(self, plan: Plan, extra_seconds: float = 0.0) -> None:
        """`away_seconds` is added to every deadline (see the function `away_seconds`)."""
        self._extra_seconds = extra_seconds
        self._predicted, self._measured = plan.period_seconds, 0.0

    def record_period(self, seconds: float) -> None:
        """Record the seconds of a period."""
        self._measured = max(self._measured, seconds)

    def allowed_seconds(self) -> float:
        """Return the seconds that an instruction may take, including waiting for other ranks."""
        if self._measured:
            return self._extra_seconds + max(MIN_SECONDS, _OF_MEASURED * self._measured)
        return self._extra_seconds + max(_LEAST_AT_FIRST_SECONDS, _OF_PREDICTED * self._predicted)


def failing_call_seconds(plan: Plan, rewards: Sequence[Reward], tool: Tool | None) -> float:
    """Return the most seconds that failing calls of a job's rewards and tool can delay an instruction.

    A replica has n rollouts that may wait at a time: its rows of a batch for the current step and for each step that
    generation is ahead, and all overcommitted sequences. W workers take the calls in order. Workers that always take
    the next call are done after at most the total time over W plus the longest call (Graham, Bounds on multiprocessing
    timing anomalies, 1969).

    A reward is called for a sample once in a batch of b and, if that fails, once alone, each time for at most
    `timeout_seconds`: 2 n / W + 1 + b times that in all, or n / W + 1 times without batches. A judge is retried for up
    to `retry_seconds`, and one more call may be running at the end. Rewards do not wait for each other. A rollout of k
    turns calls the tool k - 1 times in sequence: (k - 1) (n / W + 1) times its timeout. A function is imported before
    its first call. Calls that succeed are part of measured periods. A process that the machine neither starts nor ends
    is for a watchdog to find.
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
    """Return the most rollouts of one replica whose calls may wait."""
    generation, workload = plan.placement(GENERATE), plan.facts.workload
    batch_size, schedule = max(workload.candidates.batch_size, workload.wave.batch_size), generation.schedule
    batches = max(generation.steps_ahead + 1, schedule.batches_in_flight)
    return rows_per_replica(batches * batch_size + schedule.overcommit, generation.layout.dp)[0]


def collective_timeout(plan: Plan, extra_seconds: float = 0.0) -> float:
    """Return the timeout of a collective, in seconds.

    It exceeds the deadline of every instruction, whose error names what hangs; a library can only report a timeout.
    """
    return _TIMEOUT_OF_DEADLINE * Deadlines(plan, extra_seconds).allowed_seconds() * max_waves_ratio(plan)


def max_waves_ratio(plan: Plan) -> float:
    """Return the ratio of the most waves of a step to the expected ones; 1 without dynamic sampling."""
    workload = plan.facts.workload
    if not (sampling := workload.dynamic_sampling):
        return 1.0
    return sampling.max_waves(workload.num_prompts) / sampling.expected_waves(workload.num_prompts)
