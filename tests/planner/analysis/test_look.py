"""A look goes on beside its caller, answers what replan answers, and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from meshwright.planner.analysis.background_search import BackgroundSearch
from meshwright.planner.analysis.replan import Replanned, replan_and_simulate
from meshwright.planner.plan.plan import write_plan
from tests.planner.analysis.test_shown import OTHER, PLAN, run_of_two_plans, write_steps


def ended(look: BackgroundSearch) -> Replanned | str:
    until = time.monotonic() + 60
    while not look.has_ended:
        assert time.monotonic() < until
        time.sleep(0.01)
    found = look.answer()
    look.close()
    assert multiprocessing.active_children() == []
    return found


@pytest.mark.slow
def test_a_look_finds_what_is_found_without_it(tmp_path: Path) -> None:
    run_of_two_plans(tmp_path, before=1.0, now=3.0)
    assert ended(BackgroundSearch(OTHER, tmp_path, None)) == replan_and_simulate(OTHER, tmp_path)


def test_what_a_run_does_not_show_yet_is_told_in_a_sentence(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", PLAN)
    write_steps(PLAN, tmp_path / "trace.jsonl", range(1))
    found = ended(BackgroundSearch(PLAN, tmp_path, None))
    assert isinstance(found, str)
    assert "no complete step after the first" in found


def test_a_look_that_is_ended_from_outside_has_no_answer(tmp_path: Path) -> None:
    look = BackgroundSearch(OTHER, run_of_two_plans(tmp_path, before=1.0, now=1.0), None)
    [process] = multiprocessing.active_children()
    process.kill()
    assert ended(look) == "the search for another plan ended without an answer."


def test_a_look_that_is_closed_ends(tmp_path: Path) -> None:
    look = BackgroundSearch(OTHER, run_of_two_plans(tmp_path, before=1.0, now=1.0), None)
    assert len(multiprocessing.active_children()) == 1
    look.close()
    assert multiprocessing.active_children() == []
