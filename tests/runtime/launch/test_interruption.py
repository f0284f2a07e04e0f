"""A run that is asked to stop saves a checkpoint between two steps, and goes on from it as if it had not been."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from meshwright.planner.plan.plan import write_plan
from meshwright.planner.plan.steps_ahead import patterns
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.runtime.execution.resume import saved_steps
from meshwright.runtime.records.stopped import STOPPED
from tests.runtime.execution.test_train import read_lines
from tests.runtime.hosts import BIN, LOOPBACK, Agent
from tests.runtime.laws.test_ahead import DISJOINT, working_ahead
from tests.runtime.small_job import OF_TIME, request, write_job

pytestmark = pytest.mark.slow

PATIENCE = 600.0
AHEAD = {"overcommit": 8, "generation_slots": 16}


def start(directory: Path, out: Path, steps: int, *options: object) -> Agent:
    files = [directory / "plan.json", directory / "job-2.yaml"]
    return LOOPBACK[0].start([BIN / "meshwright", "run", *files, "--steps", steps, "--out", out, *options])


def wait_for_steps(agent: Agent, out: Path, number: int) -> None:
    while not (out / "metrics.jsonl").exists() or len(read_lines(out / "metrics.jsonl")) < number:
        assert agent.process.poll() is None, agent.end(1).err
        time.sleep(0.1)


@pytest.mark.parametrize(
    "is_ahead", [False, True], ids=["synchronous, a rank is told", "two ahead, the launcher is told"]
)
def test_a_run_that_is_told_to_end_saves_and_goes_on_bit_for_bit(tmp_path: Path, is_ahead: bool) -> None:
    asked = request(write_job(tmp_path, num_ranks=2), tmp_path / "run", *(DISJOINT if is_ahead else ()))
    if is_ahead:
        asked = working_ahead(asked, patterns(PPO_GRAPH, 2)[2], 3, **AHEAD)
        solver = asked.plan.solver
        solver = solver.model_copy(update={"bound_seconds": solver.objective_seconds, "gap": 0.0})
        asked = replace(asked, plan=asked.plan.model_copy(update={"solver": solver}))
        path = tmp_path / "job-2.yaml"
        path.write_text(path.read_text() + "staleness: 3\n")
    write_plan(tmp_path / "plan.json", asked.plan)
    out, steps = tmp_path / "run", 12
    agent = start(tmp_path, out, steps)
    wait_for_steps(agent, out, 2)
    launcher = psutil.Process(agent.process.pid)
    ranks = [child for child in launcher.children(recursive=True) if "tracker" not in " ".join(child.cmdline())]
    (launcher if is_ahead else ranks[-1]).send_signal(signal.SIGTERM)
    end = agent.end(PATIENCE)
    assert end.code == STOPPED, end.err
    [done] = saved_steps(out)
    assert 2 <= done < steps
    assert f"stopped after {done} of {steps} steps: its checkpoint of step {done} is in" in end.err
    assert len(read_lines(out / "metrics.jsonl")) == done
    assert psutil.wait_procs(ranks, timeout=5.0)[1] == []
    assert start(tmp_path, out, steps, "--resume").end(PATIENCE).code == 0
    path = tmp_path / "job-2.yaml"
    path.write_text(path.read_text() + "evaluation: {every_steps: 5}\n")  # which changes nothing that is trained
    whole = start(tmp_path, tmp_path / "whole", steps).end(PATIENCE)
    assert whole.code == 0, whole.err
    assert [line["step"] for line in read_lines(tmp_path / "whole" / "evaluations.jsonl")] == [0, 5, 10, 12]
    assert set(saved_steps(tmp_path / "whole")) >= {10, 12}
    for one, other in zip(
        read_lines(out / "metrics.jsonl"), read_lines(tmp_path / "whole" / "metrics.jsonl"), strict=True
    ):
        assert {k: v for k, v in one.items() if k not in OF_TIME} == {
            k: v for k, v in other.items() if k not in OF_TIME
        }
