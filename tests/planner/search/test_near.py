"""Near a plan there is one that verifies under other facts, and that is hardly slower than the best."""

from __future__ import annotations

import pytest

from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.pins import parse_pin
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.neighbourhood import best_plan_nearby
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.jobs import ToyModel, mixture_facts, small_facts

FACTS = small_facts(batch_size=8)


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = best_plan(FACTS, ToyModel(FACTS))
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize(
    "facts",
    [FACTS, small_facts(batch_size=8, response=384), small_facts(ranks_per_node=2, batch_size=8)],
    ids=["the same", "longer responses", "half of the ranks"],
)
def test_a_plan_near_another_is_legal_and_nearly_the_best(plan: Plan, facts: Facts) -> None:
    near, best = best_plan_nearby(plan, facts, ToyModel(facts), Limits()), best_plan(facts, ToyModel(facts))
    assert isinstance(near, Plan)
    assert isinstance(best, Plan)
    assert verify(near) == ()
    assert near.facts == facts
    assert near.period_seconds <= 1.05 * best.period_seconds
    assert near.solver.work.num_time_costs < best.solver.work.num_time_costs


def test_nothing_is_said_of_the_plans_that_were_left_out(plan: Plan) -> None:
    near = best_plan_nearby(plan, FACTS, ToyModel(FACTS), Limits())
    assert near is not None
    assert (near.solver.status, near.solver.bound_seconds, near.solver.gap) == ("feasible", 0.0, 1.0)


def test_near_a_plan_with_whole_experts_are_others() -> None:
    facts = mixture_facts(FACTS)
    pin = parse_pin("actor_train.layout=tp2,dp2,ep4,etp1,sp", PPO_GRAPH)
    whole = best_plan(facts, ToyModel(facts), pins=(pin,))
    assert isinstance(whole, Plan)
    near = best_plan_nearby(whole, facts, ToyModel(facts), Limits(), (pin,))
    assert near is not None
    assert verify(near) == ()
    assert near.placement("actor_train").layout == pin.value


def test_pins_are_kept_and_what_fits_nowhere_is_not_found(plan: Plan) -> None:
    pin = parse_pin("actor_train.recompute=full", PPO_GRAPH)
    near = best_plan_nearby(plan, FACTS, ToyModel(FACTS), Limits(), (pin,))
    assert near is not None
    assert near.placement("actor_train").schedule.recompute == "full"
    assert near.pins == (str(pin),)
    thimble = small_facts(batch_size=8, memory_bytes=2**16)
    assert best_plan_nearby(plan, thimble, ToyModel(thimble), Limits()) is None
