"""A job says where the old log-probabilities come from; without a pass for them a plan has one stage less."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.planner.analysis.explain import explain
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts, Job, resolve
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import BEHAVIOUR_LOGPROBS, OldLogprobs
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.errors import BadInput
from tests.planner.drawn import model_of
from tests.planner.jobs import critic_free_facts, distill_facts, small_facts
from tests.planner.proofs import require_proof
from tests.seeds import cases

WITHOUT = "actor_logprob"
LENGTHS = {"max": 8, "fixed": 8}
MODELS = {
    "ppo": ("actor", "critic", "ref", "reward"),
    "grpo": ("actor", "ref", "reward"),
    "rloo": ("actor", "ref", "reward"),
    "reinforce++": ("actor", "ref", "reward"),
    "distill": ("actor", "teacher"),
}


def job_of(choice: str, algorithm: str = "grpo", **changes: Any) -> Job:
    """A job with this source; `changes` are of its workload, except settings, under the key of the algorithm."""
    settings = {"reinforce++": "reinforce"}.get(algorithm, algorithm)
    workload = {"batch_size": 8, "group_size": 2, "prompt": LENGTHS, "response": LENGTHS}
    document = {
        "algorithm": algorithm,
        "models": {role: {"path": f"{role}.json"} for role in MODELS[algorithm]},
        "workload": {**workload, **{key: value for key, value in changes.items() if key != "settings"}},
        "old_logprobs": choice,
        settings: changes.get("settings", {}),
    }
    return parse(Job, json.dumps(document), "job")


ONE = {"kl_coefficient": 0.0}


@pytest.mark.parametrize(
    ("job", "resolved"),
    [
        (job_of("auto"), "training"),  # GRPO has its penalty in the loss
        (job_of("auto", "rloo"), "recompute"),  # and RLOO in the reward
        (job_of("auto", "rloo", settings=ONE), "training"),
        (job_of("auto", "ppo"), "recompute"),
        (job_of("auto", "ppo", settings=ONE), "training"),
        (job_of("auto", num_minibatches=2), "recompute"),
        (job_of("auto", num_epochs=2), "recompute"),
        (job_of("auto", "distill"), "recompute"),
        (job_of("recompute"), "recompute"),
        (job_of("generator", "ppo", num_minibatches=4), "generator"),
    ],
)
def test_auto_takes_the_fastest_source_that_is_equal_in_mathematics(job: Job, resolved: OldLogprobs) -> None:
    assert job.resolved_old_logprobs == resolved


@pytest.mark.parametrize(
    ("choice", "algorithm", "changes", "sentence"),
    [
        (
            "training",
            "grpo",
            {"num_minibatches": 4},
            "num_minibatches=4 and num_epochs=1 make 4 updates of a step, and only the first one starts from the "
            "policy whose log-probabilities are needed; use one update, or recompute or generator",
        ),
        ("training", "grpo", {"num_epochs": 2}, "num_minibatches=1 and num_epochs=2 make 2 updates of a step"),
        (
            "training",
            "rloo",
            {},
            r"rloo.kl_coefficient=0\.05 is a penalty inside the reward, which needs log-probabilities before the "
            "update; use 0, or recompute or generator",
        ),
        ("training", "reinforce++", {}, r"reinforce.kl_coefficient=0\.01 is a penalty inside the reward"),
        ("training", "distill", {}, "algorithm=distill compares its teachers with the student's log-probabilities"),
        ("behaviour", "grpo", {}, "old_logprobs"),
    ],
)
def test_a_source_that_changes_the_algorithm_is_refused(
    choice: str, algorithm: str, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        job_of(choice, algorithm, **changes)


def test_an_own_graph_states_the_pass_itself() -> None:
    path = Path(__file__).parents[3] / "examples/own-graph-16xh100/job.yaml"
    job = yaml.safe_load(path.read_text())
    assert parse(Job, json.dumps(job | {"old_logprobs": "auto"}), "job").resolved_old_logprobs == "recompute"
    with pytest.raises(BadInput, match="old_logprobs=generator: algorithm is the job's own graph"):
        parse(Job, json.dumps(job | {"old_logprobs": "generator"}), "job")


def with_source(facts: Facts, source: OldLogprobs) -> Facts:
    return facts.model_copy(update={"old_logprobs": source})


JOBS = {
    "ppo": small_facts(num_minibatches=2),
    "grpo": critic_free_facts(),
    "grpo ahead": critic_free_facts().model_copy(update={"staleness": 1}),
    "rloo without a reference": critic_free_facts("rloo", has_ref=False),
    "distill": distill_facts(),
}


def best(facts: Facts, *pins: str) -> Plan:
    found = compile_plan(facts, model_of(facts), pins=pins, limits=Limits(gap=0.0))
    assert isinstance(found, Plan)
    return found


@cases("name", JOBS, few=2)
def test_a_plan_without_the_pass_is_legal_no_slower_and_simulated(name: str) -> None:
    source: OldLogprobs = "training" if name.startswith("grpo") else "generator"
    with_pass, without = best(JOBS[name]), best(with_source(JOBS[name], source))
    assert set(with_pass.graph.names) - set(without.graph.names) == {WITHOUT}
    assert BEHAVIOUR_LOGPROBS in without.graph.by_name["actor_train"].reads
    assert verify(without) == ()
    assert without.period_seconds <= with_pass.period_seconds
    ran = {span.instruction for span in simulate(without, steps=2, traced=True).spans}
    assert any("actor_train" in instruction for instruction in ran)
    assert not any(WITHOUT in instruction for instruction in ran)
    [sentence] = [line for line in explain(without).sentences if "no pass for old log-probabilities" in line]
    assert ("truncated" in sentence) == (source == "generator")
    assert explain(with_pass).old_logprobs is None


def test_the_step_is_shorter_by_the_pass_where_stages_take_turns() -> None:
    """On one rank nothing overlaps, so the difference is the time of the pass exactly."""
    facts = critic_free_facts(facts=small_facts(ranks_per_node=1))
    with_pass, without = best(facts), best(with_source(facts, "training"))
    saved = with_pass.placement(WITHOUT).cost.total
    assert with_pass.period_seconds - without.period_seconds == pytest.approx(saved, rel=0.05)


@pytest.mark.parametrize("source", ["training", "generator"])
def test_a_bound_of_a_job_without_the_pass_is_proven(source: OldLogprobs) -> None:
    require_proof(with_source(critic_free_facts(facts=small_facts(ranks_per_node=2)), source))


def test_a_plan_says_the_source_and_is_held_to_it() -> None:
    plan = best(with_source(critic_free_facts(), "training"))
    assert '"old_logprobs": "training"' in canonical_json(plan)
    assert parse(Plan, canonical_json(plan), "plan") == plan
    other = plan.model_copy(update={"facts": with_source(plan.facts, "recompute")})
    assert any(WITHOUT in sentence for sentence in verify(other))
    workload = plan.facts.workload.model_copy(update={"num_minibatches": 2})
    document = json.loads(canonical_json(plan.facts.model_copy(update={"workload": workload})))
    with pytest.raises(BadInput, match="make 2 updates of a step"):
        parse(Facts, json.dumps(document), "facts")


def test_the_facts_of_a_job_have_its_source_with_auto_resolved(tmp_path: Path) -> None:
    config = Path(__file__).parents[3] / "examples/models/llama-2-7b/config.json"
    for role in MODELS["grpo"]:
        (tmp_path / f"{role}.json").write_text(config.read_text())
    for choice, found in (("auto", "training"), ("generator", "generator"), ("recompute", "recompute")):
        assert resolve(job_of(choice), tmp_path).old_logprobs == found


def test_the_critic_reads_the_log_probabilities_that_its_penalty_needs() -> None:
    graph = with_source(small_facts(), "generator").graph
    assert BEHAVIOUR_LOGPROBS in graph.by_name["critic_train"].reads
    assert BEHAVIOUR_LOGPROBS not in small_facts().graph.by_name["critic_train"].reads
    assert replace(graph).writer[BEHAVIOUR_LOGPROBS] == "actor_generate"
