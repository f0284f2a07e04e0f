"""A step with numbers that are not finite is kept whole, and too many in a row end a run in one sentence."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.planner.job.algorithm_settings import PPO, LearningSettings
from meshwright.planner.job.job import DEFAULT_SETTINGS
from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.training.bad_steps import (
    _MAX_FILES,
    SKIPPED,
    BadSteps,
    SkippedBatch,
    finite_metrics,
    non_finite_fields,
    non_finite_metric,
    read_skipped,
    write_skipped,
)

SETTINGS = PPO(kl_coefficient=0.125, stop=("a", "b"))


def batch(step: int = 4) -> StepExperience:
    found = StepExperience(step=step, rows=range(3))
    for row in found.rows:
        found.experience.put("tokens", row, torch.arange(5 + row))
        found.experience.put("scores", row, torch.tensor([0.5 * row]))
        found.experience.put("values", row, torch.full((5 + row,), 0.25))
    return found


def skipped(*reasons: str, step: int = 4, settings: LearningSettings = SETTINGS) -> SkippedBatch:
    return SkippedBatch(
        stage="actor_train",
        batch=batch(step),
        reasons=reasons,
        settings=settings,
        num_epochs=2,
        num_minibatches=4,
        importance_sampling=True,
    )


@pytest.mark.parametrize("settings", [SETTINGS, *DEFAULT_SETTINGS.values()])
def test_a_batch_is_read_as_it_was_kept(tmp_path: Path, settings: LearningSettings) -> None:
    kept = skipped("scores of rows 1 are not finite", "policy_loss of update 3 is nan", settings=settings)
    kept.batch.experience.put("scores", 1, torch.tensor([math.nan]))
    path = write_skipped(tmp_path, kept)
    assert path == tmp_path / SKIPPED / "step-000004-actor_train.safetensors"
    found = read_skipped(path)
    assert replace(found, batch=kept.batch) == kept
    assert (found.batch.step, found.batch.rows) == (4, range(3))
    before, after = kept.batch.experience.fields(), found.batch.experience.fields()
    assert before.keys() == after.keys()
    for field, rows in before.items():
        for row, values in rows.items():
            torch.testing.assert_close(after[field][row], values, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\x08\0\0\0\0\0\0\0{}      "], ids=["empty", "text", "bare"])
def test_any_other_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(BadInput, match="is not a skipped batch of a run"):
        read_skipped(path)
    for wrong in (tmp_path / "none", tmp_path):
        with pytest.raises(BadInput, match=r"does not exist|is a directory"):
            read_skipped(wrong)


def test_files_of_long_runs_are_few_and_the_newest(tmp_path: Path) -> None:
    for step in range(_MAX_FILES + 3):
        write_skipped(tmp_path, skipped("bad", step=step))
    found = sorted(path.name[:11] for path in (tmp_path / SKIPPED).iterdir())
    assert found == [f"step-{step:06d}" for step in range(3, _MAX_FILES + 3)]


def test_a_pipe_is_no_batch(tmp_path: Path) -> None:
    """And is not waited for."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="it is a device or a pipe; name a file"):
        read_skipped(tmp_path / "pipe")


def test_bad_steps_end_a_run_only_in_a_row_and_on_every_rank(tmp_path: Path) -> None:
    ranks = [BadSteps(tmp_path, limit=2, is_writer=is_writer) for is_writer in (True, False)]
    for rank in ranks:
        for found in (skipped("bad"), skipped(), skipped("bad"), skipped()):
            rank.record(found)
        rank.record(skipped("bad"))
        said = r"^actor_train skipped updates in 2 steps in a row, the last in step 9: it is nan; .* max_bad_steps$"
        with pytest.raises(RunFailed, match=said):
            rank.record(skipped("it is nan", step=9))
    assert len(list((tmp_path / SKIPPED).iterdir())) == 2


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    assert non_finite_fields(batch()) == []
    bad = batch()
    bad.experience.put("values", 2, torch.tensor([0.0, math.inf]))
    bad.experience.put("scores", 0, torch.tensor([math.nan]))
    assert non_finite_fields(bad) == ["scores of rows 0 are not finite", "values of rows 2 are not finite"]
    assert non_finite_metric({"loss": 1.0}, 0) is None
    assert non_finite_metric({"loss": 1.0, "grad_norm": math.inf}, 3) == "grad_norm of update 3 is inf"
    assert finite_metrics({"loss": 1.0, "score": math.nan}) == {"loss": 1.0}
