"""What a killed process has left is removed by the next one, and what a living one uses is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from meshwright.runtime.launch.scratch import remove_leftovers, scratch_parent

HOLDS = """
import multiprocessing.util, sys
from meshwright.runtime.launch.scratch import scratch_directory
print(scratch_directory(), flush=True)
print(multiprocessing.util.get_temp_dir(), flush=True)
sys.stdin.readline()
"""


def started(directory: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(directory)},
    )
    assert process.stdout is not None
    made, of_multiprocessing = (process.stdout.readline().strip() for _ in "ab")
    assert made == of_multiprocessing
    return process, Path(made)


def test_sockets_are_not_put_where_their_paths_would_be_too_long() -> None:
    assert scratch_parent("/scratch/job") == Path("/scratch/job")
    assert scratch_parent("/scratch/" + 9 * "a-long-name") == Path("/tmp")


def test_the_directory_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_stays(
    tmp_path: Path,
) -> None:
    killed, left = started(tmp_path)
    living, used = started(tmp_path)
    killed.kill()
    killed.communicate()
    assert left.exists()
    other, _ = started(tmp_path)
    assert not left.exists()
    assert used.exists()
    for process in (living, other):
        process.communicate("\n")
        assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_code_under_test_is_removed_after_a_day_and_what_is_not_ours_never(tmp_path: Path) -> None:
    old = time.time() - 2 * 86_400
    for name in ("meshwright-tests-a", "meshwright-other", "pymp-a"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (old, old))
    (tmp_path / "meshwright-tests-new").mkdir()
    remove_leftovers(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["meshwright-other", "meshwright-tests-new", "pymp-a"]
