"""Steps that train on the best of several samples, drawn: all are generated and scored, and some of each prompt kept.

How long a response is says nothing of its reward here, so that each sample of a prompt is as likely to be kept as the
next.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.waves import WAVE_REWARDS
from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.generated import Generated, Lengths
from meshwright.profiles.stages import GENERATE


class DrawnBest:
    """Generates all samples of a step and delivers those that are kept; `of_all` plays the generation."""

    def __init__(self, plan: Plan, of_all: Callable[[int], Generated], *, seed: int) -> None:
        self._workload, self._of_all, self._seed = plan.facts.workload, of_all, seed
        self._waiting = plan.placement(GENERATE).cost.amount(WAVE_REWARDS)
        self._played: tuple[int, Generated] | None = None

    def of_step(self, step: int) -> Generated:
        """Every replica waits for the scores of its samples."""
        drawn, kept = self._drawn(step), self.kept(step)
        responses = drawn.responses[kept]
        return Generated(
            prompts=drawn.prompts[kept],
            responses=responses,
            seconds=tuple(seconds + self._waiting for seconds in drawn.seconds),
            live=drawn.live,
            held=drawn.held,
            tokens_by_staleness={0: int(responses.sum())},
        )

    def scored(self, step: int) -> Lengths:
        """Tokens of all samples of a step, prompts included."""
        drawn = self._drawn(step)
        return drawn.prompts + drawn.responses

    def _drawn(self, step: int) -> Generated:
        """Played once for all that is asked of a step."""
        if self._played is None or self._played[0] != step:
            self._played = step, self._of_all(step)
        return self._played[1]

    def kept(self, step: int) -> NDArray[np.int64]:
        """The rows that are trained on, in their order; those of a prompt are together."""
        drawn, per_prompt = self._workload.candidates, self._workload.group_size
        draw = np.random.default_rng([self._seed, step, 3])
        orders = draw.random((drawn.num_prompts, drawn.group_size)).argsort(axis=1)
        chosen = np.sort(orders[:, :per_prompt], axis=1)
        return (np.arange(drawn.num_prompts)[:, None] * drawn.group_size + chosen).ravel()
