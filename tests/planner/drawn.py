"""Plans whose lengths are drawn, those whose sequences outlive a turn, and rounds that take a second each."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.protocol import CostModel
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.simulated_flight import Grid, RoundTimes
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.workload import Workload
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan

LONG_TAIL = LengthSpec(max=256, median=20, p99=200)

ONE_SECOND_A_ROUND = Grid(np.array([1.0, 1024.0]), np.array([1.0, 10_000.0]), np.ones((2, 2)))
TIMES = RoundTimes(
    prefill=Grid(ONE_SECOND_A_ROUND.rows, ONE_SECOND_A_ROUND.tokens, np.zeros((2, 2))), round_=ONE_SECOND_A_ROUND
)


def model_of(facts: Facts) -> CostModel:
    return cost_model(facts.cluster, facts.workload, facts.precision, None, facts.engine)


def plan_of(seed: int, response: LengthSpec, deferral: int = 0, *, batch_size: int = 16) -> Plan:
    facts = small_facts(memory_bytes=2**50)
    workload = Workload(
        batch_size=batch_size, prompt=LengthSpec(max=64, fixed=64), response=response, num_minibatches=2
    )
    facts = facts.model_copy(update={"workload": workload})
    return random_plan(seed, facts, model_of(facts), deferral=deferral)


@functools.cache
def carrying_over(overcommits: bool) -> tuple[Plan, ...]:
    """Plans whose sequences outlive a turn."""
    plans = (plan_of(seed, LONG_TAIL, deferral=2) for seed in range(100))
    found = tuple(itertools.islice((plan for plan in plans if carries_over(plan, overcommits)), 6))
    assert len(found) == 6
    return found


def carries_over(plan: Plan, overcommits: bool) -> bool:
    schedule = plan.placement("actor_generate").schedule
    return schedule.overcommit > 0 if overcommits else schedule.batches_in_flight > 1
