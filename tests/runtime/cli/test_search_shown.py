"""A search is shown to a program in lines of JSON, and to nobody where nobody looks."""

from __future__ import annotations

import json
import threading
import time

import pytest

from meshwright.planner.search.search_control import SearchProgress
from meshwright.runtime.cli.plan import progress_json, progress_line, show_search_progress

COSTING = SearchProgress(phase="costing", done=3, total=7, period_seconds=None, bound_seconds=0.0)
SEARCHING = SearchProgress(phase="searching", done=0, total=2, period_seconds=4.0, bound_seconds=3.0)


def test_a_line_has_the_seconds_the_phase_the_plan_the_bound_and_the_gap() -> None:
    assert json.loads(progress_json(SEARCHING, 1.23456)) == {
        "seconds": 1.235,
        "phase": "searching",
        "done": 0,
        "total": 2,
        "period_seconds": 4.0,
        "bound_seconds": 3.0,
        "gap": 0.25,
    }
    assert json.loads(progress_json(COSTING, 1.0))["gap"] is None


def test_a_reader_is_told_what_is_done_now() -> None:
    assert progress_line(COSTING, 1.0) == "  1.0 s  costing stage 4 of 7: no plan yet"
    assert progress_line(SEARCHING, 12.34) == (
        " 12.3 s  searching case 1 of 2: step 4.000 s, none below 3.000 s, gap 25.0%"
    )


def test_a_program_gets_its_lines_beside_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with show_search_progress(time.monotonic(), as_json=True) as told:
        assert told is not None
        told(COSTING)
        told(SEARCHING)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [json.loads(one)["phase"] for one in captured.err.splitlines()] == ["costing", "searching"]


def test_where_nobody_looks_nothing_is_told() -> None:
    with show_search_progress(time.monotonic(), as_json=False) as told:
        assert told is None


def test_a_terminal_is_shown_a_search_by_no_other_thread(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    before = threading.active_count()
    with show_search_progress(time.monotonic(), as_json=False) as told:
        assert told is not None
        told(SEARCHING)
        assert threading.active_count() == before
    assert "searching case 1 of 2" in capsys.readouterr().err
