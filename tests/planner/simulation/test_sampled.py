"""Drawn lengths: typical ones give the planned seconds back, long ones cost more, a seed is a sequence of steps."""

from __future__ import annotations

import pickle
import statistics

import numpy as np
import pytest

from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.planner.simulation.sampled_durations import Sampled, sample_lengths, work_of_replicas
from meshwright.planner.simulation.simulate import simulate
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.packing import ReplicaAssignment, row_work
from meshwright.profiles.trace import NUM_LIVE
from tests.planner.drawn import carrying_over, model_of, plan_of
from tests.planner.jobs import model_spec, small_facts
from tests.planner.plans import random_plan
from tests.seeds import seeds

SPEC = model_spec("actor")


@seeds(2, all=8)
def test_equal_lengths_give_the_planned_seconds_back(seed: int) -> None:
    plan = plan_of(seed, LengthSpec(max=128, fixed=128), batch_size=24)
    work = Sampled(plan, model_of, seed=0).of_step(0)
    for placement in plan.placements:
        tolerance = 0.02 if placement.stage == "actor_generate" else 1e-9  # rounds are costed at twelve mean contexts
        expected = placement.cost.total
        assert work.seconds[placement.stage] == pytest.approx(
            [expected] * len(work.seconds[placement.stage]), tolerance
        )


def test_equal_lengths_give_the_slowest_of_uneven_replicas_the_planned_seconds() -> None:
    """Of 14 rows four replicas have 4, 4, 3 and 3, and of a minibatch of 7 they have 2, 2, 2 and 1."""
    plans = [plan_of(seed, LengthSpec(max=128, fixed=128), batch_size=14) for seed in range(8)]
    assert any(placement.layout.dp == 4 for plan in plans for placement in plan.placements)
    for plan in plans:
        work = Sampled(plan, model_of, seed=0).of_step(0)
        for placement in plan.placements:
            tolerance = 0.03 if placement.stage == "actor_generate" else 1e-9
            slowest = max(work.seconds[placement.stage])
            assert slowest == pytest.approx(placement.cost.total, tolerance), placement.stage


def test_drawn_steps_differ_and_a_seed_repeats_them() -> None:
    plan = plan_of(1, LengthSpec(max=256, median=40, p99=200))
    one, same, other = (Sampled(plan, model_of, seed=seed) for seed in (7, 7, 8))
    assert one.of_step(0) == same.of_step(0)
    assert one.of_step(0) != one.of_step(1)
    assert one.of_step(0) != other.of_step(0)


def test_the_mean_of_many_drawn_steps_is_near_the_plan() -> None:
    plan = plan_of(2, LengthSpec(max=64, histogram=((30, 1), (32, 1), (34, 1))))
    simulated = simulate(plan, Sampled(plan, model_of, seed=0), steps=50)
    assert simulated.steps.mean == pytest.approx(plan.period_seconds, rel=0.1)
    assert simulated.durations == "sampled"


def test_replicas_have_the_work_that_they_are_dealt_in_a_run() -> None:
    lengths = np.random.default_rng(0).integers(1, 4000, 64)
    work = np.array(row_work(SPEC, lengths.tolist()))
    for deal in (
        ReplicaAssignment(SPEC, (4,)),
        ReplicaAssignment(SPEC, (3,), any_number=True),
        ReplicaAssignment(SPEC, (1, 2), (16, 48)),
    ):
        expected = [work[list(rows)].sum() for rows in deal.assign(lengths.tolist())]
        assert work_of_replicas(lengths, deal).tolist() == expected


def test_replicas_share_the_work_of_many_rows_as_evenly_as_the_longest_allows() -> None:
    lengths = np.random.default_rng(0).integers(1, 4000, 4096)
    found, total = work_of_replicas(lengths, ReplicaAssignment(SPEC, (16,))), sum(row_work(SPEC, lengths.tolist()))
    assert found.tolist() == pytest.approx([total / 16] * 16)
    lengths[7] = 10**7
    found = work_of_replicas(lengths, ReplicaAssignment(SPEC, (16,)))
    (longest,) = row_work(SPEC, [10**7])
    assert found[0] == longest
    assert found[1:].tolist() == pytest.approx([(found.sum() - longest) / 15] * 15)


