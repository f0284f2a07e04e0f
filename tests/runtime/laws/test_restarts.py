"""A run that loses a rank, or a node for good, comes to its end by itself, and says what it lost."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.hosts import BIN, LOOPBACK, Agent, free_port
from meshwright.planner.plan.plan import read_plan, write_plan
from tests.runtime.small_job import OF_TIME, request, write_job

pytestmark = pytest.mark.slow

STEPS = 6


def lines(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def learned(out: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in OF_TIME} for line in lines(out)]


def command(directory: Path, out: Path, *options: object) -> list[object]:
    files = [directory / "plan.json", next(directory.glob("job-*.yaml"))]
    return [BIN / "meshwright", "run", *files, "--steps", STEPS, "--out", out, "--checkpoint-every", 1, *options]


def wait_for_steps(out: Path, number: int, agents: Sequence[Agent]) -> None:
    while len(lines(out)) < number:
        assert all(agent.process.poll() is None for agent in agents), [agent.end(1).err for agent in agents]
        time.sleep(0.05)


def ranks_of(agent: Agent) -> list[psutil.Process]:
    """The processes that compute: those which a process that the launcher started has forked."""
    launcher = psutil.Process(agent.process.pid)
    return [process for process in launcher.children(recursive=True) if process.ppid() != launcher.pid]


@pytest.mark.check_all
def test_a_rank_that_is_killed_is_replaced_and_nothing_is_learned_otherwise(tmp_path: Path) -> None:
    plan = request(write_job(tmp_path, num_ranks=2), tmp_path, "actor_train.layout=dp2", "critic_train.layout=pp2").plan
    write_plan(tmp_path / "plan.json", plan)
    whole = LOOPBACK[0].start(command(tmp_path, tmp_path / "whole")).end(300)
    assert whole.code == 0, whole.err
    agent = LOOPBACK[0].start(command(tmp_path, tmp_path / "killed", "--max-restarts", 2))
    wait_for_steps(tmp_path / "killed", 3, [agent])
    ranks_of(agent)[0].kill()
    ended = agent.end(300)
    assert ended.code == 0, ended.err
    assert learned(tmp_path / "killed") == learned(tmp_path / "whole")
    [restart] = json.loads((tmp_path / "killed" / "summary.json").read_text())["restarts"]
    assert "SIGKILL" in restart["reason"]
    assert restart["reached"] - restart["saved"] <= 1
    assert "restart 1 from step" in ended.out


@pytest.mark.check_all
def test_a_node_that_is_lost_for_good_is_planned_around(tmp_path: Path) -> None:
    plan = request(write_job(tmp_path, num_ranks=1, nodes=2), tmp_path, "actor_train.layout=dp2").plan
    write_plan(tmp_path / "plan.json", plan)
    place = ["--nodes", 2, "--rendezvous", f"127.0.0.1:{free_port()}", "--max-restarts", 2]
    out = tmp_path / "run"
    agents = [host.start(command(tmp_path, out, *place, "--node-rank", node)) for node, host in enumerate(LOOPBACK)]
    wait_for_steps(out, 2, agents)
    agents[1].kill()
    ended = agents[0].end(300)
    assert ended.code == 0, ended.err
    assert [line["step"] for line in lines(out)] == list(range(STEPS))
    assert read_plan(out / "plan.json").facts.cluster.nodes == 1
    assert "1 of 2 nodes are left and the job is planned again for them" in " ".join(ended.out.split())
