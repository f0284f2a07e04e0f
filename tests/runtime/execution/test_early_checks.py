"""What is wrong with a run that needs no torch to be seen is told before torch is loaded."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.plan import write_plan
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.small_job import edited_job, write_job

SCRIPT = """
import sys
from meshwright.runtime.cli.main import main
try: main()
finally: print("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("job")
    path = write_job(found, num_ranks=1)
    write_plan(found / "plan.json", plan_by_hand(resolve(read_job(path), found), {"other": Where("0:1")}))
    return found


def refused(directory: Path, job: Path, *options: str) -> str:
    """What is told; torch was not loaded for it."""
    command = ("run", directory / "plan.json", job, "--steps", "1", "--out", directory / "out", *options)
    ended = subprocess.run([sys.executable, "-c", SCRIPT, *command], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "False\n"), ended.stderr
    return " ".join(ended.stderr.split())


@pytest.mark.slow
def test_nodes_ports_and_columns_are_looked_at_before_torch_is_loaded(directory: Path) -> None:
    job = directory / "job-1.yaml"
    assert "--nodes 2: the plan's cluster has 1" in refused(directory, job, "--nodes", "2", "--rendezvous", "a:1")
    assert "--node-rank 1 is not a node of the plan" in refused(directory, job, "--node-rank", "1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"{place} cannot be used" in refused(directory, job, "--rendezvous", place)
    named = edited_job(job, "data", columns={"prompt": "question"})
    assert "data.columns.prompt" in refused(directory, named)
