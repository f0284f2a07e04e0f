"""Simulated generation with best-of-n: all samples are generated and scored, and some of each prompt are kept.

Rewards are assumed independent of length, so each sample of a prompt is equally likely to be kept.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.waves import WAVE_REWARDS
from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.generated import Generated, Lengths
from meshwright.profiles.stages import GENERATE


class BestOfGeneration:
    """Generation of a step that delivers only the kept samples; `of_all` simulates the generation of all samples."""

    def __init__(self, plan: Plan, of_all: Callable[[int], Generated], *, seed: int) -> None:
        self._workload, self._of_all, self._seed = plan.facts.workload, of_all, seed
        self._reward_seconds = plan.placement(GENERATE).cost.amount(WAVE_REWARDS)
        self._last_generated: tuple[int, Generated] | None = None

    def of_step(self, step: int) -> Generated:
        """Return the generation of a step; every replica waits for the scores of its samples."""
        generated, kept = self._all_samples(step), self.kept(step)
        responses = generated.responses[kept]
        return Generated(
            prompts=generated.prompts[kept],
            responses=responses,
            seconds=tuple(seconds + self._reward_seconds for seconds in generated.seconds),
            live=generated.live,
            held=generated.held,
            tokens_by_staleness={0: int(responses.sum())},
        )

    def scored(self, step: int) -> Lengths:
        """Return the tokens of each sample of a step, prompts included."""
        generated = self._all_samples(step)
        return generated.prompts + generated.responses

    def _all_samples(self, step: int) -> Generated:
        """Return the generation of all samples of a step, cached."""
        if self._last_generated is None or self._last_generated[0] != step:
            self._last_generated = step, self._of_all(step)
        return self._last_generated[1]

    def kept(self, step: int) -> NDArray[np.int64]:
        """Return the rows that are trained on, ascending; rows of a prompt are adjacent."""
        candidates, per_prompt = self._workload.candidates, self._workload.group_size
        rng = np.random.default_rng([self._seed, step, 3])
        orders = rng.random((candidates.num_prompts, candidates.group_size)).argsort(axis=1)
        chosen = np.sort(orders[:, :per_prompt], axis=1)
        return (np.arange(candidates.num_prompts)[:, None] * candidates.group_size + chosen).ravel()
