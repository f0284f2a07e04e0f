"""OPPO's controllers (Yan et al., arXiv:2509.25762): how long chunks are, and how many prompts are overcommitted.

Both are values: what is observed after a step gives the next one, and nothing else changes. Every rank that is told the
same observations therefore decides alike. The simulator draws no rewards and costs one plan, so it does not use them.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from meshwright.planner.rules import CHUNKS
from meshwright.profiles.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class ChunkTuner:
    """Tries every size for `trial_steps` steps, keeps the fastest, and starts again every `every` steps.

    Raises BadInput when the trials do not fit between two starts.
    """

    choices: tuple[int, ...] = CHUNKS
    every: int = 50
    trial_steps: int = 3
    step_seconds: tuple[float, ...] = ()  # of the steps since the last start

    def __post_init__(self) -> None:
        if not 0 < self._num_trials < self.every:
            raise BadInput(
                f"chunk tuning every {self.every} steps leaves no room for {self.trial_steps} steps with each of "
                f"{len(self.choices)} sizes; tune every {self._num_trials + 1} steps or more, with one size at least."
            )

    @property
    def chunk_tokens(self) -> int:
        """The size to use in the next step; of equally fast ones the smallest."""
        if len(self.step_seconds) < self._num_trials:
            return self.choices[len(self.step_seconds) // self.trial_steps]
        return min(self.choices, key=lambda size: (self._seconds(size), size))

    def after(self, step_seconds: float) -> ChunkTuner:
        """The tuner after a step with `chunk_tokens` that took so long."""
        seen = (*self.step_seconds, step_seconds)
        return replace(self, step_seconds=seen if len(seen) < self.every else ())

    @property
    def _num_trials(self) -> int:
        return len(self.choices) * self.trial_steps

    def _seconds(self, size: int) -> float:
        """The median of the size's trials, so that one disturbed step decides nothing."""
        first = self.choices.index(size) * self.trial_steps
        return statistics.median(self.step_seconds[first : first + self.trial_steps])


@dataclass(frozen=True, kw_only=True)
class OvercommitTuner:
    """Overcommits `increment` prompts more while rewards rise, else as many fewer, between 0 and `largest`.

    The slope is that of a straight line through the mean rewards of `window` steps. `increment` is a multiple of the
    replicas, which have equal shares. Raises BadInput for a window that has no slope and an increment of nothing.
    """

    increment: int
    largest: int
    overcommit: int = 0
    window: int = 10
    rewards: tuple[float, ...] = ()  # mean of each step since the last decision

    def __post_init__(self) -> None:
        if self.window < 2 or self.increment < 1:
            raise BadInput(
                f"overcommit tuning: window={self.window}, increment={self.increment}; a slope needs 2 steps or more, "
                "and a change 1 prompt or more."
            )

    def after(self, mean_reward: float) -> OvercommitTuner:
        """The tuner after a step whose rewards had this mean."""
        rewards = (*self.rewards, mean_reward)
        if len(rewards) < self.window:
            return replace(self, rewards=rewards)
        slope, _ = statistics.linear_regression(range(self.window), rewards)
        changed = self.overcommit + (self.increment if slope > 0 else -self.increment)
        most = self.largest // self.increment * self.increment
        return replace(self, rewards=(), overcommit=min(max(changed, 0), most))
