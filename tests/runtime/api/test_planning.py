"""The api's answers are the command line's, and a search leaves nothing changed behind it."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from meshwright import api
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.jobs import small_facts
from tests.runtime.command import Call


@pytest.fixture(scope="module")
def facts(job: Path) -> api.Facts:
    return api.resolve(api.read_job(job), job.parent)


@pytest.fixture(scope="module")
def plan(facts: api.Facts, job: Path) -> api.Plan:
    found = api.plan(facts, job=api.read_job(job))
    assert isinstance(found, api.Plan)
    return found


class Progress:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def __call__(self, what: str, done: int, total: int) -> None:
        self.told.append((what, done, total))


def test_a_plan_is_the_one_that_the_command_writes(call: Call, job: Path, plan: api.Plan, tmp_path: Path) -> None:
    assert call("plan", job, "-o", tmp_path / "command.json").code == 0
    api.write_plan(tmp_path / "api.json", plan)
    assert (tmp_path / "api.json").read_bytes() == (tmp_path / "command.json").read_bytes()


def test_an_explanation_is_the_one_that_the_command_prints(call: Call, plan: api.Plan, tmp_path: Path) -> None:
    api.write_plan(tmp_path / "plan.json", plan)
    outcome = call("explain", tmp_path / "plan.json", "--sizes", "1,2", "--price", 2, "--json")
    found = api.explain(plan, sizes=(1, 2), price=2)
    assert json.loads(json.dumps(asdict(found))) == json.loads(outcome.out)


def test_a_pin_is_kept_and_what_is_forbidden_is_left_out(facts: api.Facts, plan: api.Plan) -> None:
    layout = str(plan.placement("actor_train").layout)
    other = api.plan(facts, forbid=[f"actor_train.layout={layout}"])
    assert isinstance(other, api.Plan)
    assert str(other.placement("actor_train").layout) != layout
    assert api.plan(facts, pins=other.pins) == other


def test_seconds_count_from_when_they_began() -> None:
    limits = api.Limits.for_seconds(60, gap=0.1, began=time.monotonic() - 20)
    assert (limits.gap, limits.max_deterministic_time) == (0.1, 60)
    assert 30 < limits.seconds_left <= 40
    assert api.Limits.for_seconds(60).seconds_left <= 60


def test_a_job_that_does_not_fit_is_answered_and_not_raised() -> None:
    answer = api.plan(small_facts(ranks_per_node=2, memory_bytes=2**18))
    assert isinstance(answer, api.NoPlan)
    assert "that the device can use" in answer.limits[0].sentence


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_it_was_before_a_search(facts: api.Facts, enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(api.BadInput):
            api.plan(facts, pins=["actor_train.layout=tp3"])
        assert gc.isenabled() is enabled
        api.plan(facts, limits=api.Limits(gap=0.5))
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_the_structures_are_ranked_and_the_best_plan_is_among_them(plan: api.Plan) -> None:
    progress = Progress()
    found = api.structures(plan, count=2, limits=api.Limits(gap=0.1), progress=progress)
    assert plan in [one.plan for one in found]
    assert len({tuple(p.layout for p in one.plan.placements) for one in found}) == 2
    assert found[0].simulated_seconds <= found[1].simulated_seconds
    num = len(PPO_GRAPH.stages)
    assert progress.told == [("searching other structures", done, num) for done in range(num + 1)]


def test_what_is_not_asked_for_is_not_said(plan: api.Plan) -> None:
    progress = Progress()
    why = api.explain(plan, progress=progress)
    assert (why.alternatives, why.runners_up, why.sizes, progress.told) == ((), (), (), [])
    assert why.explanation.period_seconds == plan.period_seconds


def test_every_search_of_an_explanation_is_counted(plan: api.Plan) -> None:
    progress = Progress()
    why = api.explain(plan, runner_ups=True, sizes=(2, 1), progress=progress)
    assert [point.num_ranks for point in why.sizes] == [1, 2]
    assert {one.stage for one in why.alternatives} == {p.stage for p in plan.placements}
    stages = len(plan.placements)
    expected = [("searching without each choice", done, stages) for done in range(stages + 1)]
    assert progress.told == [*expected, *(("planning other sizes", done, 2) for done in range(3))]


def test_a_setting_that_changes_nothing_makes_no_difference(plan: api.Plan) -> None:
    same, shorter = api.whatif(plan, [{"workload.response.p99": n} for n in (24, 12)], price=3.0).answers
    assert same.difference is not None
    assert same.difference.step_seconds == same.difference.money == 0
    assert shorter.difference is not None
    assert shorter.difference.step_seconds < 0


def test_planning_other_facts_is_what_a_what_if_finds_that_plans_again(facts: api.Facts, plan: api.Plan) -> None:
    setting = {"workload.batch_size": 32}
    other = api.plan(api.with_setting(facts, setting))
    (answer,) = api.whatif(plan, [setting], replan=True).answers
    assert isinstance(other, api.Plan)
    assert answer.metrics is not None
    gap = other.solver.requested_gap  # it begins with the plan, and looks for what is better by more
    assert answer.metrics.step_seconds == pytest.approx(other.period_seconds, rel=gap)
