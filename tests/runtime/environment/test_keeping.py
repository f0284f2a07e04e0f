"""Whatever a function has started ends with the process that asked it, and whatever it does itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from meshwright.runtime.environment.samples import RewardError
from meshwright.runtime.environment.worker import Worker
from tests.runtime.environment.samples import MODULE, sample
from tests.seeds import cases

ROOT = Path(__file__).parents[3]
RANK = f"""\
import threading
from meshwright.runtime.environment.worker import Worker
from tests.runtime.environment.samples import sample
worker = Worker("{MODULE}:restless", 60.0)
worker.score([sample("well")])
print("ready", flush=True)
worker.score([sample({{response!r}})])
"""
"""What a rank does: a worker of its own has a call under way."""


def settled(process: psutil.Process, number: int) -> list[psutil.Process]:
    """All that a process has started, as soon as there are so many."""
    until = time.monotonic() + 30.0
    while len(found := process.children(recursive=True)) < number:
        assert time.monotonic() < until, found
        time.sleep(0.01)
    return found


@cases(
    ("response", "number"),
    [("holds the interpreter", 2), ("has children of its own sessions", 4), ("is stopped", 2)],
    few=2,
)
def test_nothing_is_left_of_a_worker_when_its_rank_is_killed(response: str, number: int) -> None:
    command = [sys.executable, "-c", RANK.format(response=response)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"ready\n"
        started = settled(psutil.Process(rank.pid), number)
        time.sleep(0.2)
        rank.kill()
    assert psutil.wait_procs(started, timeout=5.0)[1] == []


@cases("response", ["is stopped", "has children of its own sessions", "holds the interpreter"], few=2)
def test_nothing_is_left_of_a_call_that_took_too_long(response: str) -> None:
    worker = Worker(f"{MODULE}:restless", 1.0)
    before = set(psutil.Process().children(recursive=True))
    worker.score([sample("well")])
    begun = time.monotonic()
    with pytest.raises(RewardError, match="no answer within 1 s"):
        worker.score([sample(response)])
    assert time.monotonic() - begun < 4.0
    assert set(psutil.Process().children(recursive=True)) <= before
    worker.close()


def test_a_reward_of_a_rank_that_holds_signals_back_can_end_its_own_processes() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    worker = Worker(f"{MODULE}:terminates", 20.0)
    try:
        assert worker.score([sample()]) == [3.0]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        worker.close()
