"""A graph that a job states itself goes through all that a preset's does; said as a preset it is that preset."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.search.random_graphs import MOST_STAGES, random_job
from meshwright.planner.analysis.explain import explain
from meshwright.planner.analysis.sensitivity import sensitivities
from meshwright.planner.analysis.whatif import whatif
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.custom_graph import OwnGraph
from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.planner.job.rewards_and_tools import RewardLoad
from meshwright.planner.job.whatif_settings import with_setting
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.planner.plan.verify import verify
from meshwright.planner.program.check_program import check_program
from meshwright.planner.program.program import lower
from meshwright.planner.proof.checker import refusals
from meshwright.planner.proof.prover import prove
from meshwright.planner.report.contents import Contents
from meshwright.planner.report.report import report
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.search.re_evaluate import re_evaluated_or_violation
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.registry import TRAINERS
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import StageGraph
from tests.planner.drawn import model_of
from tests.planner.jobs import adapted_facts, critic_free_facts, distill_facts, small_facts, stated
from tests.planner.plans import random_plan
from tests.seeds import seeds

EXAMPLE = Path(__file__).parents[3] / "examples" / "own-graph-16xh100" / "job.yaml"
SMALL = small_facts(ranks_per_node=2, batch_size=4, memory_bytes=2**40)
MATHS = RewardLoad(name="maths", is_remote=False, batch_size=1, latency_seconds=LatencySpec(fixed=0.01))
PRESETS = {
    "ppo": SMALL,
    "ppo ahead": SMALL.model_copy(update={"staleness": 2}),
    "grpo": critic_free_facts("grpo", facts=SMALL),
    "rloo without a reference": critic_free_facts("rloo", has_ref=False, facts=SMALL),
    "distill": distill_facts(2, SMALL),
    "ppo with an adapter": adapted_facts(SMALL),
    "grpo with rewards on hosts": critic_free_facts("grpo", facts=SMALL).model_copy(update={"rewards": (MATHS,)}),
}
LIMITS = Limits(max_deterministic_time=20.0, gap=0.05)


def own(facts: Facts) -> Facts:
    """The same with its graph in the job's own words."""
    return facts.model_copy(update={"algorithm": stated(facts.graph)})


def planned(facts: Facts, limits: Limits = LIMITS) -> Plan:
    plan = compile_plan(facts, model_of(facts), limits=limits)
    assert isinstance(plan, Plan), plan
    return plan


@cache
def example() -> Plan:
    return planned(resolve(read_job(EXAMPLE), EXAMPLE.parent), Limits(gap=0.05))


@pytest.mark.parametrize("name", PRESETS)
def test_a_graph_that_says_what_a_preset_says_has_its_plan(name: str) -> None:
    facts = PRESETS[name]
    assert own(facts).graph == facts.graph
    as_preset, as_own = (json.loads(canonical_json(planned(one))) for one in (facts, own(facts)))
    said = as_own["facts"].pop("algorithm")
    hosted = {host.name for host in facts.graph.host_stages}
    assert [stage["name"] for stage in said["stages"] if stage["name"] not in hosted] == list(facts.graph.names)
    as_preset["facts"].pop("algorithm", None)
    assert as_own == as_preset


def test_a_plan_of_an_own_graph_is_read_back_as_it_was_written() -> None:
    plan = planned(own(PRESETS["grpo"]))
    text = canonical_json(plan)
    assert parse(Plan, text, "plan") == plan
    assert canonical_json(parse(Plan, text, "plan")) == text


def test_the_example_is_planned_played_and_explained() -> None:
    plan = example()
    assert isinstance(plan.facts.algorithm, OwnGraph)
    assert set(plan.graph.train_stage.values()) == {"actor_train", "critic_train"}
    assert [host.name for host in plan.graph.host_stages] == ["environment_score"]
    assert {worker.reward for worker in plan.workers} == {"maths"}
    assert verify(plan) == ()
    assert evaluate(plan) == plan
    assert check_program(lower(plan), plan.graph) == ()
    assert simulate(plan, steps=3).steps.mean > 0
    page = report(Contents(plan=plan, simulation=simulate(plan, Sampled(plan, model_of, seed=0), steps=3, traced=True)))
    assert "A plan of the job's own graph for" in html.unescape(page)
    assert {wait.task for wait in explain(plan).critical_path} >= {"actor_generate"}
    answers = whatif(plan, [{"models.teacher.num_layers": 128}], model_of).answers
    assert answers[0].metrics is not None
    assert answers[0].metrics.step_seconds > plan.period_seconds


