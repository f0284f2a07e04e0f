"""A plan that trains on the best of several samples costs all of them where they are drawn and scored, and says so."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost_models.sampling_waves import WAVE_REWARDS
from meshwright.planner.analysis.explain import explain
from meshwright.planner.analysis.optional_features import best_samples, host_rewards
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.job.limits import require_within_limits
from meshwright.planner.plan.cost_queries import cost_model_of, query_for_placement
from meshwright.planner.plan.layout_and_schedule_rules import schedule_rules
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.reward_workers import host_seconds
from meshwright.planner.plan.verify import verify
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.simulation.simulated_generation import sample_waves
from meshwright.planner.trainers.registry import TRAINERS
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.environment.dynamic_sampling import DynamicSampling
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE
from tests.planner.jobs import critic_free_facts, distill_facts, small_facts

SCORE = "reward_score"


def best_facts(best_of: int = 16, *, algorithm: Algorithm = "grpo", group_size: int = 4) -> Facts:
    facts = small_facts(memory_bytes=2**40, batch_size=64)
    if algorithm != "ppo":
        facts = critic_free_facts(algorithm, facts=facts)
    return changed(facts, best_of=best_of, group_size=group_size)


def changed(facts: Facts, **changes: object) -> Facts:
    """The facts with another workload, read again."""
    document = json.loads(canonical_json(facts))
    return parse(Facts, json.dumps({**document, "workload": {**document["workload"], **changes}}), "facts")


def made(facts: Facts) -> Plan:
    found = compile_plan(facts, cost_model_of(facts))
    assert isinstance(found, Plan)
    return found


@pytest.fixture(scope="module")
def plan() -> Plan:
    return made(best_facts())


@pytest.fixture(scope="module")
def plain() -> Plan:
    """Of the same job without a filter."""
    return made(changed(best_facts(), best_of=None))


@pytest.fixture(scope="module")
def whole() -> Plan:
    """Of the job that trains on all that is drawn."""
    facts = best_facts()
    return made(facts.model_copy(update={"workload": facts.workload.candidates}))


def test_what_draws_and_scores_counts_all_and_what_stands_behind_counts_what_is_kept(
    plan: Plan, plain: Plan, whole: Plan
) -> None:
    assert verify(plan) == ()
    assert plan.facts.workload.candidates == whole.facts.workload
    own, of_kept, of_all = (cost_model_of(one.facts) for one in (plan, plain, whole))
    for placement in plan.placements:
        call, alike = query_for_placement(plan, placement), of_all if placement.stage in (GENERATE, SCORE) else of_kept
        assert own.seconds(call) == alike.seconds(call)
        assert own.memory(call) == alike.memory(call)
    assert of_all.seconds(query_for_placement(plan, plan.placement(SCORE))) != of_kept.seconds(
        query_for_placement(plan, plan.placement(SCORE))
    )


def test_what_scores_is_handed_all_samples_and_the_other_stages_those_that_are_kept(
    plan: Plan, plain: Plan, whole: Plan
) -> None:
    handed = {(edge.producer, edge.consumer): edge.bytes for edge in plan.edges}
    of_kept, of_all = ({(e.producer, e.consumer): e.bytes for e in one.edges} for one in (plain, whole))
    assert handed[GENERATE, SCORE] == of_all[GENERATE, SCORE] == 4 * of_kept[GENERATE, SCORE]
    behind = [pair for pair in of_kept if pair != (GENERATE, SCORE)]
    assert {pair: handed[pair] for pair in behind} == {pair: of_kept[pair] for pair in behind}


def test_a_step_lies_between_those_that_draw_and_those_that_train_on_other_numbers(
    plan: Plan, plain: Plan, whole: Plan
) -> None:
    assert plain.period_seconds < plan.period_seconds < whole.period_seconds
    assert max(plan.peak_bytes_per_rank) <= max(whole.peak_bytes_per_rank)


def test_what_is_kept_is_known_when_all_samples_are_scored(plan: Plan) -> None:
    edges = {(producer, consumer) for producer, consumer, _ in plan.graph.edges}
    assert {(SCORE, "ref_logprob"), (SCORE, "actor_logprob")} <= edges
    assert plan.placement("actor_logprob").start_seconds >= plan.placement(SCORE).end_seconds - 1e-9
    assert plan.graph.streaming == ()


@pytest.mark.parametrize(("algorithm", "group_size"), [("ppo", 1), ("rloo", 2), ("reinforce++", 1)])
def test_every_algorithm_that_pays_rewards_is_planned_with_it(algorithm: Algorithm, group_size: int) -> None:
    plan = made(best_facts(4, algorithm=algorithm, group_size=group_size))
    assert verify(plan) == ()
    behind = {stage.name for stage in plan.graph.stages} - {GENERATE, SCORE}
    assert {consumer for producer, consumer, _ in plan.graph.edges if producer == SCORE} == behind


def test_a_plan_says_what_is_drawn_and_what_is_kept(plan: Plan, plain: Plan) -> None:
    found = best_samples(plan)
    assert found is not None
    first, second = found.sentences
    assert first == (
        "16 samples of each of 16 prompts are generated and scored, and the best 4 are trained on: 256 and 64 a step"
    )
    assert second.startswith("stages that see all 256 take 0.")
    assert found.all_seconds + found.kept_seconds == pytest.approx(sum(p.cost.total for p in plan.placements))
    assert first in explain(plan).sentences
    assert best_samples(plain) is None


@pytest.fixture(scope="module")
def waves() -> Plan:
    """A plan of the same job with waves of 24 prompts, of which half have a signal on average."""
    return made(changed(best_facts(), dynamic_sampling={"acceptance": 0.5, "num_prompts": 24}))


def test_waves_of_the_best_samples_count_all_samples_of_their_prompts(plan: Plan, waves: Plan) -> None:
    assert verify(waves) == ()
    workload = waves.facts.workload
    assert (workload.wave.batch_size, workload.wave.group_size, workload.wave.best_of) == (24 * 16, 16, None)
    number = DynamicSampling(acceptance=0.5, num_prompts=24).expected_waves(16)
    own, of_wave, of_batch = (
        cost_model_of(facts)
        for facts in (
            waves.facts,
            waves.facts.model_copy(update={"workload": workload.wave}),
            plan.facts.model_copy(update={"workload": changed(plan.facts, best_of=None).workload}),
        )
    )
    for placement in waves.placements:
        call = query_for_placement(waves, placement)
        if placement.stage in (GENERATE, SCORE):
            assert own.seconds(call).total == pytest.approx(number * of_wave.seconds(call).total)
            assert own.memory(call) == of_wave.memory(call)
        else:
            assert own.seconds(call) == of_batch.seconds(call)
    found = best_samples(waves)
    assert found is not None
    assert next(iter(found.sentences)) == (
        f"16 samples of each of {24 * number:.0f} prompts are generated and scored on average, and the best 4 of 16 "
        f"prompts are trained on: {24 * number * 16:.0f} and 64 a step"
    )


def test_waves_of_the_best_samples_are_simulated(waves: Plan) -> None:
    workload = waves.facts.workload
    for step in range(20):
        kept = sample_waves(waves, seed=0, step=step).kept
        prompts = np.concatenate(kept) // 16 + np.repeat(24 * np.arange(len(kept)), [len(rows) for rows in kept])
        assert (np.unique(prompts, return_counts=True)[1] == workload.group_size).all()
        assert len(np.unique(prompts)) == workload.num_prompts
    found = simulate(waves, Sampled(waves, cost_model_of, seed=3), steps=100)
    assert found.steps.mean == pytest.approx(waves.period_seconds, rel=0.05)


def test_rewards_on_hosts_are_waited_for_once_before_samples_are_kept() -> None:
    reward = {"name": "judge", "is_remote": True, "batch_size": 1, "latency_seconds": {"fixed": 0.25}}
    document = {**json.loads(canonical_json(best_facts())), "rewards": [reward]}
    plan = made(parse(Facts, json.dumps(document), "facts"))
    assert verify(plan) == ()
    assert plan.placement(GENERATE).cost.amount(WAVE_REWARDS) == 0.25
    assert max(map(host_seconds, plan.edges)) == 0
    found = host_rewards(plan)
    assert found is not None
    assert found.tail_seconds == found.added_seconds == 0.25


@pytest.mark.parametrize("name", ["chunk_tokens", "batches_in_flight", "overcommit"])
def test_what_delivers_samples_one_by_one_does_not_go_with_it(name: str) -> None:
    facts = best_facts()
    number = {"chunk_tokens": 128, "batches_in_flight": 2, "overcommit": 4}[name]
    schedule = replace(Schedule(generation_slots=32), **{name: number})
    broken = schedule_rules(facts, facts.graph.by_name[GENERATE], Layout(dp=4), schedule)
    assert any(sentence.startswith(f"{name}={number} is not supported with best_of; use") for sentence in broken)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"workload.best_of": 4}, "best_of=4 is not above group_size=4, .*; sample more of them, or remove best_of"),
        ({"workload.best_of": 2**25}, None),
        (
            {"workload.dynamic_sampling": {"acceptance": 0.5, "num_prompts": 1601}},
            "dynamic_sampling.num_prompts=1601 is more than 100 times the 16 prompts of a batch, the most that a step "
            "samples; use 1600 or fewer",
        ),
    ],
)
def test_what_is_not_possible_is_refused(changes: dict[str, object], sentence: str | None) -> None:
    document = json.loads(canonical_json(best_facts()))
    for key, value in changes.items():
        first, _, rest = key.partition(".")
        (document[first] if rest else document).update({rest or first: value})
    if sentence is None:
        found = parse(Facts, json.dumps(document), "facts")
        with pytest.raises(BadInput, match=r"workload\.best_of=33554432 is above the limit of 16777216"):
            require_within_limits(found.models.by_name, found.cluster, found.workload, "job")
        return
    with pytest.raises(BadInput, match=sentence):
        parse(Facts, json.dumps(document), "facts")


def test_more_samples_than_can_be_counted_are_refused() -> None:
    facts = best_facts(2**21)
    with pytest.raises(BadInput, match=r"the workload generates 33554432 sequences at once \(16 prompts with 2097152 "):
        require_within_limits(facts.models.by_name, facts.cluster, facts.workload, "job")


def test_a_distillation_without_rewards_has_no_best_samples() -> None:
    sentence = r"workload\.best_of: no rewards say which sample is best; add rewards, or remove it"
    with pytest.raises(BadInput, match=sentence):
        changed(distill_facts(), best_of=4)


def test_other_trainers_are_not_given_it(plan: Plan) -> None:
    with pytest.raises(BadInput, match=r"the best 4 of 16 samples \(workload.best_of\) are not written for verl"):
        TRAINERS["verl"].require_expressible(plan.facts)
