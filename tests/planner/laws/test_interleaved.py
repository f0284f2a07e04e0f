"""Which stages may run a pipeline in chunks, and that search, verifier and clocks agree about those that do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.cost_models.analytic import AnalyticModel
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import stage_transfers
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.layout_and_schedule_rules import layout_rules, schedule_rules
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import search_cases, steps_ahead_patterns
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontiers import frontiers
from meshwright.planner.search.legal_choices import check_pins
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.planner.solver.solve import solve
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from tests.planner.jobs import RandomModel, small_facts
from tests.planner.problems import everywhere

TRAIN = PPO_GRAPH.by_name["actor_train"]


def test_only_training_runs_a_pipeline_in_chunks() -> None:
    facts = small_facts()
    for stage in PPO_GRAPH.stages:
        expected = () if stage.trains else ("vpp=2 is only for a stage that trains; use vpp=1.",)
        assert layout_rules(facts, stage, Layout(pp=2, dp=2, vpp=2)) == expected


def test_layers_and_micro_batches_must_come_out_even() -> None:
    facts = small_facts(batch_size=12)
    assert layout_rules(facts, TRAIN, Layout(pp=2, vpp=3)) == (
        "vpp=3 does not divide the 2 layers that actor has on each of pp=2 stages; use vpp=2.",
    )
    assert layout_rules(facts, TRAIN, Layout(pp=2, dp=4, vpp=2)) == (
        "vpp=2 needs micro-batches in multiples of pp=2, and a replica has 3 sequences of a minibatch; use vpp=1.",
    )
    assert schedule_rules(facts, TRAIN, Layout(pp=2, vpp=2), Schedule(micro_batch_size=4)) == (
        "micro_batch_size=4 makes 3 micro-batches of the 12 sequences of a replica, and vpp=2 needs a multiple of "
        "pp=2; use 3.",
    )
    assert schedule_rules(facts, TRAIN, Layout(pp=2, vpp=2), Schedule(micro_batch_size=3)) == ()


def test_a_pin_to_pieces_that_do_not_divide_is_refused_with_the_nearest_that_do() -> None:
    check_pins(small_facts(), parse_pins(["actor_train.layout=pp2,vpp2"], PPO_GRAPH))
    with pytest.raises(BadInput, match=r"vpp=4 does not divide the 2 layers .*; use vpp=2"):
        check_pins(small_facts(), parse_pins(["actor_train.layout=pp2,vpp4"], PPO_GRAPH))
    with pytest.raises(BadInput, match="vpp=2 is only for a stage that trains; use vpp=1"):
        check_pins(small_facts(), parse_pins(["actor_logprob.layout=pp2,vpp2"], PPO_GRAPH))


PINS = ("actor_train.layout=tp2,pp2,vpp2,sp", "critic_train.layout=pp2,dp2,vpp2", "actor_logprob.layout=tp2,pp2")


@cache
def planned() -> Plan:
    facts = small_facts()
    plan = compile_plan(facts, AnalyticModel(facts.cluster, facts.workload, facts.precision), pins=PINS)
    assert isinstance(plan, Plan), plan
    return plan


def test_a_plan_with_pieces_verifies_and_is_read_back() -> None:
    plan = planned()
    assert verify(plan) == ()
    assert evaluate(plan) == plan
    assert parse(Plan, canonical_json(plan), "plan") == plan
    assert "actor_train.layout=tp2,pp2,dp1,vpp2,sp" in plan.pins
    assert {refit.target for refit in plan.refits} >= {"actor_generate", "actor_logprob"}


def test_the_verifier_convicts_micro_batches_that_pieces_cannot_take() -> None:
    plan = planned()
    placements = [
        p.model_copy(update={"schedule": replace(p.schedule, micro_batch_size=16)}) if p.stage == "actor_train" else p
        for p in plan.placements
    ]
    sentences = verify(plan.model_copy(update={"placements": tuple(placements)}))
    assert any("and vpp=2 needs a multiple of pp=2; use 8" in sentence for sentence in sentences)


def test_the_simulated_clock_takes_the_planned_time() -> None:
    plan = planned()
    assert simulate(plan, steps=3).steps.mean == pytest.approx(plan.period_seconds, rel=0.02)


def pinned_but(facts: Facts, *free: str) -> tuple[str, ...]:
    """Pins of all stages but these to one choice or few."""
    return (
        *(f"{s.name}.{key}" for s in PPO_GRAPH.stages if s.name not in free for key in ("pool=0:2", "layout=dp2")),
        *(f"{s.name}.generation_slots={facts.workload.batch_size // 2}" for s in PPO_GRAPH.stages if s.generates),
        *(f"{s.name}.micro_batch_size=1" for s in PPO_GRAPH.stages if not s.generates),
        "actor_train.pool=0:2",
    )


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_the_search_equals_trying_everything(seed: int) -> None:
    """With all but the actor's log-probabilities and training pinned, where pieces are worth their while."""
    facts = small_facts(ranks_per_node=2, batch_size=4)
    model = RandomModel(seed, 2**27)
    pins = parse_pins(pinned_but(facts, "actor_logprob", "actor_train"), PPO_GRAPH)
    scope = next(scope for ahead in steps_ahead_patterns(PPO_GRAPH, 0) for scope in search_cases(ahead, 0))
    found = frontiers(facts, model, pins, search_case=scope)
    problem = everywhere(formulate(facts, model, found, stage_transfers(facts, model)).problem)
    assert any(c.layout.vpp == 2 for f in found for kept in f.candidates.values() for c in kept)
    assert solve(problem, Limits()).objective == best_makespan(problem)
