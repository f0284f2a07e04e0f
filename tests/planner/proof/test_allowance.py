"""What a turn leaves to one stage, told in ways and in work."""

from __future__ import annotations

import math

import pytest

from meshwright.planner.proof.site_choices import Allowance, ShortPeriod, TimeLowerBounds

TURN = ShortPeriod(10.0, 4, ("generate", "score", "train"), {("generate", "score"): 0.5, ("score", "train"): 0.5})
"""One after the other, each handed over in half a second."""


def test_a_stage_is_left_what_the_longest_way_through_it_leaves() -> None:
    least = {"generate": TimeLowerBounds(6.0, 6.0), "train": TimeLowerBounds(1.0, 1.0)}
    assert TURN.allowance_of("score", least).seconds == pytest.approx(10 - 6 - 0.5 - 1 - 0.5)
    assert TURN.allowance_of("train", least).seconds == pytest.approx(10 - 6 - 0.5 - 0.5)


def test_a_stage_in_another_step_is_not_waited_for_but_takes_ranks() -> None:
    turn = ShortPeriod(10.0, 4, ("generate", "train"), {})
    left = turn.allowance_of("train", {"generate": TimeLowerBounds(9.0, 27.0)})
    assert left.seconds == pytest.approx(10.0)
    assert left.work == pytest.approx(40.0 - 27.0)


def test_nothing_is_left_beside_a_stage_that_has_no_choice() -> None:
    left = TURN.allowance_of("train", {"generate": TimeLowerBounds(math.inf, math.inf)})
    assert not left.allows(1, 0.0)


def test_what_is_known_of_a_stage_does_not_count_against_itself() -> None:
    assert TURN.allowance_of("train", {"train": TimeLowerBounds(9.0, 36.0)}) == TURN.allowance_of("train", {})


@pytest.mark.parametrize(("num_ranks", "seconds", "fits"), [(2, 3.0, True), (2, 4.5, False), (4, 3.0, False)])
def test_a_choice_must_end_in_time_and_leave_ranks_to_others(num_ranks: int, seconds: float, fits: bool) -> None:
    assert Allowance(seconds=4.0, work=8.0).allows(num_ranks, seconds) is fits


def test_choices_of_a_tighter_turn_are_among_those_of_a_looser_one() -> None:
    assert Allowance(4.0, 8.0).covers(Allowance(4.0, 7.0))
    assert not Allowance(4.0, 8.0).covers(Allowance(5.0, 7.0))
