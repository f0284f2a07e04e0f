"""A plan chooses how many prompts a wave has, and says so."""

from __future__ import annotations

import json

import pytest

from meshwright.planner.analysis.wave_size import (
    best_wave,
    candidate_wave_sizes,
    plan_chooses_wave,
    sampled_waves,
    with_average_wave,
    with_wave,
)
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.layout_and_schedule_rules import schedule_rules
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.environment.dynamic_sampling import DynamicSampling
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE
from tests.planner.jobs import critic_free_facts, small_facts


def sampled_facts(acceptance: float = 0.5, batch_size: int = 64, facts: Facts | None = None) -> Facts:
    facts = critic_free_facts(facts=facts or small_facts(memory_bytes=2**40, batch_size=batch_size))
    sampling = DynamicSampling(acceptance=acceptance)
    workload = facts.workload.model_copy(update={"dynamic_sampling": sampling})
    return facts.model_copy(update={"workload": workload})


def planned(facts: Facts) -> Plan:
    found = compile_plan(facts, cost_model_of(facts))
    assert isinstance(found, Plan)
    return found


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(with_average_wave(sampled_facts()))


def test_waves_that_fill_a_batch_on_average_are_the_first_that_are_planned() -> None:
    assert plan_chooses_wave(sampled_facts())
    first = with_average_wave(sampled_facts())
    assert not plan_chooses_wave(first)
    assert first.workload.wave.batch_size == 128


def test_the_chosen_wave_is_as_quick_as_any_that_is_weighed(plan: Plan) -> None:
    best = best_wave(plan, cost_model_of)
    assert verify(best) == ()
    assert best.period_seconds < plan.period_seconds
    others = [planned(with_wave(plan.facts, size)).period_seconds for size in candidate_wave_sizes(plan.facts)]
    assert best.period_seconds <= min(others) * 1.02
    found = sampled_waves(best)
    assert found is not None
    assert found.num_waves < 1.5
    assert f"waves of {found.num_prompts} prompts" in found.sentences[0]


def test_what_is_scored_says_what_the_other_stages_are_given(plan: Plan) -> None:
    edges = {(producer, consumer) for producer, consumer, _ in plan.graph.edges}
    assert {("reward_score", "ref_logprob"), ("reward_score", "actor_logprob")} <= edges
    scored = plan.placement("reward_score").end_seconds
    assert plan.placement("actor_logprob").start_seconds >= scored - 1e-9


def test_groups_that_are_dropped_cost_a_step_its_time(plan: Plan) -> None:
    facts = plan.facts
    workload = facts.workload.model_copy(update={"dynamic_sampling": None})
    plain = planned(facts.model_copy(update={"workload": workload}))
    assert plan.placement(GENERATE).cost.total > plain.placement(GENERATE).cost.total
    assert plan.period_seconds > plain.period_seconds
    assert sampled_waves(plain) is None


def test_chunks_and_batches_in_flight_do_not_go_with_waves() -> None:
    facts = with_average_wave(sampled_facts())
    generate = facts.graph.by_name[GENERATE]
    broken = schedule_rules(facts, generate, Layout(dp=4), Schedule(generation_slots=32, batches_in_flight=2))
    assert "batches_in_flight=2 is not supported with dynamic sampling; use 1." in broken


def test_an_algorithm_that_does_not_compare_samples_is_refused() -> None:
    document = {**json.loads(canonical_json(sampled_facts())), "algorithm": "reinforce++"}
    with pytest.raises(BadInput, match=r"algorithm=reinforce\+\+ does not compare the samples of a group"):
        parse(Facts, json.dumps(document), "facts")
