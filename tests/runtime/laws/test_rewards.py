"""Rewards on hosts train as reward models do, are waited for little, and lose nothing when a judge goes away."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.program.durations import Planned
from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.runtime.execution.rehearse import rehearse
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.records.record import RunSummary
from tests.runtime.environment.servers import Judged, judge
from tests.runtime.rewarded import lines, rewarded, stopped_and_resumed, write_rewarded
from tests.seeds import cases

THIRD = {"name": "third", "function": "tests.runtime.rewarding:third_word"}
APART = ("actor_generate.pool=0:1", "actor_train.pool=1:1")


def ran(path: Path, out: Path, *pins: str, steps: int) -> RunSummary:
    found = run_plan(rewarded(path, out, *pins, steps=steps))
    assert isinstance(found, RunSummary)
    return found


@pytest.mark.slow
@cases("algorithm", ["grpo", "rloo", "ppo"], few=1)
def test_a_verifiable_reward_rises_without_a_reward_model(algorithm: str, tmp_path: Path) -> None:
    path = write_rewarded(tmp_path, THIRD, algorithm=algorithm)
    rise, error = ran(path, tmp_path / "run", steps=12).improvement() or (0.0, 1.0)
    assert rise > 3 * error


@pytest.mark.slow
@cases("staleness", [1, 0, 2], few=1)
def test_scores_are_the_weighted_sum_wherever_ranks_are_and_however_far_they_work_ahead(
    staleness: int, tmp_path: Path
) -> None:
    exact = {"name": "exact", "function": "exact_match", "weight": 2.0}
    path = write_rewarded(tmp_path, {**THIRD, "weight": 0.5}, exact, staleness=staleness)
    ran(path, tmp_path / "run", *(APART if staleness else ()), steps=3)
    for line in lines(tmp_path / "run"):
        assert line["score"] == pytest.approx(0.5 * line["reward_third"] + 2.0 * line["reward_exact"], abs=1e-6)


@pytest.mark.check_all
def test_where_scores_are_made_changes_nothing(tmp_path: Path) -> None:
    path = write_rewarded(tmp_path, THIRD)
    ran(path, tmp_path / "one", "actor_generate.pool=0:1", steps=2)
    ran(path, tmp_path / "two", "actor_generate.pool=0:2", steps=2)
    scores = [[line["score"] for line in lines(tmp_path / name)] for name in ("one", "two")]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)


@pytest.mark.slow
def test_a_run_that_is_resumed_ahead_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    path = write_rewarded(tmp_path, THIRD, staleness=1)
    one, other = stopped_and_resumed(rewarded(path, tmp_path / "whole", *APART, steps=4))
    for key in ("score", "actor_grad_norm", "reward_third"):
        assert [line[key] for line in one] == [line[key] for line in other]


def test_a_module_that_was_not_allowed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = write_rewarded(tmp_path, {"name": "mine", "function": "os.path:exists"})
    with pytest.raises(BadInput, match=r"give --allow-module os\.path if you trust it"):
        run_plan(rewarded(path, tmp_path / "run", steps=1))


@pytest.mark.slow
def test_an_exception_ends_the_run_with_the_sample_or_is_paid_what_the_job_says(tmp_path: Path) -> None:
    fussy = {"name": "fussy", "function": "tests.runtime.rewarding:no_seventh"}
    path = write_rewarded(tmp_path, fussy)
    with pytest.raises(RunFailed, match=r"reward fussy of sample (held out|0)/\d+: ValueError: w7 is not to be said"):
        run_plan(rewarded(path, tmp_path / "ends", steps=1))
    path = write_rewarded(tmp_path, {**fussy, "failure_score": 0.0})
    ran(path, tmp_path / "goes on", steps=1)
    assert 0 < lines(tmp_path / "goes on")[0]["reward_fussy"] < 1


def _serve(port: int, asked: Any) -> None:
    draw = random.Random(0)
    judged = Judged()
    with judge(judged, seconds=lambda: draw.uniform(0.0, 0.1), port=port):
        while True:
            asked.value = len(judged.asked)
            time.sleep(0.01)


@contextmanager
def served(port: int, asked: Any) -> Iterator[BaseProcess]:
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(port, asked), daemon=True)
    process.start()
    yield process
    if process.is_alive() and process.pid:
        os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.check_all
def test_a_judge_that_is_killed_and_started_again_loses_no_sample(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reward = {"name": "judge", "url": f"http://127.0.0.1:{port}/score", "workers": 4}
    path = write_rewarded(tmp_path, reward)
    context = multiprocessing.get_context("spawn")
    first, second = context.Value("i", 0), context.Value("i", 0)
    asked = rewarded(path, tmp_path / "run", steps=3)
    running = context.Process(target=run_plan, args=(asked,))
    with served(port, first) as one:
        running.start()
        while first.value < 50 and running.is_alive():
            time.sleep(0.01)
        assert one.pid is not None
        os.kill(one.pid, signal.SIGKILL)
        one.join()
    time.sleep(0.5)
    with served(port, second):
        running.join(120.0)
    assert running.exitcode == 0
    assert second.value > 0
    assert len(lines(tmp_path / "run")) == 3


@pytest.mark.check_all
def test_a_rehearsal_waits_for_rewards_as_long_as_the_plan_says(tmp_path: Path) -> None:
    slow = {**THIRD, "latency_seconds": {"fixed": 0.2}, "workers": 8}
    for staleness, pins in ((0, ()), (1, APART)):
        path = write_rewarded(tmp_path, slow, staleness=staleness)
        plan = rewarded(path, tmp_path / "run", *pins, steps=1).plan
        found = rehearse(plan, Planned(plan), steps=3)
        assert found.steps.mean == pytest.approx(plan.period_seconds, rel=0.25)
