"""The pace of turns: kept where something gains by it, as planned, and faster for responses that are shorter."""

from __future__ import annotations

import statistics

import pytest

from meshwright.cost_models.steady_state import Overlap, SteadyState
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.planner.simulation.pacing import Pacer, planned_rounds
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts
from tests.runtime.plans_by_hand import Where, plan_by_hand


def ahead(steps_ahead: int = 1, others: dict[str, Where] | None = None, **generation: int) -> Plan:
    """One rank generates, with a slot for every sequence in flight; another does all else, unless it is said."""
    facts = small_facts(memory_bytes=2**50)
    response = LengthSpec(max=128, histogram=((32, 1), (64, 1), (128, 1)))
    workload = facts.workload.model_copy(update={"response": response})
    facts = facts.model_copy(update={"workload": workload, "staleness": 2})
    where = {
        "actor_generate": Where("0:1", schedule=Schedule(generation_slots=32, **generation)),
        "other": Where("1:1"),
        **(others or {}),
    }
    return plan_by_hand(facts, where, steps_ahead_patterns(PPO_GRAPH, 2)[steps_ahead])


def test_a_turn_that_is_all_that_its_sequences_have_keeps_no_pace() -> None:
    facts = small_facts(memory_bytes=2**50)
    assert planned_rounds(plan_by_hand(facts, {"other": Where("0:4", "dp4")})) == 0


def test_a_single_replica_beside_which_nothing_runs_keeps_no_pace() -> None:
    assert planned_rounds(ahead(0, batches_in_flight=2)) == 0
    assert planned_rounds(ahead(1, batches_in_flight=2)) > 0


def test_the_pace_of_replicas_that_wait_for_each_other_is_that_of_the_plans_turns() -> None:
    two = Where("0:2", "dp2", Schedule(generation_slots=16, batches_in_flight=2))
    plan = ahead(others={"actor_generate": two, "other": Where("2:1")})
    rounds = SteadyState(plan.facts.workload).unpaced_rounds(8, 16, Overlap(batches_in_flight=2))
    assert planned_rounds(plan) == rounds
    assert Pacer(plan).min_rounds == int(rounds)


def test_the_pace_of_uneven_replicas_is_that_of_the_fullest() -> None:
    """Of 16 rows five replicas have 4 or 3."""
    facts = ahead(batches_in_flight=2).facts
    cluster = facts.cluster.model_copy(update={"ranks_per_node": 5})
    five = Where("0:5", "dp5", Schedule(generation_slots=8, batches_in_flight=2))
    plan = plan_by_hand(facts.model_copy(update={"cluster": cluster}), {GENERATE: five, "other": Where("0:5", "dp5")})
    rounds = SteadyState(plan.facts.workload).unpaced_rounds(4, 8, Overlap(batches_in_flight=2))
    assert planned_rounds(plan) == rounds


def test_a_single_replica_that_would_be_waited_for_keeps_no_pace() -> None:
    where = {name: Where("0:1") for name in ("actor_train", "critic_train", "actor_logprob")}
    assert planned_rounds(ahead(others=where, batches_in_flight=2)) == 0


def test_a_single_replica_goes_on_for_a_fifth_more_than_it_would_wait_for_the_others() -> None:
    """With the critic's training on its own rank, the rank that is left is busy for less than a turn of generation."""
    beside = {"critic_train": Where("2:1"), "reward_score": Where("0:1"), "ref_logprob": Where("0:1")}
    plan = ahead(others=beside, batches_in_flight=2)
    seconds = {placement.stage: placement.cost.total for placement in plan.placements}
    others = ("critic_value", "actor_logprob", "actor_train")
    spare = sum(seconds[stage] for stage in others) - seconds["reward_score"] - seconds["ref_logprob"]
    assert 0 < 1.2 * spare / seconds[GENERATE] < 1.5
    rounds = SteadyState(plan.facts.workload).unpaced_rounds(16, 32, Overlap(batches_in_flight=2))
    assert planned_rounds(plan) == pytest.approx(rounds * min(1.5, 1.2 * spare / seconds[GENERATE]))


def test_a_single_replica_goes_on_for_half_as_many_rounds_again_at_most() -> None:
    rounds = SteadyState((plan := ahead(batches_in_flight=2)).facts.workload).unpaced_rounds(
        16, 32, Overlap(batches_in_flight=2)
    )
    assert planned_rounds(plan) == pytest.approx(1.5 * rounds)


def test_the_pace_follows_responses_that_are_shorter_than_planned_and_no_longer_ones() -> None:
    pace = Pacer(ahead(batches_in_flight=2))
    planned = pace.min_rounds
    for _ in range(100):
        pace.record_delivered([10_000])
    assert pace.min_rounds == planned
    for _ in range(200):
        pace.record_delivered([1, 1])
    assert pace.min_rounds <= planned / 32


def test_what_runs_beside_generation_waits_less_when_turns_are_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ahead(batches_in_flight=2)

    def spread() -> float:
        drawn = Sampled(plan, model_of, seed=0)
        seconds = [drawn.of_step(step).seconds[GENERATE][0] for step in range(10, 60)]
        return statistics.stdev(seconds) / statistics.fmean(seconds)

    paced, period = spread(), simulate(plan, Sampled(plan, model_of, seed=0)).steps.mean
    monkeypatch.setattr("meshwright.planner.simulation.pacing.planned_rounds", lambda _plan: 0.0)
    assert paced < spread() / 2
    assert period < simulate(plan, Sampled(plan, model_of, seed=0)).steps.mean * 1.01
