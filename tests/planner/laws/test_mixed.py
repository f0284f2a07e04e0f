"""Nodes of several kinds: a stage runs on one kind or on two, memory is that of each device, and the search is still
exact."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.protocol import CostModel, RefitQuery
from meshwright.planner.analysis.explain import explain
from meshwright.planner.analysis.sensitivity import sensitivities
from meshwright.planner.analysis.whatif import whatif
from meshwright.planner.compile import best_plan, compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.job.sections import MixedSpec
from meshwright.planner.job.whatif_settings import parse_settings
from meshwright.planner.plan.cost_queries import stage_transfers
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.proof.checker import refusals
from meshwright.planner.proof.prover import prove
from meshwright.planner.report.report import report
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontiers import frontiers
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.search.re_evaluate import re_evaluate
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.planner.solver.solve import solve
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import MixedCluster, require_uniform
from meshwright.profiles.layout import Layout
from tests.planner.jobs import mixed_facts
from tests.planner.report.pages import contents_of
from tests.seeds import cases, seeds

MIB = 2**20
LIMITS = Limits(gap=0.01, max_deterministic_time=5.0)
FIXED = (
    *(f"{stage.name}.layout=tp1" for stage in PPO_GRAPH.stages),
    *(f"{stage.name}.micro_batch_size=1" for stage in PPO_GRAPH.stages if not stage.generates),
    *("reward_score.pool=0:1", "ref_logprob.pool=2:1", "critic_value.pool=1:1", "actor_logprob.pool=3:1"),
)
"""One rank for each stage, some of them decided, keep a problem small enough to try everything."""


def model_of(facts: Facts) -> CostModel:
    return cost_model(facts.cluster, facts.workload, facts.precision)


def planned(facts: Facts, *pins: str) -> Plan:
    plan = compile_plan(facts, model_of(facts), pins=pins, limits=LIMITS)
    assert isinstance(plan, Plan)
    return plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(mixed_facts(batch_size=4))


def test_stages_run_on_nodes_of_the_kind_that_suits_them_and_the_plan_verifies(plan: Plan) -> None:
    assert verify(plan) == ()
    assert evaluate(plan) == plan
    assert parse(Plan, canonical_json(plan), "plan") == plan
    assert all(placement.schedule.rows == () for placement in plan.placements)
    assert {plan.part_of(stage.name) for stage in PPO_GRAPH.stages} == {0, 1}


def test_a_pool_of_two_kinds_has_all_of_both(plan: Plan) -> None:
    wide = plan.pools[0].model_copy(update={"first_rank": 1, "num_ranks": 2})
    (sentence, *_) = verify(plan.model_copy(update={"pools": (wide, *plan.pools[1:])}))
    assert "2 ranks cannot start at rank 1; start at rank 0" in sentence


ON_BOTH = ("actor_train.pool=0:4", "ref_logprob.pool=0:4", "actor_generate.pool=2:2")
"""Pins that put stages on all ranks of both kinds."""


@pytest.fixture(scope="module")
def dealt() -> Plan:
    return planned(mixed_facts(batch_size=64, speed=0.1), *ON_BOTH)


def test_a_stage_on_two_kinds_deals_its_rows_by_speed(dealt: Plan) -> None:
    assert verify(dealt) == ()
    assert evaluate(dealt) == dealt
    assert parse(Plan, canonical_json(dealt), "plan") == dealt
    for stage in ("actor_train", "ref_logprob"):
        rows = dealt.placement(stage).schedule.rows
        assert sum(rows) == 64
        assert rows[0] > 2 * rows[1]  # the second kind has a tenth of the speed
        assert dealt.replicas_of(stage) == (2 // dealt.placement(stage).layout.tp,) * 2
    assert dealt.placement("actor_generate").schedule.rows == ()
    assert re_evaluate(dealt, dealt.facts, model_of(dealt.facts)).period_seconds == dealt.period_seconds


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ((32, 31), "does not split 64 sequences over two kinds of nodes"),
        ((64,), "does not split 64 sequences over two kinds of nodes"),
        ((), "rows=[] does not split 64 sequences"),
    ],
)
def test_other_rows_are_told_of(dealt: Plan, rows: tuple[int, ...], says: str) -> None:
    (sentence, *_) = verify(_with_rows(dealt, "actor_train", rows))
    assert says in sentence
    (sentence, *_) = verify(_with_rows(dealt, "actor_generate", (32, 32)))
    assert sentence.startswith("actor_generate: rows=[32, 32] on nodes of one kind")


def _with_rows(plan: Plan, stage: str, rows: tuple[int, ...]) -> Plan:
    def changed(placement: Placement) -> Placement:
        schedule = replace(placement.schedule, rows=rows)
        return placement.model_copy(update={"schedule": schedule}) if placement.stage == stage else placement

    return plan.model_copy(update={"placements": tuple(map(changed, plan.placements))})


def test_a_stage_on_two_kinds_is_simulated_explained_and_reported(dealt: Plan) -> None:
    planned_seconds = simulate(dealt, steps=3).steps.mean
    assert planned_seconds == pytest.approx(dealt.period_seconds)
    assert simulate(dealt, Sampled(dealt, model_of, seed=0), steps=3).steps.mean == pytest.approx(
        dealt.period_seconds, rel=0.2
    )
    rows = dealt.placement("actor_train").schedule.rows
    assert f"{rows[0]} and {rows[1]} rows split by speed" in report(contents_of(dealt))
    assert {use.name for use in explain(dealt).pools} == {pool.name for pool in dealt.pools}


@pytest.mark.check_all
def test_a_bound_on_plans_that_may_span_two_kinds_is_proven_again() -> None:
    found = planned(mixed_facts(batch_size=64, speed=1.5))
    proof = prove(found, model_of(found.facts))
    assert refusals(proof, found, model_of(found.facts)) == ()


@pytest.mark.slow
@seeds(1, all=8)
def test_the_search_equals_trying_everything_where_stages_may_span_two_kinds(seed: int) -> None:
    draw = random.Random(seed)
    memory_bytes = draw.choice([24, 40, 64]) * MIB, draw.choice([10, 16, 40]) * MIB
    facts = mixed_facts(
        batch_size=draw.choice([4, 6, 8]), memory_bytes=memory_bytes, speed=draw.choice([0.25, 0.5, 2.0, 3.0])
    )
    names = [stage.name for stage in PPO_GRAPH.stages]
    fixed = (
        *(f"{name}.{degree}=1" for name in names for degree in ("tp", "pp")),
        *(f"{name}.micro_batch_size=1" for name in names if name != "actor_generate"),
        *(f"{name}.recompute=none" for name in PPO_GRAPH.train_stage.values()),
        *("reward_score.pool=0:1", "critic_value.pool=0:4", "actor_logprob.pool=3:1"),
    )
    model, pins = model_of(facts), parse_pins(fixed, PPO_GRAPH)
    problem = formulate(facts, model, frontiers(facts, model, pins), stage_transfers(facts, model)).problem
    spanning = [option for call in problem.tasks for option in call.modes if option.resource.num_ranks == 4]
    assert len(spanning) > 1
    assert solve(problem, Limits()).objective == best_makespan(problem)


@cases("batch_size", [4, 2], few=1)
def test_the_search_equals_trying_everything(batch_size: int) -> None:
    facts = mixed_facts(batch_size=batch_size, memory_bytes=(40 * MIB, 24 * MIB))
    model, pins = model_of(facts), parse_pins(FIXED, PPO_GRAPH)
    problem = formulate(facts, model, frontiers(facts, model, pins), stage_transfers(facts, model)).problem
    assert not problem.anywhere
    assert solve(problem, Limits()).objective == best_makespan(problem)


def test_memory_is_that_of_each_device(plan: Plan) -> None:
    """The faster devices hold what they can and no more; a plan that asks for more is told of by the verifier."""
    wanted = planned(mixed_facts(batch_size=4, speed=8.0))
    found = planned(mixed_facts(batch_size=4, memory_bytes=(2**30, 12 * MIB), speed=8.0))
    assert max(found.peak_bytes_per_rank[2:]) <= 12 * MIB < max(wanted.peak_bytes_per_rank[2:])
    assert wanted.period_seconds < found.period_seconds
    smaller = plan.facts.cluster.model_dump()
    smaller["parts"][1]["device"]["memory_bytes"] = max(plan.peak_bytes_per_rank[2:]) - 1
    cluster = MixedCluster.model_validate(smaller)
    changed = plan.model_copy(update={"facts": plan.facts.model_copy(update={"cluster": cluster})})
    changed = changed.model_copy(update={"digests": changed.facts.digests()})
    assert any("and its device can use" in sentence for sentence in verify(changed))


def test_a_second_kind_of_nodes_never_makes_a_plan_slower() -> None:
    facts = mixed_facts(batch_size=4, speed=0.5)
    alone = facts.model_copy(update={"cluster": facts.cluster.parts[0]})
    one, both = planned(alone), planned(facts)
    assert both.period_seconds <= one.period_seconds * (1 + LIMITS.gap)


def test_weights_go_between_kinds_over_the_fabric_that_joins_them() -> None:
    facts = mixed_facts(batch_size=4)
    model, spec = model_of(facts), facts.models.actor
    inside = model.refit_seconds(RefitQuery(model=spec, source=Layout(), target=Layout(), overlap=0))
    across = model.refit_seconds(RefitQuery(model=spec, source=Layout(), target=Layout(), overlap=0, target_part=1))
    assert across.total > 5 * inside.total  # the fabric has a tenth of the bandwidth of either kind's own links


def test_a_job_that_fits_nowhere_names_the_nearest_kind() -> None:
    facts = mixed_facts(batch_size=4, memory_bytes=(2 * MIB, 3 * MIB))
    found = compile_plan(facts, model_of(facts), limits=LIMITS)
    assert isinstance(found, NoPlan)
    assert found.limits
    assert {limit.device_bytes for limit in found.limits} == {3 * MIB}


def test_it_is_explained_reported_and_asked_about_like_any_other(plan: Plan) -> None:
    assert {use.name for use in explain(plan).pools} == {pool.name for pool in plan.pools}
    names = {one.name for one in sensitivities(plan, model_of)}
    assert {"toy: compute peak", "fast toy: compute peak", "bandwidth between parts", "response length"} <= names
    page = report(contents_of(plan))
    assert "2 × toy + 2 × fast toy" in page
    (answer,) = whatif(plan, parse_settings(["cluster.parts.1.device.launch_seconds=0"]), model_of).answers
    assert answer.difference is not None
    assert answer.difference.step_seconds < 0


def mixed_of(*parts: dict[str, object]) -> MixedCluster:
    return parse(MixedSpec, json.dumps({"parts": parts}), "job").resolve()


def test_parts_differ_in_no_more_than_devices_nodes_and_links() -> None:
    with pytest.raises(BadInput, match=r"the parts differ in ranks_per_node \(4, 8\); make it the same"):
        mixed_of({"device": "h800"}, {"device": "h20", "ranks_per_node": 4})
    with pytest.raises(BadInput, match=r"unknown key 'parts.1.nods'; did you mean 'nodes'"):
        mixed_of({"device": "h800"}, {"device": "h20", "nods": 2})
    with pytest.raises(BadInput, match="a part is local, which is this machine alone; name the device"):
        mixed_of({"device": "h800"}, {})
    mixed = mixed_of({"device": "h800"}, {"device": "h20"})
    with pytest.raises(BadInput, match=r"profile takes a cluster of one kind, and this one is 8 x h800 \+ 8 x h20"):
        require_uniform(mixed, "profile")


def test_the_two_kinds_can_be_told_apart_by_pins() -> None:
    facts = mixed_facts(batch_size=4)
    found = best_plan(facts, model_of(facts), pins=parse_pins(["actor_generate.pool=2:2"], PPO_GRAPH), limits=LIMITS)
    assert isinstance(found, Plan)
    assert found.part_of("actor_generate") == 1
