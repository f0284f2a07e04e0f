"""A job that keeps sampling masks limits the sets, and its stages that compute log-probabilities read them whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.planner.analysis.explain import explain
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.algorithm_rules import graph_for
from meshwright.planner.job.job import Job
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import KEPT_COUNTS, KEPT_TOKENS, Role
from meshwright.profiles.workload import MAX_KEPT_TOKENS
from tests.planner.jobs import critic_free_facts, small_facts

ROLES = {
    "ppo": (Role.ACTOR, Role.CRITIC, Role.REF, Role.REWARD),
    "grpo": (Role.ACTOR, Role.REF, Role.REWARD),
    "distill": (Role.ACTOR, Role.TEACHER),
}


def read(kept_tokens: int, **settings: Any) -> Job:
    document = {
        "algorithm": "ppo",
        "models": {role: {"path": role} for role in ("actor", "critic", "ref", "reward")},
        "workload": {
            "batch_size": 8,
            "prompt": {"max": 8, "fixed": 8},
            "response": {"max": 8, "fixed": 8},
            "kept_tokens": kept_tokens,
        },
        "ppo": settings,
    }
    return parse(Job, json.dumps(document), "job")


@pytest.mark.parametrize(
    ("kept_tokens", "settings"), [(0, {}), (0, {"top_k": 90}), (64, {"top_k": 64}), (64, {"top_k": 8, "top_p": 0.9})]
)
def test_sets_that_top_k_limits_are_kept(kept_tokens: int, settings: dict[str, Any]) -> None:
    assert read(kept_tokens, **settings).workload.kept_tokens == kept_tokens


@pytest.mark.parametrize(
    ("kept_tokens", "settings", "says"),
    [
        (64, {}, r"ppo\.top_k=0 leaves all tokens, and top_p any number of them; use a top_k of 1 to 64, or raise"),
        (64, {"top_p": 0.9}, r"ppo\.top_k=0 leaves all tokens"),
        (64, {"top_k": 65}, r"ppo\.top_k=65 leaves more tokens; use a top_k of 1 to 64, or raise kept_tokens"),
        (MAX_KEPT_TOKENS + 1, {"top_k": 5}, "kept_tokens is 1025: input should be less than or equal to 1024"),
        (-1, {}, "kept_tokens is -1"),
    ],
)
def test_a_set_without_a_limit_is_refused(kept_tokens: int, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        read(kept_tokens, **settings)


@pytest.mark.parametrize("algorithm", ROLES)
def test_who_computes_log_probabilities_reads_the_sets_and_waits_for_whole_responses(algorithm: Algorithm) -> None:
    workload = small_facts().workload.model_copy(update={"group_size": 2})
    plain = graph_for(algorithm, ROLES[algorithm], workload)
    graph = graph_for(algorithm, ROLES[algorithm], workload.model_copy(update={"kept_tokens": 4}))
    assert graph.names == plain.names
    for stage in graph.stages:
        before = plain.by_name[stage.name]
        if stage.generates:
            assert stage.writes == (*before.writes, KEPT_TOKENS, KEPT_COUNTS)
        elif stage.role in (Role.CRITIC, Role.REWARD):
            assert stage == before
        else:
            assert stage.reads == (*before.reads, KEPT_TOKENS, KEPT_COUNTS)
            assert not stage.may_stream


def planned(kept_tokens: int, *pins: str) -> Plan | NoPlan:
    facts = critic_free_facts("grpo")
    workload = facts.workload.model_copy(update={"kept_tokens": kept_tokens})
    facts = facts.model_copy(update={"workload": workload})
    return compile_plan(facts, cost_model_of(facts), pins=pins, limits=Limits(gap=0.0))


def test_a_plan_counts_the_bytes_of_the_sets_and_says_who_reads_them() -> None:
    plain, few, many = (planned(kept_tokens) for kept_tokens in (0, 16, 256))
    assert isinstance(plain, Plan)
    assert isinstance(few, Plan)
    assert isinstance(many, Plan)
    assert plain.period_seconds <= few.period_seconds <= many.period_seconds
    assert verify(many) == ()
    spans = simulate(many, steps=2, traced=True).spans
    assert {"ref_logprob", "actor_train"} <= {span.instruction for span in spans}
    assert explain(plain).mask is None
    [sentence] = [line for line in explain(many).sentences if line.startswith("sampling mask")]
    assert "the at most 256 tokens" in sentence
    assert sentence.endswith("go to each of ref_logprob, actor_logprob, actor_train")


def test_who_reads_the_sets_cannot_be_pinned_to_stream() -> None:
    pins = "actor_generate.pool=0:1", "ref_logprob.pool=1:1", "ref_logprob.chunk_tokens=32"
    with pytest.raises(BadInput, match="ref_logprob"):
        planned(16, *pins)
