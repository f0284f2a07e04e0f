"""How long an instruction of a run may take before something hangs, by the plan and by what the run has shown.

An instruction waits for ranks that may do anything else of a turn meanwhile, so what it may take is a multiple of a
whole turn: twenty times the one that the plan predicts and, once turns were measured, five times the longest of them.
It is never less than a minute, which leaves room for a busy machine and a turn of milliseconds, and before a turn was
measured ten minutes, for libraries connect their ranks and compile in the first one. Besides, calls of rewards and of a
tool may fail, each as late as it may. A rank that waits for what dynamic sampling draws may wait for as many waves as a
step may take.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.environment.rewards import Reward
from meshwright.planner.environment.tool import Tool
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.packing import rows_of_replicas
from meshwright.profiles.stages import GENERATE

LEAST_SECONDS, _LEAST_AT_FIRST_SECONDS = 60.0, 600.0
_OF_PREDICTED, _OF_MEASURED = 20.0, 5.0
_PATIENCE_OF_DEADLINE = 2.0

IMPORT_SECONDS = 120.0
"""In which a process of a reward or a tool has to have imported its function."""


class Deadlines:
    """Of one rank."""

    def __init__(self, plan: Plan, away_seconds: float = 0.0) -> None:
        """`away_seconds` may pass besides."""
        self._away = away_seconds
        self._predicted, self._measured = plan.period_seconds, 0.0

    def met(self, seconds: float) -> None:
        """A turn took this long."""
        self._measured = max(self._measured, seconds)

    def allowed_seconds(self) -> float:
        """What an instruction may take, its waiting for other ranks included."""
        if self._measured:
            return self._away + max(LEAST_SECONDS, _OF_MEASURED * self._measured)
        return self._away + max(_LEAST_AT_FIRST_SECONDS, _OF_PREDICTED * self._predicted)


def away_seconds(plan: Plan, rewards: Sequence[Reward], tool: Tool | None) -> float:
    """Seconds that failing calls of a job's rewards and its tool may keep an instruction waiting, at most.

    A replica has n rollouts that may wait at a time: its rows of a batch for the step under way and each that the
    generation is ahead, and all sequences beyond a batch. W workers take their calls in order, and whoever takes the
    next job when it is free has done all after what they take together over W and the longest of them (Graham, Bounds
    on multiprocessing timing anomalies, 1969).

    A sample of a reward is called for once in a batch of b and, where that fails, once alone, each time for
    `timeout_seconds` at most: 2 n / W + 1 + b times that, and without batches n / W + 1. A judge is asked again
    besides for `retry_seconds` in all, and one more call may be under way at their end. Rewards do not wait for each
    other. A rollout of k turns calls the tool k - 1 times, one after the other: (k - 1) (n / W + 1) times its timeout.
    Before its first call a function is imported. What calls take that are answered is part of turns, and a process
    that the machine neither starts nor ends is what a watchdog is to find.
    """
    num_rollouts = _most_rollouts(plan)
    seconds = max((_reward_seconds(plan, reward, num_rollouts) for reward in rewards), default=0.0)
    if tool and (turns := plan.facts.workload.turns):
        rounds = num_rollouts / tool.workers + 1
        seconds += IMPORT_SECONDS + (turns.number.max - 1) * rounds * tool.timeout_seconds
    return seconds


def _reward_seconds(plan: Plan, reward: Reward, num_samples: int) -> float:
    workers = next((one.workers for one in plan.workers if one.reward == reward.name), 1)
    most = min(reward.batch_size, num_samples)
    calls = num_samples / workers + 1 if most == 1 else 2 * num_samples / workers + 1 + most
    if reward.url:
        return reward.retry_seconds + (calls + 1) * reward.timeout_seconds
    return IMPORT_SECONDS + calls * reward.timeout_seconds


def _most_rollouts(plan: Plan) -> int:
    """Of one replica whose calls may wait."""
    generation, workload = plan.placement(GENERATE), plan.facts.workload
    batch_size, schedule = max(workload.candidates.batch_size, workload.wave.batch_size), generation.schedule
    batches = max(generation.steps_ahead + 1, schedule.batches_in_flight)
    return rows_of_replicas(batches * batch_size + schedule.overcommit, generation.layout.dp)[0]


def patience_seconds(plan: Plan, away: float = 0.0) -> float:
    """How long a collective of the plan waits for its ranks: beyond the deadline of any instruction as it is planned,
    which names what hangs, while a library can only say that it waited in vain."""
    return _PATIENCE_OF_DEADLINE * Deadlines(plan, away).allowed_seconds() * waves_beyond(plan)


def waves_beyond(plan: Plan) -> float:
    """How many times the expected waves of a step it may take; 1 without dynamic sampling."""
    workload = plan.facts.workload
    if not (sampling := workload.dynamic_sampling):
        return 1.0
    return sampling.most_waves(workload.num_prompts) / sampling.expected_waves(workload.num_prompts)
