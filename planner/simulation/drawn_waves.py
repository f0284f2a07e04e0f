"""Simulated generation with dynamic sampling: waves of prompts until enough of their groups are kept.

In a step each group is kept with a probability that is drawn from the distribution of the workload. A step's sequences
are the first kept groups in order of their prompts, as in `profiles.environment.dynamic_sampling`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshwright.cost_models.waves import WAVE_REWARDS
from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.cache_use import combined_use
from meshwright.planner.simulation.generated import Generated, Lengths
from meshwright.profiles.stages import GENERATE

_MOST_WAVES = 10_000
"""Most waves of a step; keeping one group in a hundred needs about a hundred."""


class StepWaves(NamedTuple):
    """The waves of a step: for each, the rows that are trained on."""

    kept: tuple[Lengths, ...]

    @property
    def number(self) -> int:
        return len(self.kept)


def sample_waves(plan: Plan, *, seed: int, step: int) -> StepWaves:
    """Return the waves of a step, which depend only on the seed and the step."""
    workload = plan.facts.workload
    sampling, rng = workload.dynamic_sampling, np.random.default_rng([seed, step, 3])
    assert sampling
    shares, chances = zip(*sampling.shares, strict=True)
    share, size, missing = (
        float(rng.choice(shares, p=chances)),
        sampling.wave_size(workload.num_prompts),
        workload.num_prompts,
    )
    kept: list[Lengths] = []
    while missing and len(kept) < _MOST_WAVES:
        groups = np.flatnonzero(rng.random(size) < share)
        chosen = rng.permutation(groups)[:missing]  # lengths are sorted, prompts are not
        kept.append((chosen[:, None] * workload.group_size + np.arange(workload.group_size)).ravel())
        missing -= len(chosen)
    return StepWaves(tuple(kept))


class WaveGeneration:
    """Generation of a step wave by wave; `of_wave` simulates one wave, numbered over all steps."""

    def __init__(self, plan: Plan, of_wave: Callable[[int], Generated], *, seed: int) -> None:
        self._plan, self._of_wave, self._seed = plan, of_wave, seed
        placement = plan.placement(GENERATE)
        workload = plan.facts.workload
        assert workload.dynamic_sampling
        self._expected_waves = workload.dynamic_sampling.expected_waves(workload.num_prompts)
        self._reward_seconds = placement.cost.amount(WAVE_REWARDS) / self._expected_waves

    def of_step(self, step: int) -> Generated:
        """Return the generation of a step; every replica waits after each wave for the slowest one and the scores."""
        waves = sample_waves(self._plan, seed=self._seed, step=step)
        waves_generated = [self._of_wave(step * _MOST_WAVES + number) for number in range(waves.number)]
        seconds = sum(max(wave.seconds) + self._reward_seconds for wave in waves_generated)
        prompts, responses = (
            np.concatenate([lengths[rows] for lengths, rows in zip(parts, waves.kept, strict=True)])
            for parts in ([wave.prompts for wave in waves_generated], [wave.responses for wave in waves_generated])
        )
        return Generated(
            prompts=prompts,
            responses=responses,
            seconds=(seconds,) * len(waves_generated[0].seconds),
            live=waves_generated[0].live,
            held=tuple(
                combined_use(
                    (wave.held[replica] for wave in waves_generated),
                    (wave.seconds[replica] for wave in waves_generated),
                )
                for replica in range(len(waves_generated[0].seconds))
            ),
            tokens_by_staleness={0: int(responses.sum())},
        )

    def waves_ratio(self, step: int) -> float:
        """Return the number of waves of a step over the expected number."""
        return sample_waves(self._plan, seed=self._seed, step=step).number / self._expected_waves
