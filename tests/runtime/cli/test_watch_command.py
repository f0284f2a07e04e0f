"""The watch command shows a run once, as JSON, or until the run ends."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.planner.plan.plan import Plan
from meshwright.runtime.records.run_directory import locked
from tests.planner.plans import random_plan
from tests.runtime.command import Call
from tests.runtime.records.written_run import write_run


@pytest.fixture(scope="module")
def plan() -> Plan:
    return random_plan(2)


def test_json_has_what_the_view_has(call: Call, plan: Plan, tmp_path: Path) -> None:
    write_run(plan, tmp_path, steps=4)
    outcome = call("watch", tmp_path, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    assert found["updates"] == 4
    assert found["comparisons"][-1]["name"] == "step"
    assert found["comparisons"][-1]["error"] == pytest.approx(0.0, abs=1e-6)
    shown = call("watch", tmp_path)
    assert shown.code == 0
    assert f"{found['updates']} steps" in shown.out


def test_a_directory_without_a_run_is_refused(call: Call, tmp_path: Path) -> None:
    outcome = call("watch", tmp_path, "--once")
    assert (outcome.code, outcome.out) == (2, "")
    assert "holds no plan.json" in outcome.err


def test_on_a_terminal_it_follows_the_run_and_ends_with_it(plan: Plan, tmp_path: Path) -> None:
    write_run(plan, tmp_path, steps=2)
    ours, theirs = pty.openpty()
    with locked(tmp_path):
        watcher = subprocess.Popen(
            [sys.executable, "-m", "meshwright", "watch", str(tmp_path), "--every", "0.1"],
            stdout=theirs,
            stderr=theirs,
            stdin=theirs,
        )
        os.close(theirs)
        seen = bytearray()
        reader = threading.Thread(target=_drain, args=(ours, seen))
        reader.start()
        try:
            _wait(lambda: b"2 steps" in _unwrapped(seen))
            for name in ("metrics.jsonl", "trace.jsonl"):
                (tmp_path / name).unlink()
            write_run(plan, tmp_path, steps=5)
            _wait(lambda: b"5 steps" in _unwrapped(seen))
            assert watcher.poll() is None
        except BaseException:
            watcher.kill()
            watcher.wait()
            raise
    assert watcher.wait(timeout=60) == 0
    reader.join(timeout=60)
    os.close(ours)
    assert b"not running" in _unwrapped(seen)


def _unwrapped(seen: bytearray) -> bytes:
    """What was shown, with single blanks in the place of line breaks: a long path breaks a line anywhere."""
    return b" ".join(bytes(seen).split())


def _drain(descriptor: int, seen: bytearray) -> None:
    while True:
        try:
            read = os.read(descriptor, 4096)
        except OSError:  # the other end is closed
            return
        if not read:
            return
        seen += read


def _wait(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 120  # a busy machine may take long to start a process
    while not done():
        assert time.monotonic() < until, "the watcher shows nothing"
        time.sleep(0.05)
