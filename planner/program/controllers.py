"""OPPO's controllers (Yan et al., arXiv:2509.25762): how long chunks are, and how many prompts are overcommitted.

Both are values: what is observed of a step gives the next one, and nothing else changes. Every rank that is told the
same observations therefore decides alike. What a plan has chosen is the most that its memory was proven for, so the
controllers move at and below it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.rules import CHUNKS
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.trace import NUM_CHUNK_TOKENS, NUM_OVERCOMMIT

OVERCOMMIT_STEPS = 8
"""Overcommit moves by an eighth of the plan's, in equal shares of the replicas."""


@dataclass(frozen=True, kw_only=True)
class ChunkTuner:
    """Tries every size for `trial_steps` steps, keeps the fastest, and starts again every `every` steps.

    Steps may be observed late: until all trials are known, the size that was tried last stays. Raises BadInput when
    the trials do not fit between two starts.
    """

    choices: tuple[int, ...] = CHUNKS
    every: int = 50
    trial_steps: int = 3
    trial_seconds: tuple[float, ...] = ()  # of the trials since the last start that are known

    def __post_init__(self) -> None:
        if not 0 < self._num_trials < self.every:
            raise BadInput(
                f"chunk tuning every {self.every} steps leaves no room for {self.trial_steps} steps with each of "
                f"{len(self.choices)} sizes; tune every {self._num_trials + 1} steps or more, with one size at least."
            )

    def chunk_tokens(self, step: int) -> int:
        """The size to use in a step; of equally fast ones the smallest."""
        since = step % self.every
        if since < self._num_trials:
            return self.choices[since // self.trial_steps]
        if len(self.trial_seconds) < self._num_trials:
            return self.choices[-1]
        return min(self.choices, key=lambda size: (self._seconds(size), size))

    def after(self, step: int, seconds: float) -> ChunkTuner:
        """The tuner that knows how long a step took with the size it was to use; steps come in their order."""
        since = step % self.every
        if since >= self._num_trials:
            return self
        return replace(self, trial_seconds=(*self.trial_seconds[:since], seconds))

    @property
    def _num_trials(self) -> int:
        return len(self.choices) * self.trial_steps

    def _seconds(self, size: int) -> float:
        """The median of the size's trials, so that one disturbed step decides nothing."""
        first = self.choices.index(size) * self.trial_steps
        return statistics.median(self.trial_seconds[first : first + self.trial_steps])


@dataclass(frozen=True, kw_only=True)
class OvercommitTuner:
    """Overcommits `increment` prompts more while rewards rise, else as many fewer, between 0 and `largest`.

    The slope is that of a straight line through the mean rewards of `window` steps, each of the sequences that were
    begun in it and not of those that were delivered: which of them are delivered late is decided by their length, and
    the score may depend on it, so that a batch's mean moves with the overcommit itself. `increment` is a multiple of
    the replicas, which have equal shares. Raises BadInput for a window that has no slope and an increment of nothing.
    """

    increment: int
    largest: int
    overcommit: int = 0
    window: int = 10
    rewards: tuple[float, ...] = ()  # mean of what was begun in each step since the last decision

    def __post_init__(self) -> None:
        if self.window < 2 or self.increment < 1:
            raise BadInput(
                f"overcommit tuning: window={self.window}, increment={self.increment}; a slope needs 2 steps or more, "
                "and a change 1 prompt or more."
            )

    def after(self, mean_reward: float) -> OvercommitTuner:
        """The tuner after the rewards of all that was begun in a step are known to have this mean."""
        rewards = (*self.rewards, mean_reward)
        if len(rewards) < self.window:
            return replace(self, rewards=rewards)
        slope, _ = statistics.linear_regression(range(self.window), rewards)
        changed = self.overcommit + (self.increment if slope > 0 else -self.increment)
        return replace(self, rewards=(), overcommit=min(max(changed, 0), self.largest))


@dataclass(frozen=True, kw_only=True)
class StepObservation:
    """What a run tells of a step that was trained."""

    step: int
    seconds: float
    begun: tuple[tuple[int, float], ...] = ()
    """Of the batch's sequences that the policy of so many steps before has begun: how many, and their mean score."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a turn of generation does: a stage that streams reads chunks of `chunk_tokens` or of its own, where those
    are smaller; `overcommit` counts sequences over all replicas."""

    chunk_tokens: int
    overcommit: int


def facts_of(setting: Setting) -> dict[str, float]:
    """What a trace says of the generation that was done so."""
    return {NUM_CHUNK_TOKENS: float(setting.chunk_tokens), NUM_OVERCOMMIT: float(setting.overcommit)}


class Controllers:
    """The setting of each turn of one run of a plan.

    A turn follows from what was observed `delay` turns before it and earlier, so that nobody waits for a step that is
    still being trained elsewhere.
    """

    def __init__(self, plan: Plan) -> None:
        self.delay = 2 + max(plan.ahead.values())
        self._chunks, self._overcommit = _chunk_tuner(plan), _overcommit_tuner(plan)
        self._largest = Setting(
            chunk_tokens=max(_chunk_sizes(plan), default=0), overcommit=plan.placement(GENERATE).schedule.overcommit
        )
        self._known: dict[int, StepObservation] = {}
        self._bound = plan.staleness
        self._begun: dict[int, tuple[int, float]] = {}
        """By the policy's version that began them: sequences that were delivered, and the sum of their scores."""
        self._next = 0
        """The first step that has not been taken into account."""

    @property
    def decides(self) -> bool:
        """Whether there is anything to decide: the job asks for it, and the plan leaves a choice."""
        return self._chunks is not None or self._overcommit is not None

    def observe(self, observation: StepObservation) -> None:
        """Steps come in their order from step 0."""
        self._known[observation.step] = observation

    def needs(self, turn: int) -> range:
        """The steps whose observations the turn follows from, and that are not known yet."""
        return range(self._next + len(self._known), turn - self.delay + 1)

    def setting(self, turn: int) -> Setting:
        """What the turn does; turns are asked for in their order."""
        assert not self.needs(turn), "what decides about a turn is known when it begins"
        while self._next <= turn - self.delay:
            self._take(self._known.pop(self._next))
        return Setting(
            chunk_tokens=self._chunks.chunk_tokens(max(turn, 0)) if self._chunks else self._largest.chunk_tokens,
            overcommit=self._overcommit.overcommit if self._overcommit else self._largest.overcommit,
        )

    def _take(self, observation: StepObservation) -> None:
        self._next += 1
        if self._chunks:
            self._chunks = self._chunks.after(observation.step, observation.seconds)
        if self._overcommit:
            self._overcommit = self._follow(self._overcommit, observation)

    def _follow(self, tuner: OvercommitTuner, observation: StepObservation) -> OvercommitTuner:
        """What a version began is known whole when the bound on staleness lets nothing of it come any more."""
        for age, (number, mean) in enumerate(observation.begun):
            known, total = self._begun.get(observation.step - age, (0, 0.0))
            self._begun[observation.step - age] = known + number, total + number * mean
        number, total = self._begun.pop(observation.step - self._bound, (0, 0.0))
        return tuner.after(total / number) if number else tuner


def _chunk_sizes(plan: Plan) -> set[int]:
    return {p.schedule.chunk_tokens for p in plan.placements if p.schedule.chunk_tokens}


def _chunk_tuner(plan: Plan) -> ChunkTuner | None:
    """It chooses among the usual sizes up to the plan's largest, and that one; None where those are one."""
    largest = max(_chunk_sizes(plan), default=0)
    choices = tuple(sorted({*(size for size in CHUNKS if size < largest), largest}))
    return ChunkTuner(choices=choices) if plan.facts.controllers and len(choices) > 1 else None


def _overcommit_tuner(plan: Plan) -> OvercommitTuner | None:
    """It begins with what the plan chose."""
    placement = plan.placement(GENERATE)
    largest, dp = placement.schedule.overcommit, placement.layout.dp
    if not (plan.facts.controllers and largest):
        return None
    increment = max(1, largest // (dp * OVERCOMMIT_STEPS)) * dp
    return OvercommitTuner(increment=increment, largest=largest, overcommit=largest)
