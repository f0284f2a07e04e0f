"""What an instruction may take follows from the plan, then from what was measured."""

from __future__ import annotations

import pytest

from meshwright.planner.job.rewards_and_tools import HostWorkers, Reward, Tool
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.durations import (
    IMPORT_SECONDS,
    Deadlines,
    collective_timeout,
    failing_call_seconds,
    max_waves_ratio,
)
from meshwright.profiles.environment.dynamic_sampling import DynamicSampling
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE
from tests.runtime.cli.test_report_command import small_plan


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
        deadlines.record_period(seconds)
        assert deadlines.allowed_seconds() == pytest.approx(allowed)
    quick = Deadlines(taking(444.0))
    quick.record_period(0.5)
    assert quick.allowed_seconds() == 60.0


@pytest.mark.parametrize("period", [0.01, 30.0, 444.0, 5000.0])
def test_no_collective_gives_up_before_the_deadline_as_it_is_planned(period: float) -> None:
    plan = taking(period)
    assert collective_timeout(plan) == 2 * Deadlines(plan).allowed_seconds() >= 1200.0


def rewarding(*, num_workers: int = 1, batch_size: int = 64) -> Plan:
    """A plan of two replicas that gives its judge so many workers for each."""
    plan = taking(0.01)
    generation = plan.placement(GENERATE)
    layout = Layout(dp=2)
    placed = generation.model_copy(
        update={"layout": layout, "steps_ahead": 0, "schedule": Schedule(generation_slots=4)}
    )
    placements = tuple(placed if one.stage == GENERATE else one for one in plan.placements)
    workload = plan.facts.workload.model_copy(update={"batch_size": batch_size, "group_size": 1})
    facts = plan.facts.model_copy(update={"workload": workload})
    workers = (HostWorkers(reward="judge", workers=num_workers),)
    return plan.model_copy(update={"placements": placements, "facts": facts, "workers": workers})


JUDGE = Reward(name="judge", url="http://localhost/", timeout_seconds=5.0, retry_seconds=300.0)
FUNCTION = Reward(name="judge", function="exact_match", timeout_seconds=5.0)


def test_without_calls_nothing_is_waited_for() -> None:
    assert failing_call_seconds(taking(1.0), [], None) == 0.0
    deadlines = Deadlines(taking(0.01), 305.0)
    deadlines.record_period(0.5)
    assert deadlines.allowed_seconds() == 365.0


def test_a_judge_is_asked_again_for_its_time_and_every_queued_sample_once_more() -> None:
    """32 samples of a replica by 4 workers are 8 calls one after the other, one that was begun before and one that was
    under way when the time was over."""
    assert failing_call_seconds(rewarding(num_workers=4), [JUDGE], None) == 300.0 + (8 + 1 + 1) * 5.0


def test_samples_of_batches_may_be_asked_for_twice() -> None:
    batches = JUDGE.model_copy(update={"batch_size": 8})
    assert failing_call_seconds(rewarding(num_workers=4), [batches], None) == 300.0 + (16 + 1 + 8 + 1) * 5.0


def test_a_function_may_take_its_time_for_every_sample_and_be_imported_before() -> None:
    assert failing_call_seconds(rewarding(num_workers=4), [FUNCTION], None) == IMPORT_SECONDS + (8 + 1) * 5.0
    slower = JUDGE.model_copy(update={"name": "other"})
    assert failing_call_seconds(rewarding(num_workers=4), [FUNCTION, slower], None) == 300.0 + (32 + 1 + 1) * 5.0


def test_a_tool_may_take_its_time_in_every_turn_but_the_last() -> None:
    plan = rewarding()
    turns = ToolTurns(number=LengthSpec(max=4, fixed=3), result=LengthSpec(max=8, fixed=8), max_tokens=64)
    workload = plan.facts.workload.model_copy(update={"turns": turns})
    several = plan.model_copy(update={"facts": plan.facts.model_copy(update={"workload": workload})})
    tool = Tool(function="calculator", workers=8, timeout_seconds=3.0)
    assert failing_call_seconds(several, [], tool) == IMPORT_SECONDS + 3 * (4 + 1) * 3.0
    assert failing_call_seconds(several, [JUDGE], tool) == failing_call_seconds(
        several, [], tool
    ) + failing_call_seconds(plan, [JUDGE], None)


def test_a_rank_may_wait_for_as_many_waves_as_a_step_may_take() -> None:
    plan = taking(444.0)
    sampling = DynamicSampling(acceptance=1.0, num_prompts=plan.facts.workload.num_prompts)
    workload = plan.facts.workload.model_copy(update={"dynamic_sampling": sampling})
    sampled = plan.model_copy(update={"facts": plan.facts.model_copy(update={"workload": workload})})
    assert max_waves_ratio(plan) == 1.0
    assert max_waves_ratio(sampled) == sampling.max_waves(workload.num_prompts) == 100
    assert collective_timeout(sampled) == 100 * collective_timeout(plan)
