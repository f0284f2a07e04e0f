"""A process ends with the one that it works for, however that ended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHILD = """
import time
from meshwright.planner.search.child_process import end_with_process
end_with_process({pid})
time.sleep(60)
"""


def child_of(pid: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CHILD.format(pid=pid)], cwd=ROOT)


@pytest.mark.parametrize("end", [subprocess.Popen.kill, subprocess.Popen.terminate], ids=["killed", "terminated"])
def test_a_process_ends_after_the_other_one_whatever_ended_it(end: Callable[[subprocess.Popen[bytes]], None]) -> None:
    with subprocess.Popen(["sleep", "60"]) as other, child_of(other.pid) as child:
        try:
            time.sleep(1.0)
            assert child.poll() is None
            end(other)
            other.wait()
            assert child.wait(timeout=30) == -9
        finally:
            other.kill()
            child.kill()


def test_a_process_whose_other_is_gone_already_ends_at_once() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    with child_of(gone.pid) as child:
        assert child.wait(timeout=30) == -9
