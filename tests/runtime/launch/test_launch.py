"""The launcher: results come back by rank, and a failure is one sentence."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from benchmarks.hosts import BIN, LOOPBACK, free_port
from meshwright.planner.plan.plan import write_plan
from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.launch.rendezvous import Rendezvous
from tests.runtime.small_job import request, write_job
from tests.seeds import cases

pytestmark = pytest.mark.slow


ON_CPU = ProcessSetup("cpu")
READY = "meshwright.runtime.execution.train"
either_way = cases("preload", [READY, None], ids=["from a process that is ready", "from nothing"], few=1)


def rank_times_ten() -> int:
    return dist.get_rank() * 10


def fail_on_rank_one(kind: str) -> None:
    if dist.get_rank() == 1:
        if kind == "bad input":
            raise BadInput("weights are missing; give a directory that has them.")
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("a surprise\nwith a second line")
    dist.barrier()


def lose_rank_one(kind: str) -> None:
    """Rank 0 ends before rank 1, which failed first: what a busy machine makes of a partner that leaves."""
    if dist.get_rank() == 1:
        if kind == "killed":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=time.sleep, args=(10.0,)).start()
        raise ValueError("a surprise")
    if kind == "surprise":
        time.sleep(0.5)
        raise ValueError("lost a partner")
    raise RuntimeError("lost a partner")


@either_way
def test_results_come_back_by_rank(preload: str | None) -> None:
    assert launch(rank_times_ten, num_ranks=2, setup=ON_CPU, preload=preload) == {0: 0, 1: 10}


def test_bad_input_found_by_a_rank_is_raised_as_it_is() -> None:
    with pytest.raises(BadInput, match="weights are missing; give a directory that has them"):
        launch(fail_on_rank_one, "bad input", num_ranks=2, setup=ON_CPU, preload=READY)


def test_a_failure_is_one_sentence_and_leaves_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="rank 1 failed: ValueError: a surprise; the traceback") as caught:
        launch(fail_on_rank_one, "surprise", num_ranks=2, setup=ON_CPU, logs=tmp_path, preload=READY)
    assert "\n" not in str(caught.value)
    assert "fail_on_rank_one" in (tmp_path / "failure.log").read_text()


@either_way
def test_a_killed_rank_is_named_with_its_signal(preload: str | None) -> None:
    with pytest.raises(RunFailed, match="rank 1 ended with SIGKILL"):
        launch(fail_on_rank_one, "killed", num_ranks=2, setup=ON_CPU, preload=preload)


@cases(("kind", "end"), [("surprise", "failed: ValueError: a surprise"), ("killed", "ended with")], few=1)
def test_the_rank_that_was_lost_is_named_and_not_the_one_that_lost_it(kind: str, end: str) -> None:
    with pytest.raises(RunFailed, match=f"rank 1 {end}"):
        launch(lose_rank_one, kind, num_ranks=2, setup=ON_CPU, preload=READY)


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"127.0.0.1:{port} cannot be used"):
            launch(rank_times_ten, num_ranks=1, setup=ON_CPU, rendezvous=Rendezvous(port=port))


@cases("torchrun", [False, True], ids=["launched", "joined under torchrun"], few=1)
def test_ranks_end_with_the_process_that_started_them_whatever_ends_that(tmp_path: Path, torchrun: bool) -> None:
    job = write_job(tmp_path, num_ranks=2)
    write_plan(tmp_path / "plan.json", request(job, tmp_path / "run", "actor_train.layout=dp2").plan)
    outer = [BIN / "torchrun", "--nproc-per-node", 2, "--master-port", free_port(), "--no-python"] if torchrun else []
    command = [BIN / "meshwright", "run", tmp_path / "plan.json", job, "--steps", 10**6, "--out", tmp_path / "run"]
    agent = LOOPBACK[0].start([*outer, *command])
    first, metrics = psutil.Process(agent.process.pid), tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists():
        assert agent.process.poll() is None, agent.end(1).err
        time.sleep(0.2)
    started = first.children(recursive=True)
    assert len(started) >= 2
    first.kill()
    assert psutil.wait_procs(started, timeout=5.0)[1] == []
    agent.process.communicate()