@seeds(3, all=MOST_STAGES - 2)
def test_a_proof_of_a_graph_of_any_roles_holds(seed: int) -> None:
    job = random_job(seed)
    facts, model = job.facts.model_copy(update={"staleness": 0}), model_of(job.facts)
    plan = compile_plan(facts, model, limits=LIMITS)
    assert isinstance(plan, Plan | NoPlan)
    if isinstance(plan, Plan):
        proof = prove(plan, model, max_splits=10)
        assert refusals(proof, plan, model) == ()
        assert 0 < proof.bound_seconds <= plan.period_seconds
        assert len(sensitivities(plan, model_of)) > 2


@seeds(6, all=42)
def test_every_drawn_plan_of_a_random_graph_verifies_clean_however_far_stages_work_ahead(seed: int) -> None:
    facts = with_setting(random_job(seed).facts, {"cluster.device.memory_bytes": 2**40})
    for ahead in steps_ahead_patterns(facts.graph, 2):
        drawn = random_plan(seed, facts, model_of(facts), ahead)
        assert verify(drawn) == ()
        assert check_program(lower(drawn), drawn.graph) == ()


def test_a_stage_that_reads_of_a_trained_one_does_not_work_ahead_of_it() -> None:
    """With generation two steps ahead every untrained stage was one ahead, also of what it reads."""
    graph = PRESETS["ppo"].graph
    judged = replace(graph.by_name["ref_logprob"], reads=("tokens", "values"), may_stream=False)
    generate, score, _, value, *others = graph.stages
    ahead = steps_ahead_patterns(StageGraph((generate, score, value, judged, *others)), 2)[-1]
    assert {name for name, steps in ahead.items() if steps} == {"actor_generate", "reward_score"}


def test_a_graph_of_the_jobs_own_is_not_written_for_other_trainers() -> None:
    for trainer in TRAINERS.values():
        with pytest.raises(
            BadInput, match=rf"the job's own graph \(algorithm.stages\) is not written for {trainer.name}"
        ):
            trainer.require_expressible(own(PRESETS["ppo"]))


def test_a_training_is_not_put_before_what_only_it_reads() -> None:
    """The order of trainings was changed for weights that go elsewhere, as if all of them read the same."""
    job = random_job(12)
    plan = compile_plan(job.facts, model_of(job.facts), pins=job.pins)
    assert isinstance(plan, Plan)
    for edge in plan.edges:
        assert plan.placement(edge.producer).end_seconds <= plan.placement(edge.consumer).start_seconds


def test_a_plan_of_a_preset_is_no_start_for_another_graph() -> None:
    facts = own(critic_free_facts())
    began = re_evaluated_or_violation(random_plan(1), facts, model_of(facts), ())
    assert began == "it is a plan for ppo, and its stages differ from those of the job's own graph."


def test_a_stage_that_the_graph_does_not_have_is_refused() -> None:
    drawn, ppo = random_plan(1, own(critic_free_facts())), random_plan(1)
    odd = drawn.model_copy(update={"placements": (*drawn.placements, ppo.placement("critic_train"))})
    assert "critic_train is placed but is not a stage of the job's own graph; remove it." in verify(odd)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("algorithm", "grpo", "models.critic: algorithm=grpo has no stage of that role; remove it"),
        ("algorithm.stages.1.role", "critic", "models.reward: the job's own graph has no stage of that role"),
        ("algorithm.stages.1.reads", ["values"], "reward_score does not read tokens"),
        ("algorithm.stages.1.mode", "forward", "the plan's facts have no such field"),
    ],
)
def test_what_if_the_graph_were_none_is_refused(path: str, value: Any, sentence: str) -> None:
    plan = random_plan(1, own(small_facts(memory_bytes=2**40)))
    with pytest.raises(BadInput, match=sentence):
        whatif(plan, [{path: value}], model_of)


def test_what_if_the_graph_were_another_is_known_of_a_new_plan_alone() -> None:
    plan = planned(own(PRESETS["ppo"]))
    reads = ["tokens", "scores"]
    for setting in ({"algorithm.stages.1.name": "score"}, {"algorithm.stages.2.reads": reads}):
        changed = (
            setting if "algorithm.stages.1.name" in setting else {**setting, "algorithm.stages.2.may_stream": False}
        )
        (same,) = whatif(plan, [changed], model_of).answers
        assert (same.fits, same.metrics) == (False, None)
        assert same.violations[0].startswith("the plan's stages or their edges differ from those of the job's graph")
        (again,) = whatif(plan, [changed], model_of, replan=True, limits=LIMITS).answers
        assert again.fits
