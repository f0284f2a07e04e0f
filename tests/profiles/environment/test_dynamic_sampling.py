"""How many waves of prompts fill a batch with groups that have a signal."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.profiles.environment.dynamic_sampling import DynamicSampling
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.workload import Workload


def drawn_waves(sampling: DynamicSampling, num_groups: int, *, num_steps: int = 20_000) -> float:
    """The mean number of waves of steps that are played."""
    draw = np.random.default_rng(0)
    shares, chances = zip(*sampling.shares, strict=True)
    share = draw.choice(shares, num_steps, p=chances)
    kept, number = np.zeros(num_steps), np.zeros(num_steps)
    while (open_ := kept < num_groups).any():
        kept += open_ * draw.binomial(sampling.wave_size(num_groups), share)
        number += open_
    return float(number.mean())


@pytest.mark.parametrize("num_prompts", [8, 27, 40, 80, None])
@pytest.mark.parametrize("given", [{"acceptance": 0.6}, {"histogram": ((0.3, 1.0), (0.9, 3.0))}])
def test_expected_waves_are_the_mean_of_those_that_are_drawn(given: dict[str, object], num_prompts: int | None) -> None:
    sampling = DynamicSampling.model_validate({**given, "num_prompts": num_prompts})
    assert sampling.expected_waves(16) == pytest.approx(drawn_waves(sampling, 16), rel=0.02)


def test_one_wave_of_the_batch_is_enough_where_every_group_is_kept() -> None:
    sampling = DynamicSampling(acceptance=1.0)
    assert (sampling.wave_size(128), sampling.expected_waves(128)) == (128, 1.0)


def test_more_prompts_at_once_take_no_more_waves() -> None:
    sizes = [DynamicSampling(acceptance=0.5, num_prompts=n).expected_waves(64) for n in range(32, 256, 16)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "give one of: acceptance or histogram"),
        ({"acceptance": 0.5, "histogram": ((0.5, 1.0),)}, "give one of"),
        ({"acceptance": 0.0}, "acceptance"),
        ({"histogram": ((1.5, 1.0),)}, "a histogram needs shares"),
        ({"histogram": ((0.5, 0.0),)}, "a weight that is not 0"),
    ],
)
def test_what_is_no_share_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DynamicSampling.model_validate(given)


def test_a_wave_is_of_whole_groups() -> None:
    lengths = LengthSpec(max=8, fixed=8)
    plain = Workload(batch_size=32, group_size=4, prompt=lengths, response=lengths)
    assert plain.wave is plain
    sampled = plain.model_copy(update={"dynamic_sampling": DynamicSampling(acceptance=0.5)})
    assert sampled.wave.batch_size == 64
    assert sampled.wave.dynamic_sampling is None
    with pytest.raises(ValueError, match="group_size=1 has none"):
        Workload(batch_size=32, prompt=lengths, response=lengths, dynamic_sampling=DynamicSampling(acceptance=0.5))


def test_a_plan_may_choose_what_a_job_leaves_open_and_nothing_else() -> None:
    planned = DynamicSampling(histogram=((0.3, 1.0),), num_prompts=7)
    left_open, fixed = DynamicSampling(acceptance=0.5), DynamicSampling(acceptance=0.5, num_prompts=9)
    assert left_open.completed_by_plan(planned, shares_are_observed=False) == DynamicSampling(
        acceptance=0.5, num_prompts=7
    )
    assert fixed.completed_by_plan(planned, shares_are_observed=False) == fixed
    assert left_open.completed_by_plan(planned, shares_are_observed=True) == planned
