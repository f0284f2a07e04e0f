"""What an instruction may take follows from the plan, then from what was measured."""

from __future__ import annotations

import pytest

from meshwright.planner.environment.rewards import Reward
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.deadlines import Deadlines, away_seconds, patience_seconds, waves_beyond
from meshwright.profiles.environment.dynamic_sampling import DynamicSampling
from tests.runtime.commands.test_report_command import small_plan


def taking(seconds: float) -> Plan:
    return small_plan(1).model_copy(update={"period_seconds": seconds})


@pytest.mark.parametrize(("period", "allowed"), [(0.01, 600.0), (30.0, 600.0), (444.0, 8880.0)])
def test_before_a_turn_was_measured_it_is_twenty_of_those_planned_and_at_least_ten_minutes(
    period: float, allowed: float
) -> None:
    assert Deadlines(taking(period)).allowed_seconds() == pytest.approx(allowed)


def test_afterwards_it_is_five_of_the_longest_measured_and_at_least_a_minute() -> None:
    deadlines = Deadlines(taking(444.0))
    for seconds, allowed in ((400.0, 2000.0), (500.0, 2500.0), (300.0, 2500.0)):
        deadlines.met(seconds)
        assert deadlines.allowed_seconds() == pytest.approx(allowed)
    quick = Deadlines(taking(444.0))
    quick.met(0.5)
    assert quick.allowed_seconds() == 60.0


@pytest.mark.parametrize("period", [0.01, 30.0, 444.0, 5000.0])
def test_no_collective_gives_up_before_the_deadline_as_it_is_planned(period: float) -> None:
    plan = taking(period)
    assert patience_seconds(plan) == 2 * Deadlines(plan).allowed_seconds() >= 1200.0


def test_a_judge_may_be_away_for_as_long_as_it_is_asked_again() -> None:
    judge = Reward(name="judge", url="http://localhost/", timeout_seconds=5.0, retry_seconds=300.0)
    assert away_seconds([judge, Reward(name="exact", function="exact_match", timeout_seconds=20.0)]) == 305.0
    assert away_seconds([]) == 0.0
    deadlines = Deadlines(taking(0.01), 305.0)
    deadlines.met(0.5)
    assert deadlines.allowed_seconds() == 365.0


def test_a_rank_may_wait_for_as_many_waves_as_a_step_may_take() -> None:
    plan = taking(444.0)
    sampling = DynamicSampling(acceptance=1.0, num_prompts=plan.facts.workload.num_prompts)
    workload = plan.facts.workload.model_copy(update={"dynamic_sampling": sampling})
    sampled = plan.model_copy(update={"facts": plan.facts.model_copy(update={"workload": workload})})
    assert waves_beyond(plan) == 1.0
    assert waves_beyond(sampled) == sampling.most_waves(workload.num_prompts) == 100
    assert patience_seconds(sampled) == 100 * patience_seconds(plan)
