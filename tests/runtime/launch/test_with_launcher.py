"""Ranks that are stopped or hold the interpreter end with their launcher, and so does what they are forked from."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.seeds import cases

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
LAUNCHER = """\
from meshwright.runtime.launch.launch import MESSAGES_ONLY, launch
from tests.runtime.launch.restless import {entry}
if __name__ == "__main__":
    launch({entry}, num_ranks=2, setup=MESSAGES_ONLY, preload={preload!r})
"""


@cases("preload", ["meshwright.runtime.launch.launch", None], few=1, ids=["forked", "spawned"])
@pytest.mark.parametrize("entry", ["stand_still", "hold_the_interpreter"])
def test_ranks_that_cannot_look_end_with_their_launcher(entry: str, preload: str | None, tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER.format(entry=entry, preload=preload))
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, str(script)], cwd=tmp_path, env=environment) as launcher:
        first, until = psutil.Process(launcher.pid), time.monotonic() + 90.0
        while len(list(tmp_path.glob("rank-*"))) < 2:
            assert launcher.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        time.sleep(0.3)
        started = first.children(recursive=True)
        launcher.kill()
    assert len(started) >= 2
    assert psutil.wait_procs(started, timeout=5.0)[1] == []
