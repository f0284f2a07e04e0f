"""From facts to a plan that verifies, or to a reason."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.image_costs import IMAGE_ENCODER
from meshwright.cost_models.protocol import StageQuery
from meshwright.planner.compile import best_plan, compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Experts
from tests.planner.jobs import RandomModel, ToyModel, image_facts, small_facts
from tests.seeds import seeds


def planned(seed: int = 0, **kw: int) -> Plan:
    facts = small_facts(ranks_per_node=2, batch_size=4, memory_bytes=2**30, **kw)
    plan = compile_plan(facts, RandomModel(seed, 2**27), limits=Limits(gap=0.0))
    assert isinstance(plan, Plan)
    return plan


def test_a_plan_says_at_which_gap_its_search_was_to_end() -> None:
    facts = small_facts(ranks_per_node=2, batch_size=4, memory_bytes=2**30)
    plan = compile_plan(facts, RandomModel(0, 2**27))
    assert isinstance(plan, Plan)
    assert plan.solver.gap <= plan.solver.requested_gap == 0.01
    assert planned().solver.requested_gap == 0.0


@seeds(2, all=6)
def test_a_compiled_plan_verifies_and_the_evaluator_reproduces_it(seed: int) -> None:
    plan = planned(seed)
    assert verify(plan) == ()
    assert evaluate(plan) == plan
    assert plan.solver.status == "optimal"
    assert plan.solver.gap < 1e-4


def test_a_plan_of_a_model_that_reads_images_verifies_is_read_back_and_simulated() -> None:
    facts = image_facts()
    plan = compile_plan(facts, AnalyticModel(facts.cluster, facts.workload, facts.precision))
    assert isinstance(plan, Plan)
    assert verify(plan) == ()
    assert evaluate(plan) == plan
    assert parse(Plan, canonical_json(plan), "plan") == plan
    encoding = {placement.stage for placement in plan.placements if placement.cost.amount(IMAGE_ENCODER)}
    assert encoding == {placement.stage for placement in plan.placements} - {"reward_score"}
    simulated = simulate(plan, steps=2)
    assert simulated.steps.mean == pytest.approx(plan.period_seconds)


def test_images_of_an_actor_that_reads_text_are_refused_in_one_sentence() -> None:
    facts = image_facts()
    text = facts.models.model_copy(update={"actor": small_facts().models.actor})
    with pytest.raises(BadInput, match="model actor of the actor reads no images; give one that does, or remove"):
        parse(Facts, canonical_json(facts.model_copy(update={"models": text})), "facts")


def test_a_plan_with_spread_experts_verifies_and_is_read_back() -> None:
    facts = small_facts(batch_size=4)
    experts = Experts(num_experts=4, experts_per_token=2, ffn_size=64)
    models = {role: replace(facts.models.actor, name=role, experts=experts) for role in ("actor", "ref")}
    facts = facts.model_copy(update={"models": facts.models.model_copy(update=models)})
    pins = ("actor_train.layout=dp4,ep2", "actor_generate.layout=dp4,ep4", "ref_logprob.layout=tp2,dp2,ep2,sp")
    plan = compile_plan(facts, AnalyticModel(facts.cluster, facts.workload, facts.precision), pins=pins)
    assert isinstance(plan, Plan)
    assert verify(plan) == ()
    assert evaluate(plan) == plan
    assert parse(Plan, canonical_json(plan), "plan") == plan
    assert {refit.target for refit in plan.refits} >= {"actor_generate"}
    assert str(plan.placement("ref_logprob").layout) == "tp2,pp1,dp2,ep2,sp"


def test_the_same_facts_give_the_same_bytes() -> None:
    assert canonical_json(planned(1)) == canonical_json(planned(1))


def test_reading_a_written_plan_gives_an_equal_plan() -> None:
    plan = planned(2)
    assert parse(Plan, canonical_json(plan), "plan") == plan


def test_a_pinned_choice_is_kept() -> None:
    facts = small_facts(ranks_per_node=2, batch_size=4)
    pins = ("actor_train.layout=tp2,sp", "actor_generate.pool=1:1", "actor_train.recompute=full")
    plan = compile_plan(facts, ToyModel(facts), pins=pins)
    assert isinstance(plan, Plan)
    assert str(plan.placement("actor_train").layout) == "tp2,pp1,dp1,sp"
    assert list(plan.pool_of("actor_generate").ranks) == [1]
    assert plan.pins == tuple(sorted(pin.replace("tp2,sp", "tp2,pp1,dp1,sp") for pin in pins))


@seeds(2, all=4)
def test_stages_work_ahead_only_where_that_makes_the_turn_shorter(seed: int) -> None:
    facts, model = small_facts(ranks_per_node=2, batch_size=4), RandomModel(seed, 2**27)
    synchronous = compile_plan(facts, model)
    plan = compile_plan(facts.model_copy(update={"staleness": 1}), model, limits=Limits(gap=0.03))
    assert isinstance(plan, Plan)
    assert isinstance(synchronous, Plan)
    assert plan.solver.gap <= 0.03
    assert plan.staleness == 0 or plan.period_seconds < synchronous.period_seconds


def test_no_stage_works_ahead_where_all_share_one_rank() -> None:
    """To work ahead then saves nothing, though a bound that spreads the work over both ranks is about half as long."""
    facts = small_facts(ranks_per_node=2, batch_size=4).model_copy(update={"staleness": 1})
    whole = ("actor_generate.batches_in_flight=1", "actor_generate.overcommit=0")
    pins = (*whole, *(f"{stage.name}.pool=0:1" for stage in PPO_GRAPH.stages))
    plan = compile_plan(facts, ToyModel(facts), pins=pins, limits=Limits(gap=0.03))
    assert isinstance(plan, Plan)
    assert plan.staleness == 0
    assert plan.solver.gap <= 0.03


def test_a_plan_names_what_else_it_was_made_of() -> None:
    facts = small_facts(ranks_per_node=1, batch_size=4)
    plan = compile_plan(facts, ToyModel(facts), digests={"profile": "0" * 64})
    assert isinstance(plan, Plan)
    assert plan.digests == {**facts.digests(), "profile": "0" * 64}


def test_a_search_without_time_does_not_say_that_nothing_fits() -> None:
    facts, crowded = small_facts(ranks_per_node=1, batch_size=4), small_facts(ranks_per_node=1, memory_bytes=1)
    over = Limits(deadline=time.monotonic() - 1)
    assert best_plan(facts, ToyModel(facts), limits=over) == "out_of_limit"
    assert best_plan(crowded, ToyModel(crowded)) == "infeasible"


def test_minibatches_that_do_not_divide_the_batch_are_refused_before_anything_is_costed() -> None:
    """The search ended without a plan and without a reason."""
    facts = small_facts(batch_size=8)
    facts = facts.model_copy(update={"workload": facts.workload.model_copy(update={"num_minibatches": 3})})

    class Unasked(ToyModel):
        def seconds(self, query: StageQuery) -> Cost:
            raise AssertionError(query)

    found = compile_plan(facts, Unasked(facts))
    assert isinstance(found, NoPlan)
    assert {limit.sentence for limit in found.limits} == {
        f"{name} has no legal choice: num_minibatches=3 does not divide batch_size=8; use 2."
        for name in ("actor_train", "critic_train")
    }
