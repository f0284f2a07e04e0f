"""What a choice buys is never less than nothing, and is what the search says without it."""

from __future__ import annotations

import pytest

from meshwright.planner.analysis import alternatives
from meshwright.planner.analysis.alternatives import LIMITS, RunnerUp, runners_up
from meshwright.planner.compile import best_plan, compile_plan
from meshwright.planner.plan.pins import Pin
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from tests.planner.jobs import ToyModel, small_facts

FACTS = small_facts(ranks_per_node=2, batch_size=4)
MODEL = ToyModel(FACTS)
PIN = "ref_logprob.layout=dp2"


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = compile_plan(FACTS, MODEL, pins=(PIN,))
    assert isinstance(found, Plan)
    return found


@pytest.fixture(scope="module")
def found(plan: Plan) -> tuple[RunnerUp, ...]:
    return runners_up(plan, MODEL)


def test_each_stage_that_no_pin_fixes_has_one(found: tuple[RunnerUp, ...]) -> None:
    assert {one.stage for one in found} == {stage.name for stage in PPO_GRAPH.stages} - {"ref_logprob"}


def test_a_proven_choice_costs_nothing_and_buys_what_is_proven_at_least(found: tuple[RunnerUp, ...]) -> None:
    for one in found:
        assert one.delta_seconds is not None
        assert one.proven_seconds is not None
        assert -1e-9 <= one.proven_seconds <= one.delta_seconds + 1e-9


def test_a_runner_up_is_the_best_plan_without_the_choice(plan: Plan, found: tuple[RunnerUp, ...]) -> None:
    one = next(one for one in found if one.stage == "actor_train")
    barred = Pin("actor_train", "layout", plan.placement("actor_train").layout, forbids=True)
    other = best_plan(FACTS, MODEL, pins=(Pin("ref_logprob", "layout", Layout(dp=2)), barred), limits=LIMITS)
    assert isinstance(other, Plan)
    assert one.period_seconds == other.period_seconds
    assert one.instead == str(other.placement("actor_train").layout) != one.choice


def test_the_largest_gain_comes_first_and_none_last(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def best(*_: object, pins: tuple[Pin, ...], **__: object) -> Plan | None:
        stage = next(pin.stage for pin in pins if pin.forbids)
        factor = {"actor_train": 1, "critic_train": 2, "reward_score": 3}.get(stage)
        return None if factor is None else plan.model_copy(update={"period_seconds": factor * plan.period_seconds})

    monkeypatch.setattr(alternatives, "best_plan", best)
    *without_plan, large, small, none = runners_up(plan, MODEL)
    assert [one.delta_seconds for one in without_plan] == [None] * len(without_plan)
    assert [one.stage for one in (large, small, none)] == ["reward_score", "critic_train", "actor_train"]
