"""What a plan was made from and how it was found, in full."""

from __future__ import annotations

import pytest

from meshwright.planner.job.rewards_and_tools import RewardLoad
from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.planner.report.inputs_section import facts, proof
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.environment.latency import CallKey, TimedCalls
from meshwright.profiles.lengths import LengthSpec
from tests.planner.jobs import mixed_facts
from tests.planner.plans import random_plan
from tests.planner.report.pages import Outline, plan_of


def test_every_model_and_every_digest_is_told() -> None:
    plan = plan_of()
    text = Outline(facts(plan)).text
    for role in PPO_GRAPH.roles:
        assert plan.facts.models.spec(role).name in text
    assert set(plan.digests.values()) <= set(text)
    assert any(plan.facts.cluster.device.source in part for part in text)


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        (LengthSpec(max=90, fixed=80), "80 tokens each, mean 80.0"),
        (LengthSpec(max=90, histogram=((10, 1.0), (20, 1.0))), "a histogram of 2 lengths up to 90 tokens, mean 15.0"),
        (LengthSpec(max=90, median=20, p99=80), "log-normal with median 20 and p99 80, at most 90 tokens, mean "),
    ],
)
def test_lengths_are_told_in_the_form_that_they_were_given(lengths: LengthSpec, told: str) -> None:
    plan = plan_of()
    workload = plan.facts.workload.model_copy(update={"response": lengths})
    changed = plan.model_copy(update={"facts": plan.facts.model_copy(update={"workload": workload})})
    assert any(part.startswith(told) for part in Outline(facts(changed)).text)


def test_latencies_that_were_measured_are_told_with_their_calls() -> None:
    plan = plan_of()
    calls = TimedCalls(called=CallKey(kind="reward", target="mine:style"), seconds=(0.1, 0.3), date="2026-11-25")
    load = RewardLoad(name="style", is_remote=False, batch_size=1, latency_seconds=calls.latency)
    changed = plan.model_copy(update={"facts": plan.facts.model_copy(update={"rewards": (load,)})})
    assert "a call of reward style takes 0.2 s (the mean of 2 on 2026-11-25)" in Outline(facts(changed)).text
    assert "Latencies of calls" not in Outline(facts(plan)).text


def test_each_part_of_a_mixed_cluster_is_told_and_what_joins_them() -> None:
    text = Outline(facts(random_plan(0, mixed_facts(memory_bytes=(2**50, 2**50))))).text
    assert "between the parts" in text
    assert {"1 node of 2 toy: 2", "1 node of 2 fast toy: 2"} <= set(text)


@pytest.mark.parametrize("status", ["optimal", "feasible", "pinned"])
def test_a_proof_says_what_its_status_means(status: str) -> None:
    plan = plan_of()
    solver = plan.solver.model_copy(update={"status": status, "gap": 0.5})
    solved = plan.model_copy(update={"solver": solver, "pins": ("a", "b")})
    text = Outline(proof(solved)).text
    said = {"optimal": "The search ended", "feasible": "The search was stopped early", "pinned": "nothing was searched"}
    assert [key for key, words in said.items() if words in " ".join(text)] == [status]
    assert "a; b" in text


def test_a_search_that_reached_its_gap_was_not_stopped_early() -> None:
    plan = plan_of()
    solver = plan.solver.model_copy(update={"status": "feasible", "gap": 0.01, "requested_gap": 0.01})
    text = " ".join(Outline(proof(plan.model_copy(update={"solver": solver}))).text)
    assert "The search ended at the requested gap" in text
    assert "stopped early" not in text


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_staleness_and_what_works_ahead_are_told(bound: int) -> None:
    text = " ".join(Outline(proof(plan_of(3, steps_ahead_patterns(PPO_GRAPH, 2)[bound]))).text)
    assert (": synchronous" in text) == (bound == 0)
    assert (f"actor_generate by {bound}" in text) == (bound > 0)
    assert ("no stage" in text) == (bound == 0)
