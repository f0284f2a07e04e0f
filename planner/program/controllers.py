"""OPPO's controllers (Yan et al., arXiv:2509.25762), which adapt the chunk size and the overcommit during a run.

Both are immutable: the observation of a step gives the next controller, so ranks with the same observations take the
same decisions. The plan's memory is only proven to suffice up to the plan's own values, which controllers never exceed.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from meshwright.planner.plan.layout_and_schedule_rules import CHUNKS
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.trace import NUM_CHUNK_TOKENS, NUM_OVERCOMMIT

OVERCOMMIT_STEPS = 8
"""A change of the overcommit is about the plan's overcommit divided by this number, the same for all replicas."""


@dataclass(frozen=True, kw_only=True)
class ChunkTuner:
    """Tries every chunk size for `trial_steps` steps, uses the fastest, and repeats this every `every` steps.

    Steps may be observed late: until all trials are known, the last size tried is used. Raises BadInput if the trials
    do not fit within `every` steps.
    """

    choices: tuple[int, ...] = CHUNKS
    every: int = 50
    trial_steps: int = 3
    trial_seconds: tuple[float, ...] = ()  # of the trials observed so far in this round of `every` steps

    def __post_init__(self) -> None:
        if not 0 < self._num_trials < self.every:
            raise BadInput(
                f"chunk tuning every {self.every} steps leaves no room for {self.trial_steps} steps with each of "
                f"{len(self.choices)} sizes; tune every {self._num_trials + 1} steps or more, with one size at least."
            )

    def chunk_tokens(self, step: int) -> int:
        """Return the size to use in a step; of equally fast sizes, the smallest."""
        trial = step % self.every
        if trial < self._num_trials:
            return self.choices[trial // self.trial_steps]
        if len(self.trial_seconds) < self._num_trials:
            return self.choices[-1]
        return min(self.choices, key=lambda size: (self._seconds(size), size))

    def after(self, step: int, seconds: float) -> ChunkTuner:
        """Return the tuner after a step that took `seconds`; steps must be passed in order."""
        trial = step % self.every
        if trial >= self._num_trials:
            return self
        return replace(self, trial_seconds=(*self.trial_seconds[:trial], seconds))

    @property
    def _num_trials(self) -> int:
        return len(self.choices) * self.trial_steps

    def _seconds(self, size: int) -> float:
        """Return the median of the size's trials, so that one outlier does not decide."""
        first = self.choices.index(size) * self.trial_steps
        return statistics.median(self.trial_seconds[first : first + self.trial_steps])


@dataclass(frozen=True, kw_only=True)
class OvercommitTuner:
    """Raises the overcommit by `increment` prompts while rewards rise, else lowers it, between 0 and `largest`.

    The slope is that of a linear regression over the mean rewards of `window` steps. The mean of a step is over the
    sequences started in it, not those delivered in it: long sequences are delivered late and the score may depend on
    length, so the mean over delivered sequences would change with the overcommit itself. `increment` is a multiple of
    the number of replicas, which have equal shares. Raises BadInput for a window below 2 or an increment below 1.
    """

    increment: int
    largest: int
    overcommit: int = 0
    window: int = 10
    rewards: tuple[float, ...] = ()  # mean over the sequences started in each step since the last decision

    def __post_init__(self) -> None:
        if self.window < 2 or self.increment < 1:
            raise BadInput(
                f"overcommit tuning: window={self.window}, increment={self.increment}; a slope needs 2 steps or more, "
                "and a change 1 prompt or more."
            )

    def after(self, mean_reward: float) -> OvercommitTuner:
        """Return the tuner after the mean reward of all sequences started in a step is known."""
        rewards = (*self.rewards, mean_reward)
        if len(rewards) < self.window:
            return replace(self, rewards=rewards)
        slope, _ = statistics.linear_regression(range(self.window), rewards)
        changed = self.overcommit + (self.increment if slope > 0 else -self.increment)
        return replace(self, rewards=(), overcommit=min(max(changed, 0), self.largest))


@dataclass(frozen=True, kw_only=True)
class StepObservation:
    """The measured seconds and scores of a step that was trained."""

    step: int
    seconds: float
    scores_by_age: tuple[tuple[int, float], ...] = ()
    """For each age 0, 1, 2, ... in steps: the number and mean score of the batch's sequences that a policy of that age
    started to sample."""


@dataclass(frozen=True, kw_only=True)
class ControllerSetting:
    """The controllers' values for one period: a stage that streams reads chunks of at most `chunk_tokens`; `overcommit`
    counts sequences over all replicas."""

    chunk_tokens: int
    overcommit: int


def setting_facts(setting: ControllerSetting) -> dict[str, float]:
    """Return the setting as facts of a generation's span in a trace."""
    return {NUM_CHUNK_TOKENS: float(setting.chunk_tokens), NUM_OVERCOMMIT: float(setting.overcommit)}


class Controllers:
    """The settings of the periods of one run of a plan.

    A setting depends on observations of at least `delay` periods before, so that no rank waits for a step that is still
    being trained elsewhere.
    """

    def __init__(self, plan: Plan) -> None:
        self.delay = 2 + max(plan.ahead.values())
        self._chunks, self._overcommit = _chunk_tuner(plan), _overcommit_tuner(plan)
        self._largest = ControllerSetting(
            chunk_tokens=max(_chunk_sizes(plan), default=0), overcommit=plan.placement(GENERATE).schedule.overcommit
        )
        self._observations: dict[int, StepObservation] = {}
        self._staleness_bound = plan.staleness
        self._scores_by_version: dict[int, tuple[int, float]] = {}
        """The number of delivered sequences and the sum of their scores, by the version of the starting policy."""
        self._next = 0
        """The first step that has not been processed."""

    @property
    def is_active(self) -> bool:
        """True if there is anything to decide: the job enables controllers, and the plan leaves a choice."""
        return self._chunks is not None or self._overcommit is not None

    def observe(self, observation: StepObservation) -> None:
        """Add the observation of a step; steps must be passed in order from step 0."""
        self._observations[observation.step] = observation

    def missing_steps(self, period: int) -> range:
        """Return the steps whose observations the period's setting needs and that are not known yet."""
        return range(self._next + len(self._observations), period - self.delay + 1)

    def setting(self, period: int) -> ControllerSetting:
        """Return the setting of a period; periods must be requested in order."""
        assert not self.missing_steps(period), "all observations that a period needs are known when it starts"
        while self._next <= period - self.delay:
            self._process(self._observations.pop(self._next))
        return ControllerSetting(
            chunk_tokens=self._chunks.chunk_tokens(max(period, 0)) if self._chunks else self._largest.chunk_tokens,
            overcommit=self._overcommit.overcommit if self._overcommit else self._largest.overcommit,
        )

    def _process(self, observation: StepObservation) -> None:
        self._next += 1
        if self._chunks:
            self._chunks = self._chunks.after(observation.step, observation.seconds)
        if self._overcommit:
            self._overcommit = self._with_observation(self._overcommit, observation)

    def _with_observation(self, tuner: OvercommitTuner, observation: StepObservation) -> OvercommitTuner:
        """Return the tuner after an observation, which completes the mean of the oldest version within the staleness
        bound: no later step may train on sequences that this version started."""
        for age, (number, mean) in enumerate(observation.scores_by_age):
            version = observation.step - age
            count, total = self._scores_by_version.get(version, (0, 0.0))
            self._scores_by_version[version] = count + number, total + number * mean
        number, total = self._scores_by_version.pop(observation.step - self._staleness_bound, (0, 0.0))
        return tuner.after(total / number) if number else tuner


def _chunk_sizes(plan: Plan) -> set[int]:
    return {p.schedule.chunk_tokens for p in plan.placements if p.schedule.chunk_tokens}


def _chunk_tuner(plan: Plan) -> ChunkTuner | None:
    """Return a tuner that tries the standard sizes up to the plan's largest.

    None if there is only one, or the job has no controllers.
    """
    largest = max(_chunk_sizes(plan), default=0)
    choices = tuple(sorted({*(size for size in CHUNKS if size < largest), largest}))
    return ChunkTuner(choices=choices) if plan.facts.controllers and len(choices) > 1 else None


def _overcommit_tuner(plan: Plan) -> OvercommitTuner | None:
    """Return a tuner that starts with the plan's overcommit; None if that is 0 or the job has no controllers."""
    placement = plan.placement(GENERATE)
    largest, dp = placement.schedule.overcommit, placement.layout.dp
    if not (plan.facts.controllers and largest):
        return None
    increment = max(1, largest // (dp * OVERCOMMIT_STEPS)) * dp
    return OvercommitTuner(increment=increment, largest=largest, overcommit=largest)
