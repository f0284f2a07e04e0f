"""A run that is asked to stop saves a checkpoint between two steps, and goes on from it as if it had not been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from benchmarks.hosts import BIN, LOOPBACK, Agent
from meshwright.planner.plan.plan import write_plan
from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import STOPPED
from meshwright.runtime.execution.resume import saved_steps
from meshwright.runtime.launch import interruption
from tests.runtime.execution.test_train import read_lines
from tests.runtime.laws.test_ahead import DISJOINT, working_ahead
from tests.runtime.small_job import OF_TIME, request, write_job
from tests.seeds import cases

PATIENCE = 600.0
ASKING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AHEAD = {"overcommit": 8, "generation_slots": 16}


def start(directory: Path, out: Path, steps: int, *options: object) -> Agent:
    files = [directory / "plan.json", directory / "job-2.yaml"]
    return LOOPBACK[0].start([BIN / "meshwright", "run", *files, "--steps", steps, "--out", out, *options])


def wait_for_steps(agent: Agent, out: Path, number: int) -> None:
    while not (out / "metrics.jsonl").exists() or len(read_lines(out / "metrics.jsonl")) < number:
        assert agent.process.poll() is None, agent.end(1).err
        time.sleep(0.1)


WAITS = """
import sys, time
from meshwright.runtime.launch import interruption
interruption.listen()
sys.stdout.write("listening\\n"); sys.stdout.flush()
while not interruption.stop_requested(): time.sleep(0.01)
sys.stdout.write("asked\\n"); sys.stdout.flush()
time.sleep(60)
"""


@pytest.mark.slow
@cases("first", ASKING, ids=lambda number: number.name, few=1)
def test_a_rank_is_asked_by_any_signal_and_ended_by_a_second_one_that_ends(first: signal.Signals) -> None:
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True, env=one_thread) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "listening\n"
        rank.send_signal(first)
        assert rank.stdout.readline() == "asked\n"
        time.sleep(1.2)
        rank.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        assert rank.poll() is None
        rank.send_signal(signal.SIGTERM)
        time.sleep(1.2)
        if first is signal.SIGUSR1:
            assert rank.poll() is None
            rank.send_signal(signal.SIGTERM)
        assert rank.wait(10) == 128 + signal.SIGTERM


def test_a_hang_up_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruption.forwarded_signals(tmp_path / "stop"):
            signal.raise_signal(signal.SIGHUP)
        assert not (tmp_path / "stop").exists()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("first", ASKING, ids=lambda number: number.name)
def test_the_launcher_marks_any_signal_and_ends_for_a_second_one_that_ends(
    first: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interruption, "_AGAIN_SECONDS", -1.0)
    mark = tmp_path / "stop"
    is_ending = first is not signal.SIGUSR1
    with pytest.raises(SignalException) if is_ending else nullcontext(), interruption.forwarded_signals(mark):
        signal.raise_signal(first)
    assert mark.exists() is not is_ending
    monkeypatch.setattr(interruption, "_AGAIN_SECONDS", 60.0)
    with interruption.forwarded_signals(mark):
        signal.raise_signal(first)
        signal.raise_signal(first)
    assert mark.exists()


@pytest.mark.check_all
@pytest.mark.parametrize(
    "is_ahead",
    [False, True],
    ids=["synchronous, all processes are told by SIGHUP", "two ahead, the launcher is told by SIGUSR1"],
)
def test_a_run_that_is_told_to_end_saves_and_goes_on_bit_for_bit(tmp_path: Path, is_ahead: bool) -> None:
    asked = request(write_job(tmp_path, num_ranks=2), tmp_path / "run", *(DISJOINT if is_ahead else ()))
    if is_ahead:
        asked = working_ahead(asked, steps_ahead_patterns(PPO_GRAPH, 2)[2], 3, **AHEAD)
        solver = asked.plan.solver
        solver = solver.model_copy(update={"bound_seconds": solver.objective_seconds, "gap": 0.0, "status": "feasible"})
        asked = replace(asked, plan=asked.plan.model_copy(update={"solver": solver}))
        path = tmp_path / "job-2.yaml"
        path.write_text(path.read_text() + "staleness: 3\n")
    write_plan(tmp_path / "plan.json", asked.plan)
    out, steps = tmp_path / "run", 12
    agent = start(tmp_path, out, steps)
    wait_for_steps(agent, out, 2)
    launcher = psutil.Process(agent.process.pid)
    ranks = [child for child in launcher.children(recursive=True) if "tracker" not in " ".join(child.cmdline())]
    for process in [launcher] if is_ahead else [launcher, *launcher.children(recursive=True)]:
        process.send_signal(signal.SIGUSR1 if is_ahead else signal.SIGHUP)
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
