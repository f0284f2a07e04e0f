"""Where the time of a measured trace went: shares add up, and waiting is told apart from work."""

from __future__ import annotations

import pytest

from meshwright.planner.analysis.trace_analysis import BETWEEN_INSTRUCTIONS, measured_use, step_ends
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.simulate import TimeUse, simulate
from meshwright.profiles.layout import Layout
from meshwright.profiles.trace import Span
from tests.planner.jobs import ToyModel, small_facts
from tests.planner.plans import random_plan
from tests.seeds import seeds


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = small_facts(ranks_per_node=2)
    pins = ("actor_generate.layout=dp2", "actor_train.pool=0:1", "reward_score.pool=1:1")
    found = compile_plan(facts, ToyModel(facts), pins=pins)
    assert isinstance(found, Plan)
    return found


def span(kind: str, name: str, rank: int, start: float, end: float) -> Span:
    return Span(step=0, instruction=name, kind=kind, rank=rank, start_seconds=start, end_seconds=end, clock="measured")


def told(use: TimeUse) -> tuple[dict[str, float], dict[str, float]]:
    """What it was busy with, and what it waited for."""
    return {one.what: one.share for one in use.busy}, {one.what: one.share for one in use.waits}


def test_a_receive_is_a_wait_until_the_other_side_sends_and_a_hand_over_behind_that(plan: Plan) -> None:
    sent = span("send", "send reward_score -> actor_train", 1, 6.0, 7.0)
    got = span("receive", "receive reward_score -> actor_train", 0, 2.0, 7.0)
    everyone = measured_use(plan, [sent, got], 0.0, 10.0)[0]
    busy, waits = told(everyone)
    assert busy == {"send reward_score -> actor_train": 0.05}
    assert waits == {"reward_score": 0.2, "transfer from reward_score": 0.05, BETWEEN_INSTRUCTIONS: 0.7}
    assert everyone.idle_share == pytest.approx(0.95)


def test_who_comes_first_to_what_ranks_do_together_waits_in_it(plan: Plan) -> None:
    spans = [span("refit", "refit a -> b", rank, 4.0 * rank, 8.0) for rank in (0, 1)]
    busy, waits = told(measured_use(plan, spans, 0.0, 8.0)[0])
    assert busy == {"refit a -> b": 0.5}
    assert waits == {"refit a -> b on other ranks": 0.25, BETWEEN_INSTRUCTIONS: 0.25}


def test_replicas_that_generate_apart_do_not_wait_for_each_other_in_it(plan: Plan) -> None:
    spans = [span("stage", "actor_generate", rank, 4.0 * rank, 8.0) for rank in (0, 1)]
    busy, waits = told(measured_use(plan, spans, 0.0, 8.0)[0])
    assert (busy, waits) == ({"actor_generate": 0.75}, {BETWEEN_INSTRUCTIONS: 0.25})


def test_replicas_that_share_experts_wait_for_each_other_in_a_stage(plan: Plan) -> None:
    shared = [
        p.model_copy(update={"layout": Layout(dp=2, ep=2)}) if p.stage == "actor_generate" else p
        for p in plan.placements
    ]
    spans = [span("stage", "actor_generate", rank, 4.0 * rank, 8.0) for rank in (0, 1)]
    busy, waits = told(measured_use(plan.model_copy(update={"placements": tuple(shared)}), spans, 0.0, 8.0)[0])
    assert busy == {"actor_generate": 0.5}
    assert waits == {"actor_generate on other ranks": 0.25, BETWEEN_INSTRUCTIONS: 0.25}


def test_an_evaluation_is_work_of_all_ranks_though_one_tells_of_it(plan: Plan) -> None:
    busy, waits = told(measured_use(plan, [span("evaluate", "evaluate", 0, 0.0, 5.0)], 0.0, 10.0)[0])
    assert (busy, waits) == ({"evaluate": 0.5}, {BETWEEN_INSTRUCTIONS: 0.5})


@seeds(2, all=6)
def test_shares_add_up_to_the_whole_and_the_simulated_idle_time_is_found_again(seed: int) -> None:
    plan = random_plan(seed)
    found = simulate(plan, steps=4, traced=True)
    ends = list(step_ends(plan.graph, found.spans).values())
    begin = min(one.start_seconds for one in found.spans)
    uses = measured_use(plan, found.spans, begin, max(ends))
    for use in uses:
        assert sum(one.share for one in (*use.busy, *use.waits)) == pytest.approx(1.0)
    assert uses[0].idle_share == pytest.approx(found.cluster.idle_share, abs=0.02)
