"""The kernel ends a process with its parent, whatever the process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
CHILD = """\
import os, signal, sys
from meshwright.planner.search.parent_death import end_with_parent
end_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
{then}
"""
PARENT = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], str(os.getpid())])"


@pytest.mark.parametrize(
    "then", ["sum(range(10**12))", "os.kill(os.getpid(), signal.SIGSTOP)"], ids=["holds the GIL", "is stopped"]
)
def test_a_process_that_cannot_look_ends_with_its_parent(then: str) -> None:
    command = [sys.executable, "-c", PARENT, CHILD.format(then=then)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert psutil.wait_procs([child], timeout=5.0)[1] == []


def test_a_process_whose_parent_is_another_by_now_ends_at_once() -> None:
    ended = subprocess.run([sys.executable, "-c", CHILD.format(then="pass"), str(os.getppid())], cwd=ROOT, check=False)
    assert ended.returncode == -signal.SIGKILL


def test_a_process_whose_parent_is_there_goes_on() -> None:
    begun = time.monotonic()
    command = [sys.executable, "-c", CHILD.format(then="pass"), str(os.getpid())]
    assert subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL).returncode == 0
    assert time.monotonic() - begun < 20.0
