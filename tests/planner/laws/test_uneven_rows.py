"""Replicas that do not divide the batch are planned, proven, verified and simulated as others are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import stage_transfers
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import search_cases, steps_ahead_patterns
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontiers import frontiers
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.planner.solver.solve import solve
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.stages import GENERATE
from tests.planner.drawn import model_of
from tests.planner.jobs import RandomModel, small_facts
from tests.planner.problems import everywhere
from tests.seeds import cases


def facts(batch_size: int = 16) -> Facts:
    """Three ranks: three replicas of 16 rows have 6, 5 and 5."""
    return small_facts(ranks_per_node=3, batch_size=batch_size, num_minibatches=2)


@cache
def planned() -> Plan:
    plan = compile_plan(facts(), model_of(facts()), pins=[f"{stage.name}.layout=dp3" for stage in PPO_GRAPH.stages])
    assert isinstance(plan, Plan), plan
    return plan


def test_a_plan_of_three_replicas_verifies_and_is_read_back() -> None:
    plan = planned()
    assert {placement.layout.dp for placement in plan.placements} == {3}
    assert verify(plan) == ()
    assert evaluate(plan) == plan
    assert parse(Plan, canonical_json(plan), "plan") == plan


def test_the_verifier_convicts_a_size_that_deals_out_no_uneven_rows() -> None:
    plan = planned()
    placements = [
        p.model_copy(update={"schedule": replace(p.schedule, micro_batch_size=5)}) if p.stage == "ref_logprob" else p
        for p in plan.placements
    ]
    sentences = verify(plan.model_copy(update={"placements": tuple(placements)}))
    assert any("micro_batch_size=5 is not one of 1, 2, 3, 6, which split the 6" in sentence for sentence in sentences)


def test_the_clocks_take_the_planned_time() -> None:
    plan = planned()
    assert simulate(plan, steps=3).steps.mean == pytest.approx(plan.period_seconds, rel=0.02)
    drawn = simulate(plan, Sampled(plan, model_of, seed=0), steps=3)
    assert drawn.steps.mean == pytest.approx(plan.period_seconds, rel=0.05)


def test_three_ranks_are_not_slower_with_a_batch_that_they_do_not_divide_than_with_a_larger_one_that_they_do() -> None:
    uneven, even = (compile_plan(facts(size), model_of(facts(size))) for size in (16, 18))
    assert isinstance(uneven, Plan)
    assert isinstance(even, Plan)
    assert uneven.placement(GENERATE).layout.dp == even.placement(GENERATE).layout.dp == 3
    assert uneven.period_seconds <= even.period_seconds * 1.001


@cases("seed", [1, 2, 3], few=1)
def test_the_search_equals_trying_everything(seed: int) -> None:
    """With all but the actor's log-probabilities and training pinned, on batches of 7."""
    few = small_facts(ranks_per_node=3, batch_size=7)
    model = RandomModel(seed, 2**27)
    pinned = (
        *(f"{s.name}.{key}" for s in PPO_GRAPH.stages if s.role != "actor" for key in ("pool=0:3", "layout=dp3")),
        *(f"{GENERATE}.{key}" for key in ("pool=0:3", "layout=dp3", "generation_slots=3")),
        *(f"{s.name}.micro_batch_size=1" for s in PPO_GRAPH.stages if s.role != "actor"),
    )
    scope = next(scope for ahead in steps_ahead_patterns(PPO_GRAPH, 0) for scope in search_cases(ahead, 0))
    found = frontiers(few, model, parse_pins(pinned, PPO_GRAPH), search_case=scope)
    problem = everywhere(formulate(few, model, found, stage_transfers(few, model)).problem)
    trained = next(f for f in found if f.stage.name == "actor_train")
    assert any(c.layout.dp == 3 for kept in trained.candidates.values() for c in kept)
    assert solve(problem, Limits()).objective == best_makespan(problem)
