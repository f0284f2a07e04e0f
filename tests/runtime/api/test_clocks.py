"""A plan in virtual time, and with processes that wait."""

from __future__ import annotations

import pytest

from meshwright import api
from meshwright.cost_models.blended import cost_model
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan


def test_steps_that_are_not_sampled_take_what_the_plan_says(small_plan: api.Plan) -> None:
    found = api.simulate(small_plan, steps=3, sampled=False)
    assert found.steps.seconds == pytest.approx([small_plan.period_seconds] * 3)
    assert found.durations == "planned"
    assert found.spans == ()


def test_the_seed_decides_the_lengths() -> None:
    facts = api.with_setting(small_facts(), {"workload.response": {"max": 128, "median": 20, "p99": 100}})
    plan = random_plan(1, facts, cost_model(facts.cluster, facts.workload, facts.precision))
    one, again, other = (api.simulate(plan, steps=3, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one.steps != other.steps
    assert one.durations == "sampled"


@pytest.mark.check_all
def test_a_rehearsal_is_compared_with_the_simulation_of_the_same_steps(small_plan: api.Plan) -> None:
    found = api.rehearse(small_plan, steps=2, speed=1.0, ranks_per_process=2)
    assert found.simulated == api.simulate(small_plan, steps=2, sampled=False).steps
    assert (found.num_processes, len(found.steps.seconds)) == (1, 2)
    assert api.timeline(small_plan, api.simulate(small_plan, steps=2, traced=True), found).count('"REHEARSED"') == 1
