"""A run that is stopped in the middle goes on with what it had under way, to the same losses bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.plan.steps_ahead import StepsAhead, patterns
from meshwright.profiles.errors import RunFailed
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.execution.train import run_plan
from tests.runtime.execution.test_train import read_lines, run_steps
from tests.runtime.laws.test_ahead import DISJOINT, working_ahead
from tests.runtime.ranks import RankError, run_on_ranks
from tests.runtime.small_job import OF_TIME, request, write_job

pytestmark = pytest.mark.slow

STEPS, STOPPED_AFTER = 6, 3


def until_stopped(asked: RunRequest) -> None:
    """A run that is cut off behind a checkpoint."""
    run = RankRun(asked)
    run.recorder.open(run.steps.start)
    for turn in range(run.turns.start, STOPPED_AFTER):
        run.turn(turn)
    run.save(STOPPED_AFTER)
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


@pytest.mark.parametrize(
    ("num_ranks", "ahead", "staleness", "generation"),
    [
        (1, patterns(0)[0], 1, {"batches_in_flight": 2, "generation_slots": 8}),
        (2, patterns(2)[2], 3, {"overcommit": 8, "generation_slots": 16}),
    ],
    ids=["two batches in flight", "two ahead, overcommit, two pools"],
)
def test_a_run_that_was_stopped_loses_nothing_that_was_under_way(
    tmp_path: Path, num_ranks: int, ahead: StepsAhead, staleness: int, generation: dict[str, int]
) -> None:
    pins = DISJOINT if num_ranks == 2 else ()
    asked = request(write_job(tmp_path, num_ranks=num_ranks), tmp_path / "whole", *pins, steps=STEPS)
    for line in resumed(working_ahead(asked, ahead, staleness, **generation)):
        for name, (one, other) in line.items():
            assert name in OF_TIME or one == other, name
