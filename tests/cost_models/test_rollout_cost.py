"""A multi-turn generation: what waiting for a tool costs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.protocol import StageQuery
from meshwright.cost_models.rollout_cost import TOOLS, _parts_of_rollouts
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.schedule import WhileWaiting
from meshwright.profiles.workload import Workload
from tests.seeds import seeds

KEEP, LEAVE = WhileWaiting.KEEP, WhileWaiting.LEAVE

Ask = Callable[..., Cost]


def rollouts(batch_size: int = 64, **changes: Any) -> Workload:
    given = {
        "number": {"max": 8, "median": 4, "p99": 8},
        "result": {"max": 100, "median": 40, "p99": 100},
        "latency_seconds": {"fixed": 1.0},
        "max_tokens": 3000,
    }
    return Workload(
        batch_size=batch_size,
        prompt=LengthSpec(max=100, fixed=100),
        response=LengthSpec(max=250, median=60, p99=240),
        turns=ToolTurns.model_validate({**given, **changes}),
    )


@pytest.fixture
def ask(a100s: Callable[[int], Cluster], query: Callable[..., StageQuery]) -> Ask:
    """Seconds of the generation on one rank."""

    def cost(workload: Workload, slots: int = 64, waiting: WhileWaiting = KEEP, batches: int = 1) -> Cost:
        asked = query("actor_generate", "tp1", slots=slots)
        schedule = replace(asked.schedule, while_waiting=waiting, batches_in_flight=batches)
        return AnalyticModel(a100s(1), workload, "bf16").seconds(replace(asked, schedule=schedule))

    return cost


def test_rollouts_of_one_turn_cost_what_they_do_without_turns(ask: Ask) -> None:
    single = rollouts(number={"max": 1, "fixed": 1}, max_tokens=250)
    plain = single.model_copy(update={"turns": None})
    assert ask(single).total == pytest.approx(ask(plain).total, rel=0.02)


def test_a_lone_rollout_waits_for_each_of_its_answers(ask: Ask) -> None:
    lone = {"number": {"max": 4, "fixed": 4}}
    waiting = rollouts(1, **lone, latency_seconds={"fixed": 5.0})
    at_once = rollouts(1, **lone, latency_seconds={"fixed": 0.0})
    for kept in WhileWaiting:
        longer = ask(waiting, 1, kept).total - ask(at_once, 1, kept).total
        assert longer == pytest.approx(15.0, rel=0.02)


def test_slower_tools_never_make_a_generation_quicker(ask: Ask) -> None:
    for kept in WhileWaiting:
        found = [ask(rollouts(latency_seconds={"fixed": s}), 16, kept).total for s in (0.0, 0.1, 1.0, 10.0)]
        assert found == sorted(found)


def test_waiting_hides_behind_what_others_draw(ask: Ask) -> None:
    """Four calls of a second each would be 3 s of a rollout; of many rollouts the longest waits, not their sum."""
    waiting, at_once = ask(rollouts()), ask(rollouts(latency_seconds={"fixed": 0.0}))
    assert waiting.amount(TOOLS) < 7.0
    assert waiting.total - at_once.total < 7 * 1.5


def test_who_leaves_a_scarce_slot_lets_others_draw_and_prefills_again(ask: Ask) -> None:
    slow = rollouts(latency_seconds={"fixed": 10.0})
    assert ask(slow, 8, LEAVE).total < 0.8 * ask(slow, 8, KEEP).total
    quick = rollouts(latency_seconds={"fixed": 0.0})
    prefills = [ask(quick, 64, kept).amount("prefill layers") for kept in (KEEP, LEAVE)]
    assert prefills[0] < prefills[1]


@seeds(3, all=12)
def test_no_generation_takes_less_than_what_is_told_without_playing_it(
    seed: int, a100s: Callable[[int], Cluster], query: Callable[..., StageQuery]
) -> None:
    draw = random.Random(seed)
    turns, latency = draw.choice((1, 3, 8, 30)), draw.choice((0.01, 0.3, 4.0))
    drawn = rollouts(
        batch_size=draw.choice((4, 16, 64)),
        number={"max": turns, "median": max(1, turns // 2), "p99": turns},
        latency_seconds={"mean": latency, "p99": draw.choice((2, 10)) * latency},
        max_tokens=draw.choice((1000, 6000)),
    )
    model = AnalyticModel(a100s(8), drawn, "bf16")
    for layout in ("tp1", "tp2", "tp1,pp2", "tp1,pp1,dp2", "tp2,pp2,dp2"):
        for slots in (2, 3, 8, 64):
            for waiting, batches in itertools.product((KEEP, LEAVE), (1, min(2, turns), min(4, turns))):
                asked = query("actor_generate", layout, slots=slots)
                schedule = replace(asked.schedule, while_waiting=waiting, batches_in_flight=batches)
                asked = replace(asked, schedule=schedule)
                least, seconds = model.generation_lower_bound(asked), model.seconds(asked).total
                assert 0 < least <= seconds, (layout, slots, waiting, batches)


@pytest.mark.parametrize("batches", [1, 2, 3, 5, 8])
def test_the_parts_of_a_period_are_together_the_turns_of_one_batch(batches: int) -> None:
    workload = rollouts(batch_size=1000, number={"max": 8, "histogram": ((1, 1), (3, 2), (8, 1))}, max_tokens=10**6)
    turns = workload.turns
    assert turns is not None
    found, parts = _parts_of_rollouts(workload, turns, batches)
    bounds = [math.ceil(8 * part / batches) for part in range(batches)]
    assert parts.per_rollout == pytest.approx(sum(sum(n > first for first in bounds) for n in (1, 3, 3, 8)) / 4)
    assert found.batch_size == round(1000 * parts.per_rollout)
    number = found.turns.number.resolve()  # type: ignore[union-attr]
    assert number.mean * parts.per_rollout == pytest.approx(turns.number.resolve().mean)
    assert number.maximum == math.ceil(8 / batches)
    assert found.sampled_lengths.mean * parts.per_rollout == pytest.approx(workload.sampled_lengths.mean, rel=1e-3)


def test_a_part_is_prefilled_after_all_that_came_before_it() -> None:
    """Of a rollout of four turns, each of 60 tokens and an answer of 40 tokens, the second half starts after 200."""
    workload = rollouts(number={"max": 4, "fixed": 4}, result={"max": 40, "fixed": 40})
    workload = workload.model_copy(update={"response": LengthSpec(max=60, fixed=60)})
    assert workload.turns is not None
    found, parts = _parts_of_rollouts(workload, workload.turns, 2)
    assert (parts.per_rollout, parts.mean_first, parts.mean_continued) == (2, 100, pytest.approx(300))
    assert found.prompt_lengths.tokens == (100, 300)
    assert parts.num_prefilled(4) == pytest.approx((1 / 4 + 1) / 2)


def test_two_batches_in_flight_halve_the_calls_that_a_period_waits_for(ask: Ask) -> None:
    """A rollout of four turns waits for three answers; the period of two batches waits for one of each half."""
    given = {"number": {"max": 4, "fixed": 4}}
    slow, at_once = (rollouts(1, **given, latency_seconds={"fixed": seconds}) for seconds in (50.0, 0.0))
    for waiting, (batches, num_calls) in itertools.product(WhileWaiting, ((1, 3), (2, 1), (4, 0))):
        longer = ask(slow, 2, waiting, batches).total - ask(at_once, 2, waiting, batches).total
        assert longer == pytest.approx(50 * num_calls, rel=0.02, abs=1e-6)


def test_an_answer_longer_than_all_turns_of_rollouts_without_a_call_is_left_out() -> None:
    single = rollouts(number={"max": 1, "fixed": 1}, result={"max": 5000, "fixed": 5000}, max_tokens=6000)
    assert single.response_lengths == single.sampled_lengths
