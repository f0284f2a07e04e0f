"""The searches of the explorer: the newest state comes first, a stopped search says so, and answers stay."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.runtime.explorer.searches import Answer, Refusal, Searches
from meshwright.runtime.explorer.source import read_source
from meshwright.runtime.explorer.state import State, state_of

SMALL = state_of(["workload.batch_size=8"], ())


def searches_of(path: Path) -> Searches:
    return Searches(read_source(path, gap=0.3), limit_memory=nullcontext)


def answered(searches: Searches, state: State) -> Answer:
    for _ in range(600):
        if found := searches.find(state):
            return found
        searches.wait(0.2)
    pytest.fail("no answer in two minutes")


def test_a_plan_is_its_own_answer(plan: Path) -> None:
    searches = searches_of(plan)
    assert searches.answer_now(State()).outcome == read_plan(plan)
    answer = searches.ask(State())
    assert answer is not None
    assert answer.outcome == read_plan(plan)


def test_a_new_state_goes_before_those_that_wait(job: Path) -> None:
    searches = searches_of(job)
    assert searches.ask(State()) is None
    searches.focus(SMALL)
    assert searches.ask(SMALL) is None
    thread = threading.Thread(target=searches.serve)
    thread.start()
    try:
        assert isinstance(answered(searches, SMALL).outcome, Plan)
        assert searches.find(State()) is None
        assert searches.ask(State()) is None
        assert isinstance(answered(searches, State()).outcome, Plan)
        assert searches.ask(SMALL) is not None
        searches.forget(SMALL)
        assert searches.find(SMALL) is None
    finally:
        searches.close()
        thread.join(60)
    assert not thread.is_alive()


def test_a_stopped_search_says_so(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = searches_of(job)
    searches.ask(State())
    running = searches._next()
    assert running is not None
    searches.stop(State())
    assert searches._search(running).stopped


def test_a_rule_that_is_broken_is_the_answer(job: Path) -> None:
    outcome = searches_of(job).answer_now(state_of([], ("actor_train.tp=3",))).outcome
    assert isinstance(outcome, Refusal)
    assert "tp=3 does not divide the 4 attention heads" in outcome.sentence


def test_a_stopped_grid_is_not_searched_until_it_is_resumed(job: Path) -> None:
    searches = searches_of(job)
    state = state_of([], (), grid=["workload.batch_size=8,16"])
    first, second = state.points
    searches.ask_points(state)
    running = searches._next()
    assert running is not None
    assert running.state == first.searched
    searches.stop(state)
    searches._answers[running.state] = searches._search(running)
    searches._running = None
    searches.ask_points(state)
    assert searches.is_stopped_grid(state)
    assert list(searches._waiting) == []
    searches.resume(state)
    assert searches.find(first) is None, "what was cut short is searched again"
    searches.ask_points(state)
    assert [wanted.state for wanted in searches._waiting] == [first.searched, second.searched]


def test_a_state_of_which_everything_is_known_ends_no_search_that_it_needs(job: Path) -> None:
    searches = searches_of(job)
    state = state_of([], (), grid=["workload.batch_size=8,16"])
    searches._answers[State()] = Answer(outcome=Refusal("no."), seconds=0.0)
    searches.ask_points(state)
    running = searches._next()
    assert running is not None
    searches.focus(state)
    assert not running.is_dropped
    searches.focus(state_of(["workload.batch_size=32"], ()))
    assert running.is_dropped


def test_a_plan_comes_with_the_interval_of_its_step(job: Path) -> None:
    answer = searches_of(job).answer_now(SMALL)
    assert isinstance(answer.outcome, Plan)
    assert answer.step_interval is not None
    assert answer.step_interval.p10 < answer.outcome.period_seconds < answer.step_interval.p90


def test_every_point_of_a_grid_has_a_first_answer_before_one_is_searched_to_the_end(job: Path) -> None:
    searches = Searches(read_source(job, gap=0.01), limit_memory=nullcontext)
    state = state_of([], (), grid=["workload.batch_size=8,16"])
    first, second = state.points
    searches.ask_points(state)
    searches.ask_points(state)
    assert [(wanted.state, wanted.is_first) for wanted in searches._waiting] == [
        *((point.searched, True) for point in (first, second)),
        *((point.searched, False) for point in (first, second)),
    ]
    thread = threading.Thread(target=searches.serve)
    thread.start()
    try:
        while not (rough := searches.find_point(second)):
            searches.wait(0.2)
        assert rough.is_first
        assert isinstance(rough.outcome, Plan)
        best = answered(searches, second).outcome
        assert isinstance(best, Plan)
        assert best.period_seconds <= rough.outcome.period_seconds
        assert searches.find_point(second) == searches.find(second)
    finally:
        searches.close()
        thread.join(60)


def test_a_point_without_any_plan_is_not_searched_again_to_say_so(job: Path) -> None:
    """No gap makes a plan of a rule that is broken."""
    searches = Searches(read_source(job, gap=0.01), limit_memory=nullcontext)
    state = state_of([], ("actor_train.tp=3",), grid=["workload.batch_size=8"])
    searches.ask_points(state)
    thread = threading.Thread(target=searches.serve)
    thread.start()
    try:
        (point,) = state.points
        assert isinstance(answered(searches, point).outcome, Refusal)
        while searches._waiting:
            searches.wait(0.2)
        assert searches.running(point) is None
    finally:
        searches.close()
        thread.join(60)
