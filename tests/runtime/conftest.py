from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.plan import write_plan
from tests.runtime.command import Call, Outcome, exit_code
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.small_job import write_job


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """One process has imported what any launch of the session needs; it would be what the first of them asks for."""
    modules = ("execution.train", "profiling.profiling", "execution.rehearse")
    multiprocessing.set_forkserver_preload([f"meshwright.runtime.{module}" for module in modules])
    forkserver.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """As a rank has it: threads that wait for each other beside busy ranks take many times as long."""
    torch.set_num_threads(1)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the command line and keeps what it printed; no mistake of a user ends in a traceback."""

    def run(*arguments: object) -> Outcome:
        code = exit_code(*arguments)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job for two ranks of this machine, with tiny checkpoints beside it."""
    return write_job(tmp_path_factory.mktemp("job"), num_ranks=2)


@pytest.fixture(scope="module")
def plan(job: Path) -> Path:
    """A plan of the job on both ranks, written down without a search."""
    path = job.with_name("plan.json")
    write_plan(path, plan_by_hand(resolve(read_job(job), job.parent), {"other": Where("0:2", "dp2")}))
    return path
