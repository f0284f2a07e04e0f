"""A run that ends anywhere can be completed: its summary, its last evaluation and its trace come by a resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.profiles.errors import RunFailed
from meshwright.profiles.trace import read_spans
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.records.kept_responses import last_samples
from meshwright.runtime.records.record import RunSummary
from tests.runtime.ranks import RankError, run_on_ranks
from tests.runtime.small_job import request, write_job

pytestmark = pytest.mark.slow


def until_the_last_checkpoint(asked: RunRequest) -> None:
    """A run that is killed between its last checkpoint and its end."""
    run = RankRun(asked)
    run.recorder.open(run.steps.start)
    run.evaluate(0)
    for turn in run.periods:
        run.run_period(turn)
        run.after_period(turn + 1)
    run.wait_for_checkpoint(asked.steps)
    raise RunFailed("cut off")


def test_a_run_that_was_cut_off_behind_its_last_checkpoint_is_completed_by_a_resume(tmp_path: Path) -> None:
    asked = request(write_job(tmp_path, num_ranks=1), tmp_path / "run", steps=2)
    asked = replace(asked, sample_every=1, export_every=2)
    asked.out.mkdir()
    with pytest.raises(RankError, match="cut off"):
        run_on_ranks(1, until_the_last_checkpoint, asked)
    assert not (asked.out / "summary.json").exists()
    summary = run_plan(replace(asked, resume=True))
    assert isinstance(summary, RunSummary)
    assert [one.step for one in summary.evaluations] == [0, 2]
    assert json.loads((asked.out / "summary.json").read_text())["steps"] == 2
    assert (asked.out / "trace.chrome.json").exists()
    spans = read_spans(asked.out / "trace.jsonl")
    assert {span.step for span in spans if span.kind == "stage"} == {0, 1}
    assert [span.step for span in spans if span.kind == "evaluate"] == [0, 2]
    assert {one.step for one in last_samples(asked.out, 99)} == {0, 1}
    assert (asked.out / "models" / "step-000002" / "actor").is_dir()
