"""Where a run stands on disk: whole checkpoints count, the last and the best stay, and all ranks see one directory."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.profiles.errors import BadInput
from meshwright.runtime.execution.resume import (
    _steps_to_remove,
    best_step,
    latest_checkpoint,
    latest_step,
    require_shared,
    saved_steps,
)
from meshwright.runtime.records.record import EvaluationRecord, evaluations
from meshwright.runtime.records.version_gap import Gap
from meshwright.runtime.training.checkpoint_integrity import MANIFEST
from tests.runtime.ranks import run_on_ranks


def save(out: Path, *steps: int) -> Path:
    """Checkpoints as far as their names and the file that is written last."""
    for step in steps:
        directory = out / "checkpoints" / f"step-{step:06d}"
        directory.mkdir(parents=True)
        (directory / MANIFEST).touch()
    return out


def evaluate(out: Path, **scores: float) -> None:
    found = [EvaluationRecord.of(int(step[1:]), {0: score}, {0: 1}, Gap()) for step, score in scores.items()]
    (out / "evaluations.jsonl").write_text("".join(json.dumps(asdict(one)) + "\n" for one in found))


def test_a_run_without_checkpoints_stands_nowhere(tmp_path: Path) -> None:
    assert saved_steps(tmp_path) == []
    assert latest_step(tmp_path) is None
    assert latest_checkpoint(tmp_path) is None
    assert best_step(saved_steps(tmp_path), evaluations(tmp_path), {}) is None


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    out = save(tmp_path, 2, 10, 1_000_000)
    (out / "checkpoints" / "step-000011").mkdir()  # cut short
    save(out / "aside", 12)
    (out / "aside" / "checkpoints" / "step-000012").rename(out / "checkpoints" / "step-000012.partial")
    assert saved_steps(out) == [2, 10, 1_000_000]
    assert latest_step(out) == 1_000_000
    assert latest_checkpoint(out) == out / "checkpoints" / "step-1000000"


def test_the_best_is_the_earliest_of_those_that_scored_most_and_were_saved(tmp_path: Path) -> None:
    out = save(tmp_path, 2, 4, 6)
    evaluate(out, s0=9.0, s2=0.5, s4=2.0, s6=2.0)
    assert best_step(saved_steps(out), evaluations(out), {"held_out": ""}) == 4


def test_the_best_is_by_a_set_that_the_job_still_has(tmp_path: Path) -> None:
    """It used to be by the first set that was ever evaluated, and stayed after that set was removed or changed."""
    scores = {"held_out": {2: 9.0, 4: 1.0}, "hard": {4: 0.1, 6: 0.2, 8: 0.1}}
    records = [
        EvaluationRecord.of(step, {0: score}, {0: 1}, Gap(), prompt_set=name)
        for name, by_step in scores.items()
        for step, score in by_step.items()
    ]
    records.append(EvaluationRecord.of(8, {0: 0.5}, {0: 1}, Gap(), prompt_set="changed"))
    saved = (2, 4, 6, 8)
    assert best_step(saved, records, {"held_out": "", "hard": ""}) == 2
    assert best_step(saved, records, {"hard": ""}) == 6
    assert best_step(saved, records, {"changed": "other prompts"}) is None
    assert best_step(saved, records, {}) == 2


@pytest.mark.parametrize(
    ("best", "keep", "gone"), [(None, 2, [1, 3]), (1, 2, [3]), (8, 2, [1, 3]), (3, 1, [1, 5]), (None, 9, [])]
)
def test_the_last_few_and_the_best_stay(best: int | None, keep: int, gone: list[int]) -> None:
    assert _steps_to_remove([5, 1, 8, 3], best, keep) == gone


def _looked(directories: list[Path]) -> str:
    """What this rank is told of a directory that may not be the others'."""
    try:
        require_shared(directories[dist.get_rank()])
    except BadInput as error:
        return str(error)
    return ""


def test_a_directory_that_some_ranks_do_not_see_is_refused_on_every_rank(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    assert run_on_ranks(2, _looked, [one, one]) == ["", ""]
    said = run_on_ranks(2, _looked, [one, other])
    assert all("is not the same directory on ranks 1; name one on a shared file system." in each for each in said)
    assert not list(one.iterdir())
