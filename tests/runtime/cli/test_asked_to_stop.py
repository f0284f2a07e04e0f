"""Ctrl-C while a plan is searched keeps the best one so far, and leaves neither a traceback nor a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from meshwright.planner.plan.plan import read_plan
from meshwright.planner.plan.verify import verify
from meshwright.profiles.errors import STOPPED
from meshwright.runtime.cli.call import stop_on_signal

ROOT = Path(__file__).parents[3]
SOON, LATE = (ROOT / "examples" / name / "job.yaml" for name in ("long-tail-64", "moe-16384"))
"""Jobs of which a plan is known a second after the search has begun, and five seconds after."""


def test_signals_are_as_they_were_when_the_search_is_over() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_on_signal() as stop:
        assert not stop.is_set()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def stopped_at(job: Path, path: Path, *, has_plan: bool) -> tuple[int, list[str]]:
    """The exit code and the last lines of planning that is stopped, as a terminal does it, at its first line, or at the
    first that has a plan."""
    command = [sys.executable, "-m", "meshwright", "plan", str(job), "-o", str(path), "--gap", "0", "--json"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        for text in process.stderr:
            if json.loads(text)["period_seconds"] is not None or not has_plan:
                break
        below = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read().splitlines()
        process.wait(timeout=60)
    assert psutil.wait_procs(below, timeout=5.0)[1] == []
    assert not any("Traceback" in text for text in rest)
    return process.returncode, [text for text in rest if not text.startswith("{")]


@pytest.mark.slow
def test_the_best_plan_so_far_is_kept_with_its_gap(tmp_path: Path) -> None:
    code, told = stopped_at(SOON, tmp_path / "plan.json", has_plan=True)
    assert code == STOPPED
    plan = read_plan(tmp_path / "plan.json")
    assert verify(plan) == ()
    assert 0 < plan.solver.gap <= 1
    assert told == [
        f"stopped: {tmp_path / 'plan.json'} is the best plan so far, proven to be within {plan.solver.gap:.1%} of the "
        f"best; --from {tmp_path / 'plan.json'} continues from it."
    ]


@pytest.mark.slow
def test_where_nothing_was_found_that_is_said(tmp_path: Path) -> None:
    code, told = stopped_at(LATE, tmp_path / "plan.json", has_plan=False)
    assert code == 3
    assert not (tmp_path / "plan.json").exists()
    assert told == []
