"""How fast a rehearsal may be: fast enough to be of use, and slow enough for waits to dominate."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.cost_queries import field_bytes
from meshwright.runtime.execution.rehearse import default_speed, num_processors, processor_seconds
from tests.planner.jobs import small_facts
from tests.runtime.execution.test_rehearse import slow_enough as ten_times_as_long
from tests.runtime.plans_by_hand import Where, plan_by_hand


def test_a_sequence_has_the_bytes_of_its_fields() -> None:
    workload = small_facts(batch_size=1, response=36).workload
    assert workload.mean_tokens == 100
    fields = ("tokens", "prompt_lengths", "versions")
    assert sum(field_bytes(workload, field) for field in fields) == 8 * 100 + 8 + 4 * 100


def test_more_ranks_and_longer_responses_are_more_work() -> None:
    short, long = (
        plan_by_hand(small_facts(response=n), {"other": Where("0:2", "dp2"), "critic_train": Where("2:2", "dp2")})
        for n in (64, 128)
    )
    one = plan_by_hand(small_facts(response=64), {"other": Where("0:1")})
    assert 0 < processor_seconds(one) < processor_seconds(short) < processor_seconds(long)


def test_a_plan_of_a_short_turn_is_rehearsed_as_planned_and_a_long_one_faster() -> None:
    plan = plan_by_hand(small_facts(), {"other": Where("0:1")})
    assert plan.period_seconds < 2
    assert default_speed(plan) == 1
    long = plan
    while long.period_seconds < 100:
        long = ten_times_as_long(long)
    assert default_speed(long) * long.period_seconds == pytest.approx(2)
    assert 10 * processor_seconds(long) / num_processors() < 2
