"""A batch that a run has skipped is trained on again as the run did, and the rows that are to blame are named."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.profiles.errors import BadInput
from meshwright.runtime.execution.replay import replay_batch
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.training.bad_steps import SKIPPED
from tests.runtime.command import Call
from tests.runtime.execution.test_train import read_lines
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import request, write_job

pytestmark = pytest.mark.slow


def _with_a_bad_value(asked: RunRequest) -> None:
    """Two steps; in the second the value of one token is no number, in the experience that is kept alone."""
    run = RankRun(asked)
    run.recorder.open(0)
    run.run_period(0)
    run.save(1)
    after = run._stages._bad_steps["critic_train"].record

    def spoilt(found: object) -> None:
        after(replace(found, reasons=("planted",)))  # type: ignore[type-var]

    run._stages._bad_steps["critic_train"].record = spoilt  # type: ignore[method-assign, assignment]
    run.run_period(1)
    run.finish()
    run.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("job")
    asked = request(write_job(directory, num_ranks=1), directory / "run", steps=2)
    asked.out.mkdir()
    run_on_ranks(1, _with_a_bad_value, asked)
    return asked.out


def kept(run: Path) -> Path:
    return run / SKIPPED / "step-000001-critic_train.safetensors"


def test_a_batch_without_a_bad_number_is_trained_on_as_in_the_run(run: Path) -> None:
    found = replay_batch(kept(run))
    assert (found.stage, found.step, found.weights_of_step, found.reasons) == ("critic_train", 1, 1, ("planted",))
    assert sorted(row for update in found.updates for row in update.rows) == list(range(16))
    assert all(update.bad_rows == () for update in found.updates)
    line = read_lines(run / "metrics.jsonl")[1]
    losses = [update.metrics["value_loss"] for update in found.updates]
    assert sum(losses) / len(losses) == pytest.approx(line["value_loss"], rel=1e-4)


def test_the_row_that_is_to_blame_is_named_by_the_command(run: Path, tmp_path: Path, call: Call) -> None:
    from safetensors import safe_open  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    other = tmp_path / "run"
    shutil.copytree(run, other)
    with safe_open(kept(run), framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    rows, lengths = tensors["values.rows"].tolist()
    tensors["values"][sum(lengths[: rows.index(5)]) : sum(lengths[: rows.index(5)]) + lengths[rows.index(5)]] = (
        torch.inf
    )
    save_file(tensors, kept(other), metadata)
    outcome = call("replay", kept(other), "--json")
    assert outcome.code == 0, outcome.err
    answer = json.loads(outcome.out)
    assert all(5 in update["bad_rows"] for update in answer["updates"] if 5 in update["rows"])
    assert any(not math.isfinite(float(update["metrics"]["value_loss"])) for update in answer["updates"])
    told = call("replay", kept(other)).out
    assert told.startswith("critic_train of step 1, with the weights after 1 steps\nskipped: planted\nupdate 0: loss ")
    assert "not finite alone: rows " in told


def test_what_is_no_batch_of_a_run_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a skipped batch of a run"):
        replay_batch(run / "plan.json")
    (tmp_path / SKIPPED).mkdir()
    alone = shutil.copy(kept(run), tmp_path / SKIPPED)
    with pytest.raises(BadInput, match=r"plan\.json does not exist"):
        replay_batch(Path(alone))
