"""A judge that generates is planned as a generation of its own, and what it cannot do is refused in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.planner.analysis.calibration import require_calibratable
from meshwright.planner.analysis.whatif import whatif
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.custom_graph import OwnGraph
from meshwright.planner.job.generated_verdicts import JudgeSpec
from meshwright.planner.job.job import Facts, RoleModels
from meshwright.planner.job.limits import judge_violations
from meshwright.planner.plan.cost_queries import Choice, cost_model_of, query_for_choice
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.layout_and_schedule_rules import layout_rules, schedule_rules, schedule_table
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.program.check_program import check_program
from meshwright.planner.program.program import lower
from meshwright.planner.proof.checker import refusals
from meshwright.planner.proof.prover import prove
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import EAGER
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Mode, Role
from tests.planner.jobs import model_spec, small_facts
from tests.planner.plan.test_graph_losses import ACTOR, ACTOR_PASS, GENERATE, SCORE

JUDGE: dict[str, Any] = {
    "after": "Is this right?",
    "template_tokens": 8,
    "verdict": {"max": 16, "fixed": 16},
    "scores": {"yes": 1.0, "no": 0.0},
}
JUDGED = {**SCORE, "judge": JUDGE}


def judged_facts(judge: dict[str, Any] = JUDGE, *, ranks_per_node: int = 2) -> Facts:
    stages = (GENERATE, {**JUDGED, "judge": judge}, ACTOR_PASS, ACTOR)
    facts = small_facts(ranks_per_node=ranks_per_node, memory_bytes=2**40)
    models = RoleModels(actor=model_spec("actor"), reward=replace(model_spec("reward"), scalar_head=False))
    graph = parse(OwnGraph, json.dumps({"stages": stages}), "graph")
    return facts.model_copy(update={"algorithm": graph, "models": models})


@cache
def planned() -> Plan:
    facts = judged_facts()
    plan = compile_plan(facts, cost_model_of(facts), limits=Limits(max_deterministic_time=20.0, gap=0.05))
    assert isinstance(plan, Plan), plan
    return plan


def test_a_plan_with_a_judge_is_verified_proven_and_played() -> None:
    plan = planned()
    model = cost_model_of(plan.facts)
    assert verify(plan) == ()
    assert evaluate(plan) == plan
    assert parse(Plan, canonical_json(plan), "plan") == plan
    assert check_program(lower(plan), plan.graph) == ()
    proof = prove(plan, model, max_splits=10)
    assert refusals(proof, plan, model) == ()
    assert {term.name for term in plan.placement("reward_pass").cost.terms} >= {"decode layers", "prefill layers"}
    assert simulate(plan, Sampled(plan, cost_model_of, seed=0), steps=2).steps.mean > 0


def test_a_judge_costs_what_a_generation_on_its_sequences_costs() -> None:
    facts = judged_facts()
    stage, model = facts.graph.by_name["reward_pass"], cost_model_of(facts)
    choice = Choice(Layout(), Schedule(micro_batch_size=4))
    query = query_for_choice(facts, stage, choice, deferral=0)
    judge = parse(JudgeSpec, json.dumps(JUDGE), "judge")
    alone = cost_model(facts.cluster, judge.judged(facts.workload), facts.precision, None, EAGER)
    generating = replace(
        query, stage=replace(stage, modes=(Mode.PREFILL, Mode.DECODE)), schedule=Schedule(generation_slots=4)
    )
    assert model.seconds(query) == alone.seconds(generating)
    assert model.memory(query) == alone.memory(generating)
    assert model.tail_seconds(query) == model.seconds(query).total
    assert judge.judged(facts.workload).prompt == LengthSpec(max=64 + 128 + 8, fixed=64 + 128 + 8)
    bound = model.lower_bound_seconds(stage, query.model, 1, 0)
    assert 0 < bound <= model.seconds(query).total
    longer = judged_facts({**JUDGE, "verdict": {"max": 64, "fixed": 64}})
    assert cost_model_of(longer).seconds(query).total > model.seconds(query).total


def test_more_tokens_of_a_verdict_make_a_step_longer() -> None:
    plan = planned()
    answer = whatif(plan, [{"algorithm.stages.1.judge.template_tokens": 100}], cost_model_of).answers[0]
    assert answer.metrics is not None
    assert answer.metrics.step_seconds > plan.period_seconds


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("tp1,pp2", "pp=2 on a stage that generates verdicts, whose micro-batches decode alone; use 1."),
        ("tp2,sp", "sp is on, and a single new token cannot be divided along the sequence; turn sp off."),
        ("cp2", "cp=2 shards sequences, and generation samples one token at a time; use cp=1."),
    ],
)
def test_a_judge_decodes_whole_sequences(layout: str, sentence: str) -> None:
    facts = judged_facts()
    stage = facts.graph.by_name["reward_pass"]
    assert layout_rules(facts, stage, Layout.parse(layout)) == (sentence,)


def test_a_judge_has_so_many_sequences_at_a_time_and_not_so_many_tokens() -> None:
    facts = judged_facts()
    stage = facts.graph.by_name["reward_pass"]
    offered = schedule_table(facts, stage, Layout()).schedules
    assert {schedule.micro_batch_size for schedule in offered} == {1, 2, 4, 8, 16}
    capped = Schedule(micro_batch_size=0, micro_batch_tokens=512)
    [sentence] = schedule_rules(facts, stage, Layout(), capped)
    assert sentence.startswith("micro_batch_tokens=512 on a stage that generates verdicts, on so many sequences at a")


def test_a_run_with_a_judge_corrects_no_table() -> None:
    with pytest.raises(BadInput, match=r"the run has a judge that generates, .*; calibrate with a run of"):
        require_calibratable(planned(), None)


def test_a_judge_has_positions_for_its_verdict() -> None:
    facts, judge = judged_facts(), parse(JudgeSpec, json.dumps(JUDGE), "judge")
    specs = {Role.REWARD: facts.models.spec(Role.REWARD)}
    assert tuple(judge_violations(specs, judge, facts.workload)) == ()
    long = judge.model_copy(update={"template_tokens": 400})
    [sentence] = judge_violations(specs, long, facts.workload)
    assert sentence.startswith("a judged sequence may have 608 tokens (prompt.max + response.max + template_tokens + ")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scores": {}}, "scores"),
        ({"scores": {"yes": float("inf")}}, "scores"),
        ({"after": ""}, "after"),
        ({"template_tokens": 0}, "template_tokens"),
        ({"verdicts": {"max": 4, "fixed": 4}}, "verdicts"),
    ],
)
def test_a_judge_that_cannot_be_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        parse(JudgeSpec, json.dumps({**JUDGE, **changes}), "judge")


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ((GENERATE, SCORE, {**ACTOR_PASS, "judge": JUDGE}, ACTOR), "actor_pass has judge, which only an inference of"),
        (
            (GENERATE, {**JUDGED, "may_stream": True}, ACTOR_PASS, ACTOR),
            "reward_pass has judge and may_stream=true, and",
        ),
        (
            (GENERATE, JUDGED, ACTOR_PASS, ACTOR, {**ACTOR, "name": "again", "role": "reward"}),
            "reward_pass has judge, and a stage trains the reward model; a judge that learns is not supported",
        ),
    ],
)
def test_a_stage_that_cannot_judge_is_refused(stages: tuple[dict[str, Any], ...], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        parse(OwnGraph, json.dumps({"stages": stages}), "graph")


@pytest.mark.parametrize(
    ("verdict", "score"),
    [
        ("yes", 1.0),
        ("no, or rather yes", 1.0),
        ("yes? no", 0.0),
        ("I cannot say", None),
        ("a 1", 0.1),
        ("a 10", 1.0),
        ("", None),
        ("10/10", 1.0),
        ("it is NOT right.", -1.0),
    ],
)
def test_the_text_that_ends_last_in_a_verdict_is_its_score(verdict: str, score: float | None) -> None:
    scores = {"yes": 1.0, "no": 0.0, "1": 0.1, "0": 0.0, "10": 1.0, "right": 1.0, "NOT right": -1.0}
    judge = JudgeSpec(after="?", template_tokens=1, verdict=LengthSpec(max=1, fixed=1), scores=scores)
    assert judge.parse(verdict) == score
