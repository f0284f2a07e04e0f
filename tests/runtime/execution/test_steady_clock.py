"""A clock that is set forward or back moves no span of a run."""

from __future__ import annotations

import inspect
import time

import pytest

from meshwright.runtime.execution.executor import Executor, steady_now


def test_it_is_the_time_of_day_and_goes_on_evenly_where_that_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    before = steady_now()
    assert before == pytest.approx(time.time(), abs=5.0)
    for jump in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: before + jump)
        assert 0.0 <= steady_now() - before < 60.0


def test_spans_of_a_run_are_measured_by_it() -> None:
    assert inspect.signature(Executor).parameters["now"].default is steady_now
