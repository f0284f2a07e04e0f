"""Steps of dynamic sampling, drawn: waves of prompts until enough of their groups are kept.

In a step each group is kept with the step's share, which is drawn from the distribution of the workload. A step's
sequences are the first groups kept in the order in which prompts are dealt, as in
`profiles.environment.dynamic_sampling`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshwright.cost_models.waves import WAVE_REWARDS
from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.cache_use import together
from meshwright.planner.simulation.generated import Generated, Lengths
from meshwright.profiles.stages import GENERATE

_MOST_WAVES = 10_000
"""Of a step: a share of a hundredth needs some hundred."""


class StepWaves(NamedTuple):
    """How many a step needs, and the rows of each that are trained on."""

    kept: tuple[Lengths, ...]

    @property
    def number(self) -> int:
        return len(self.kept)


def draw_waves(plan: Plan, *, seed: int, step: int) -> StepWaves:
    """The waves of a step; only the seed and the step decide them."""
    workload = plan.facts.workload
    sampling, draw = workload.dynamic_sampling, np.random.default_rng([seed, step, 3])
    assert sampling
    shares, chances = zip(*sampling.shares, strict=True)
    share, size, missing = (
        float(draw.choice(shares, p=chances)),
        sampling.wave(workload.num_prompts),
        workload.num_prompts,
    )
    kept: list[Lengths] = []
    while missing and len(kept) < _MOST_WAVES:
        groups = np.flatnonzero(draw.random(size) < share)
        chosen = draw.permutation(groups)[:missing]  # lengths are drawn in order, prompts are not dealt so
        kept.append((chosen[:, None] * workload.group_size + np.arange(workload.group_size)).ravel())
        missing -= len(chosen)
    return StepWaves(tuple(kept))


class DrawnInWaves:
    """Generates a step wave by wave; `of_wave` plays one, numbered through all steps."""

    def __init__(self, plan: Plan, of_wave: Callable[[int], Generated], *, seed: int) -> None:
        self._plan, self._of_wave, self._seed = plan, of_wave, seed
        placement = plan.placement(GENERATE)
        workload = plan.facts.workload
        assert workload.dynamic_sampling
        self._expected = workload.dynamic_sampling.expected_waves(workload.num_prompts)
        self._waiting = placement.cost.amount(WAVE_REWARDS) / self._expected

    def of_step(self, step: int) -> Generated:
        """Every replica waits at the end of each wave for the slowest one, and for the scores."""
        waves = draw_waves(self._plan, seed=self._seed, step=step)
        played = [self._of_wave(step * _MOST_WAVES + number) for number in range(waves.number)]
        seconds = sum(max(one.seconds) + self._waiting for one in played)
        prompts, responses = (
            np.concatenate([lengths[rows] for lengths, rows in zip(parts, waves.kept, strict=True)])
            for parts in ([one.prompts for one in played], [one.responses for one in played])
        )
        return Generated(
            prompts=prompts,
            responses=responses,
            seconds=(seconds,) * len(played[0].seconds),
            live=played[0].live,
            held=tuple(
                together((one.held[replica] for one in played), (one.seconds[replica] for one in played))
                for replica in range(len(played[0].seconds))
            ),
            tokens_by_staleness={0: int(responses.sum())},
        )

    def relative(self, step: int) -> float:
        """Waves of a step over those expected."""
        return draw_waves(self._plan, seed=self._seed, step=step).number / self._expected
