"""A run whose plan is not the best one for what it meets goes over to another by itself, and learns what it would have
learned had it been stopped there and resumed by hand."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks.hosts import BIN, LOOPBACK, Agent, free_port
from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.plan import read_plan, write_plan
from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import STOPPED
from meshwright.profiles.run_logs import former_plans
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.records.restarts import NEXT_PLAN, read_restarts
from tests.runtime.execution.test_train import read_lines
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.small_job import OF_TIME, edited_job, write_job

pytestmark = pytest.mark.slow

MANY = 100_000
"""Steps that earn anything; no run here does them."""

BEYOND = 3
"""Steps under the second plan that are looked at."""

TOLERANCE = 1e-4


def asked(directory: Path, *, nodes: int = 1, staleness: int = 0, **keys: object) -> RunRequest:
    """A run on two ranks whose plan leaves one without work, and is of responses of 2 tokens where they have 13; with a
    staleness generation works a step ahead. The job has other keys too."""
    path = write_job(directory, num_ranks=2 // nodes, nodes=nodes)
    path = edited_job(path, "workload", response={"max": 24, "median": 2, "p99": 4})
    with path.open("a") as file:
        file.write(yaml.safe_dump({"staleness": staleness, **keys}))
    job = read_job(path)
    plan = plan_by_hand(
        resolve(job, directory), {"other": Where("0:1")}, steps_ahead_patterns(PPO_GRAPH, staleness)[-1]
    )
    write_plan(directory / "plan.json", plan)
    return RunRequest(plan=plan, job=job, directory=directory, out=directory / "run", steps=MANY)


def start(request: RunRequest, *options: object) -> Agent:
    files = request.directory / "plan.json", request.directory / "edited.yaml"
    return LOOPBACK[0].start([BIN / "meshwright", "run", *files, "--out", request.out, "--replan-every", 4, *options])


def stopped_beyond(request: RunRequest, agents: Sequence[Agent]) -> int:
    """Asks the run to stop some steps after it has gone over; returns behind which step it did."""

    def wait_for(found: int, wanted: int) -> bool:
        assert all(agent.process.poll() is None for agent in agents), [agent.end(1).err for agent in agents]
        time.sleep(0.1)
        return found < wanted

    while wait_for(len(read_restarts(request.out)), 1):
        pass
    saved = read_restarts(request.out)[0].saved
    while wait_for(len(read_lines(request.out / "metrics.jsonl")), saved + BEYOND):
        pass
    for agent in agents:
        agent.process.send_signal(signal.SIGUSR1)
    return saved


@pytest.mark.check_all
def test_a_run_goes_over_by_itself_and_learns_as_if_it_had_been_resumed_by_hand(tmp_path: Path) -> None:
    request = asked(tmp_path)
    agent = start(request, "--steps", MANY)
    saved = stopped_beyond(request, [agent])
    ended = agent.end(300)
    assert ended.code == STOPPED, ended.err
    assert f"restart 1 from step {saved}, 0 steps lost: planned again from its own measurements" in ended.err
    assert read_plan(request.out / f"plan-until-{saved:06d}.json") == request.plan
    assert not (request.out / NEXT_PLAN).exists()
    following = [left.plan for left in former_plans(request.out)][1:] or [request.out / "plan.json"]
    new = read_plan(following[0])
    assert new.facts.workload.response_lengths.mean > 2 * request.plan.facts.workload.response_lengths.mean

    by_hand = replace(request, out=tmp_path / "by hand", steps=saved)
    run_plan(by_hand)
    run_plan(replace(by_hand, plan=new, steps=saved + BEYOND, resume=True))
    lines = read_lines(request.out / "metrics.jsonl")[: saved + BEYOND]
    for line, known in zip(lines, read_lines(by_hand.out / "metrics.jsonl"), strict=True):
        for name in known.keys() - OF_TIME:
            assert line[name] == pytest.approx(known[name], abs=TOLERANCE), name


@pytest.mark.check_all
def test_a_run_with_stages_ahead_goes_over_and_leaves_no_step_out(tmp_path: Path) -> None:
    request = asked(tmp_path, staleness=1)
    agent = start(request, "--steps", MANY)
    saved = stopped_beyond(request, [agent])
    ended = agent.end(300)
    assert ended.code == STOPPED, ended.err
    lines = read_lines(request.out / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert len(lines) >= saved + BEYOND
    assert max(line["max_staleness"] for line in lines) <= 1


@pytest.mark.check_all
def test_all_nodes_go_over_together(tmp_path: Path) -> None:
    request = asked(tmp_path, nodes=2)
    place = ["--nodes", 2, "--rendezvous", f"127.0.0.1:{free_port()}"]
    agents = [start(request, "--steps", MANY, *place, "--node-rank", node) for node in range(2)]
    saved = stopped_beyond(request, agents)
    for ended in [agent.end(300) for agent in agents]:
        assert ended.code == STOPPED, ended.err
        assert f"restart 1 from step {saved}, 0 steps lost" in ended.err
    assert [line["step"] for line in read_lines(request.out / "metrics.jsonl")][: saved + BEYOND] == list(
        range(saved + BEYOND)
    )


@pytest.mark.check_all
def test_a_run_whose_steps_do_not_earn_it_keeps_its_plan(tmp_path: Path) -> None:
    request = asked(tmp_path)
    ended = start(request, "--steps", 8).end(300)
    assert ended.code == 0, ended.err
    assert read_restarts(request.out) == ()
    assert read_plan(request.out / "plan.json") == request.plan
    assert len(read_lines(request.out / "metrics.jsonl")) == 8
