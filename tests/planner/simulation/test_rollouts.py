"""Multi-turn rollouts in simulated time, against what can be counted by hand and against the law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.planner.plan.cost_queries import query_for_placement
from meshwright.planner.plan.verify import verify
from meshwright.planner.simulation.sampled_durations import Sampled, sample_lengths
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.simulation.simulated_rollouts import SampledRollout, _Replica, sample_rollouts
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.schedule import WhileWaiting
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.workload import Workload
from tests.planner.drawn import TIMES, model_of
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan
from tests.seeds import seeds

KEEP, LEAVE = WhileWaiting.KEEP, WhileWaiting.LEAVE


def played(slots: int, waiting: WhileWaiting, *rollouts: SampledRollout) -> float:
    """Rounds take a second each, and prefills no time."""
    return _Replica(TIMES, slots, 1, waiting).simulate((), rollouts, 1)[0]


def workload(batch_size: int = 16, **changes: Any) -> Workload:
    turns = {
        "number": {"max": 3, "fixed": 3},
        "result": {"max": 8, "fixed": 8},
        "latency_seconds": {"fixed": 0.0},
        "max_tokens": 300,
    }
    return Workload(
        batch_size=batch_size,
        prompt=LengthSpec(max=64, fixed=64),
        response=LengthSpec(max=40, fixed=30),
        turns=ToolTurns.model_validate({**turns, **changes}),
        num_minibatches=2,
    )


@pytest.mark.parametrize("waiting", WhileWaiting)
def test_a_lone_rollout_takes_its_rounds_and_its_waiting(waiting: WhileWaiting) -> None:
    assert played(1, waiting, SampledRollout(5, (4, 3), (2,), (10.0,))) == pytest.approx(4 + 10 + 3)


def test_who_keeps_its_slot_holds_up_who_waits_for_one() -> None:
    rollouts = SampledRollout(5, (4, 3), (2,), (10.0,)), SampledRollout(5, (6,), (), ())
    assert played(1, KEEP, *rollouts) == pytest.approx(4 + 10 + 3 + 6)
    assert played(1, LEAVE, *rollouts) == pytest.approx(4 + 10 + 3)


def test_others_draw_while_one_waits() -> None:
    rollouts = SampledRollout(5, (4, 3), (2,), (10.0,)), SampledRollout(5, (20,), (), ())
    assert played(2, KEEP, *rollouts) == pytest.approx(20)


def test_a_rollout_ends_in_the_turn_in_which_it_reaches_its_most_tokens() -> None:
    (rollout,) = sample_rollouts(workload(max_tokens=50), np.array([5]), np.random.default_rng(0))
    assert rollout == SampledRollout(5, (30, 12), (8,), (0.0,))
    assert rollout.num_tokens == 50


@seeds(2, all=4)
def test_equal_rollouts_give_the_planned_seconds_back(seed: int) -> None:
    """Or fewer: they call together, and the law takes each call as one by itself."""
    facts = small_facts(memory_bytes=2**50).model_copy(update={"workload": workload()})
    plan = random_plan(seed, facts, model_of(facts))
    assert verify(plan) == ()
    work = Sampled(plan, model_of, seed=0).of_step(0)
    assert 0.8 < max(work.seconds[GENERATE]) / plan.placement(GENERATE).cost.total < 1.02
    assert work.num_tokens == 16 * 90


def test_what_is_drawn_has_the_lengths_that_ranks_hand_on() -> None:
    prompts, responses = sample_lengths(workload(number={"max": 3, "histogram": ((1, 1), (3, 1))}), seed=1, step=0)
    assert len(prompts) == len(responses) == 16
    assert set(responses.tolist()) == {30, 3 * 30 + 2 * 8}


def test_what_rollouts_hold_of_a_cache_is_not_told() -> None:
    facts = small_facts(memory_bytes=2**50).model_copy(update={"workload": workload()})
    plan = random_plan(0, facts, model_of(facts))
    (use,) = simulate(plan, Sampled(plan, model_of, seed=0), steps=1).caches
    assert use.blocks > 0
    assert use.mean_share is use.peak_share is None


@pytest.mark.check_all
@pytest.mark.parametrize("waiting", WhileWaiting)
def test_with_batches_in_flight_a_period_shrinks_as_the_equations_say(waiting: WhileWaiting) -> None:
    """Measured as ratios to a period of one batch, which the equations predict with an error of their own."""
    given = {"number": {"max": 12, "histogram": ((2, 3), (4, 4), (12, 1))}, "latency_seconds": {"fixed": 0.5}}
    facts = small_facts(memory_bytes=2**50).model_copy(update={"workload": workload(64, max_tokens=3000, **given)})
    plan, model = random_plan(0, facts, model_of(facts)), model_of(facts)
    placement, seconds = plan.placement(GENERATE), list[tuple[float, float]]()
    for batches in (1, 2, 4):
        slots = batches * 64 // placement.layout.dp
        schedule = replace(placement.schedule, batches_in_flight=batches, generation_slots=slots, while_waiting=waiting)
        cost = model.seconds(replace(query_for_placement(plan, placement), schedule=schedule))
        update = {GENERATE: placement.model_copy(update={"schedule": schedule, "cost": cost})}
        changed = plan.model_copy(update={"placements": tuple(update.get(p.stage, p) for p in plan.placements)})
        sampled = Sampled(changed, model_of, seed=0)
        periods = [max(sampled._generation.of_step(step).seconds) for step in range(batches, batches + 2)]
        seconds.append((cost.total, float(np.mean(periods))))
    for (planned, found), (planned_alone, found_alone) in zip(seconds[1:], [seconds[0]] * 2, strict=True):
        assert found < found_alone
        assert planned / planned_alone == pytest.approx(found / found_alone, rel=0.12)


def test_simulated_tokens_are_as_stale_as_their_turns_are_early() -> None:
    """Three turns of 30 tokens with two batches in flight: the first two turns are sampled a period before the last."""
    facts = small_facts(memory_bytes=2**50).model_copy(update={"workload": workload(), "staleness": 1})
    plan = random_plan(0, facts, model_of(facts))
    placement = plan.placement(GENERATE)
    ahead = placement.steps_ahead
    schedule = replace(placement.schedule, batches_in_flight=2)
    update = {GENERATE: placement.model_copy(update={"schedule": schedule})}
    changed = plan.model_copy(update={"placements": tuple(update.get(p.stage, p) for p in plan.placements)})
    sampled = Sampled(changed, model_of, seed=0)
    assert sampled.of_step(0).tokens_by_staleness == {ahead: 16 * 90}
    assert sampled.of_step(3).tokens_by_staleness == {ahead: 16 * 30, ahead + 1: 16 * 60}
