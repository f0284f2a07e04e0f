"""A rank of a run: what is done between turns, and that a run which was stopped goes on as if it had not been."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.plan.steps_ahead import StepsAhead, steps_ahead_patterns
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import RunFailed
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.resume import saved_steps
from meshwright.runtime.execution.run import RankRun, _is_due
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.training import checkpoint
from tests.runtime.execution.test_train import read_lines, run_steps
from tests.runtime.laws.test_ahead import DISJOINT, working_ahead
from tests.runtime.ranks import RankError, run_on_ranks
from tests.runtime.small_job import OF_TIME, request, write_job
from tests.seeds import cases

STEPS, STOPPED_AFTER = 6, 3


def test_what_comes_every_few_steps_is_due_behind_each_of_them_and_never_where_it_is_none() -> None:
    assert [done for done in range(1, 10) if _is_due(done, 3)] == [3, 6, 9]
    assert not any(_is_due(done, 0) for done in range(10))


def until_stopped(asked: RunRequest) -> None:
    """A run that is cut off behind a checkpoint."""
    run = RankRun(asked)
    run.recorder.open(run.steps.start)
    for turn in range(run.periods.start, STOPPED_AFTER):
        run.run_period(turn)
    run.save(STOPPED_AFTER)
    run.wait_for_checkpoint(STOPPED_AFTER)
    raise RunFailed("cut off")


def resumed(asked: RunRequest) -> list[dict[str, Any]]:
    """The metrics of the steps after the stop, of a run that was never stopped and of one that was."""
    _, lines = run_steps(asked)
    parts = replace(asked, out=asked.out.with_name(f"{asked.out.name}-parts"))
    parts.out.mkdir()
    with pytest.raises(RankError, match="cut off"):
        run_on_ranks(asked.plan.facts.cluster.num_ranks, until_stopped, parts)
    run_plan(replace(parts, resume=True))
    whole, found = lines[STOPPED_AFTER:], read_lines(parts.out / "metrics.jsonl")[STOPPED_AFTER:]
    assert [line["step"] for line in found] == list(range(STOPPED_AFTER, STEPS))
    return [{name: (line[name], other[name]) for name in line} for line, other in zip(whole, found, strict=True)]


@pytest.mark.slow
@cases(
    ("num_ranks", "ahead", "staleness", "generation"),
    [
        (1, steps_ahead_patterns(PPO_GRAPH, 0)[0], 1, {"batches_in_flight": 2, "generation_slots": 8}),
        (2, steps_ahead_patterns(PPO_GRAPH, 2)[2], 3, {"overcommit": 8, "generation_slots": 16}),
    ],
    ids=["two batches in flight", "two ahead, overcommit, two pools"],
    few=1,
)
def test_a_run_that_was_stopped_loses_nothing_that_was_under_way(
    tmp_path: Path, num_ranks: int, ahead: StepsAhead, staleness: int, generation: dict[str, int]
) -> None:
    pins = DISJOINT if num_ranks == 2 else ()
    asked = request(write_job(tmp_path, num_ranks=num_ranks), tmp_path / "whole", *pins, steps=STEPS)
    for line in resumed(working_ahead(asked, ahead, staleness, **generation)):
        for name, (one, other) in line.items():
            assert name in OF_TIME or one == other, name


@pytest.mark.slow
def test_checkpoints_come_by_time_and_the_last_few_and_the_best_stay(tmp_path: Path) -> None:
    asked = request(write_job(tmp_path, num_ranks=2), tmp_path / "run", "actor_train.layout=dp2", steps=5)
    run_plan(replace(asked, checkpoint_minutes=1e-6, keep=3))
    assert saved_steps(tmp_path / "run") == [3, 4, 5]


def saved_behind_turns(asked: RunRequest) -> list[list[int]]:
    """The checkpoints on the disk behind each of two turns, the first of which begins one that takes a second."""
    run, write = RankRun(asked), checkpoint._write

    def slowly(*arguments: Any) -> None:
        time.sleep(1.0)
        write(*arguments)

    run.recorder.open(0)
    found = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint, "_write", slowly)
        for turn in range(2):
            run.run_period(turn)
            found.append(saved_steps(asked.out))
            if turn == 0:
                run.save(1)
    run.finish()
    run.close()
    return found


@pytest.mark.slow
def test_a_step_is_done_when_the_checkpoint_before_it_is_on_the_disk(tmp_path: Path) -> None:
    """So a failure loses no more steps than lie between two checkpoints."""
    asked = request(write_job(tmp_path, num_ranks=1), tmp_path / "run", steps=2)
    asked.out.mkdir()
    assert run_on_ranks(1, saved_behind_turns, asked) == [[[], [1]]]