@seeds(2, all=8)
def test_equal_lengths_keep_every_slot_live_that_the_rows_fill(seed: int) -> None:
    plan = plan_of(seed, LengthSpec(max=128, fixed=128), batch_size=24)
    placement = plan.placement("actor_generate")
    rows = 24 // placement.layout.dp
    rounds = -(-rows // placement.schedule.generation_slots)
    live = Sampled(plan, model_of, seed=0).of_step(0).live_sequences["actor_generate"]
    assert live == (rows / rounds,) * placement.layout.dp


def test_a_timeline_of_drawn_steps_counts_live_sequences_on_the_ranks_that_generate() -> None:
    plan = plan_of(3, LengthSpec(max=128, median=30, p99=120))
    spans = simulate(plan, Sampled(plan, model_of, seed=0), steps=2, traced=True).spans
    told = {(span.instruction, span.rank): span.facts[NUM_LIVE] for span in spans if NUM_LIVE in span.facts}
    assert sorted(told) == [("actor_generate", rank) for rank in plan.pool_of("actor_generate").ranks]
    assert all(0 < live <= plan.placement("actor_generate").schedule.generation_slots for live in told.values())


@pytest.mark.parametrize("overcommits", [False, True])
def test_the_plan_lies_between_the_mean_and_the_slowest_replica_of_turns_that_carry_over(overcommits: bool) -> None:
    """It knows the longest response of a step, and not which replicas draw more tokens than others."""
    for plan in carrying_over(overcommits):
        drawn, planned = Sampled(plan, model_of, seed=1), plan.placement("actor_generate").cost.total
        turns = [drawn.of_step(step).seconds["actor_generate"] for step in range(5, 65)]
        assert statistics.fmean(map(statistics.fmean, turns)) < 1.3 * planned
        assert planned < 1.3 * statistics.fmean(map(max, turns))


@pytest.mark.parametrize("overcommits", [False, True])
def test_no_token_is_staler_than_the_plan_says_and_all_are_counted(overcommits: bool) -> None:
    found: set[int] = set()
    for plan in carrying_over(overcommits):
        drawn = Sampled(plan, model_of, seed=1)
        for work in map(drawn.of_step, range(40)):
            assert sum(work.tokens_by_staleness.values()) == work.num_tokens
            assert max(work.tokens_by_staleness) <= plan.staleness
            found |= set(work.tokens_by_staleness)
    assert {0, 1} <= found


def test_a_step_has_the_sequences_that_were_delivered() -> None:
    """Its scoring takes time for those, which are not the ones whose prompts it brought."""
    plan = carrying_over(overcommits=True)[0]
    tokens = [Sampled(plan, model_of, seed=1).of_step(step).num_tokens for step in range(10)]
    brought = [sample_lengths(plan.facts.workload, seed=1, step=step)[1].sum() for step in range(10)]
    assert tokens != brought
    assert sum(tokens) <= sum(brought) + sample_lengths(plan.facts.workload, seed=1, step=10)[1].sum()


def test_a_run_that_carries_sequences_over_is_the_same_in_whatever_order_it_is_asked_for() -> None:
    plan = carrying_over(overcommits=True)[0]
    forwards, backwards = Sampled(plan, model_of, seed=1), pickle.loads(pickle.dumps(Sampled(plan, model_of, seed=1)))
    steps = range(12)
    assert [forwards.of_step(s) for s in steps] == [backwards.of_step(s) for s in reversed(steps)][::-1]


def test_simulated_staleness_is_that_of_the_steps_ahead_where_nothing_is_carried_over() -> None:
    for ahead, staleness in zip(steps_ahead_patterns(PPO_GRAPH, 2), (0, 1, 2), strict=True):
        facts = small_facts(memory_bytes=2**50)
        plan = random_plan(3, facts, model_of(facts), ahead)
        drawn = simulate(plan, Sampled(plan, model_of, seed=0), steps=4)
        assert [(one.staleness, one.share) for one in drawn.staleness] == [(staleness, 1.0)]
    assert simulate(random_plan(3), steps=2).staleness == ()


def test_the_simulated_staleness_of_tokens_adds_up_to_one() -> None:
    plan = carrying_over(overcommits=True)[0]
    told = simulate(plan, Sampled(plan, model_of, seed=0), steps=20).staleness
    assert sum(one.share for one in told) == pytest.approx(1)
    assert [one.staleness for one in told] == sorted({one.staleness for one in told})
