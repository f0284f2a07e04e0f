"""The controllers keep what is measured to be fastest, follow the rewards, and depend on nothing but what they saw."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.program.controllers import ChunkTuner, OvercommitTuner
from meshwright.profiles.errors import BadInput


def run(tuner: ChunkTuner, seconds_of: Callable[[int, int], float], num_steps: int) -> list[int]:
    """The sizes that were used, when a step with a size takes so many seconds."""
    used = []
    for step in range(num_steps):
        used.append(tuner.chunk_tokens(step))
        tuner = tuner.after(step, seconds_of(step, used[step]))
    return used


def test_every_size_is_tried_and_the_fastest_is_kept_until_the_next_trials() -> None:
    used = run(ChunkTuner(), lambda _, size: abs(size - 256), 100)
    trials, kept = [128] * 3 + [256] * 3 + [512] * 3, [256] * 41
    assert used == (trials + kept) * 2


def test_the_size_follows_a_change_of_the_job_within_one_period() -> None:
    used = run(ChunkTuner(), lambda step, size: size if step < 50 else -size, 100)
    assert used[49] == 128
    assert used[99] == 512


def test_one_disturbed_step_does_not_decide_the_size() -> None:
    used = run(ChunkTuner(), lambda step, size: 1000 if step == 1 else size, 50)
    assert used[-1] == 128


def test_trials_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BadInput, match="tune every 10 steps or more"):
        ChunkTuner(every=9)


def overcommitted(rewards: list[float], **settings: int) -> list[int]:
    tuner = OvercommitTuner(increment=4, largest=16, window=5, **settings)
    found = []
    for reward in rewards:
        tuner = tuner.after(reward)
        found.append(tuner.overcommit)
    return found


def test_overcommit_grows_while_rewards_rise_and_shrinks_when_they_do_not() -> None:
    rising, falling = [0.1 * step for step in range(10)], [-0.1 * step for step in range(10)]
    assert overcommitted(rising)[4::5] == [4, 8]
    assert overcommitted(falling, overcommit=12)[4::5] == [8, 4]
    assert overcommitted([1.0] * 10, overcommit=12)[4::5] == [8, 4]


def test_overcommit_changes_only_when_a_window_is_full() -> None:
    found = overcommitted([0.1 * step for step in range(9)])
    assert found == [0, 0, 0, 0, 4, 4, 4, 4, 4]


@given(st.lists(st.floats(-10, 10), max_size=60))
def test_overcommit_stays_in_its_range_in_equal_shares(rewards: list[float]) -> None:
    assert set(overcommitted(rewards)) <= {0, 4, 8, 12, 16}


def test_a_window_without_a_slope_is_refused() -> None:
    with pytest.raises(BadInput, match="a slope needs 2 steps or more"):
        OvercommitTuner(increment=1, largest=4, window=1)
