"""A run whose checkpoint is none of it, or cannot be written, ends in one sentence."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.hosts import BIN
from meshwright.planner.plan.plan import write_plan
from meshwright.profiles.errors import BadInput, MeshwrightError
from meshwright.runtime.execution.train import run_plan
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.execution.test_train import read_lines
from tests.runtime.small_job import OF_TIME, VOCAB_SIZE, request, write_job


def said(error: pytest.ExceptionInfo[MeshwrightError]) -> str:
    sentence = str(error.value)
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    return sentence


@pytest.mark.slow
def test_a_checkpoint_that_was_cut_or_is_foreign_is_refused_in_one_sentence(tmp_path: Path) -> None:
    asked = request(write_job(tmp_path, num_ranks=1), tmp_path / "out", steps=1)
    run_plan(asked)
    (checkpoint,) = (asked.out / "checkpoints").iterdir()
    again = replace(asked, steps=2, resume=True)
    for name in (next(checkpoint.glob("*.distcp")).name, "common.pt"):
        path = checkpoint / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(BadInput) as error:
            run_plan(again)
        assert f"damaged and was put aside as step-000001.damaged: {path} has {len(whole) // 2} bytes" in said(error)
        assert "no other checkpoint is left" in said(error)
        checkpoint.with_name("step-000001.damaged").rename(checkpoint)
        path.write_bytes(whole)
    shutil.rmtree(tmp_path / "actor")
    write_checkpoint(tmp_path / "actor", "Qwen2", vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2)
    (tmp_path / "actor" / "generation_config.json").write_text('{"eos_token_id": 1}')
    other = request(tmp_path / "job-1.yaml", asked.out, steps=2, resume=True)
    with pytest.raises(BadInput) as error:
        run_plan(other)
    assert f"checkpoint {checkpoint} cannot be read" in said(error)


@pytest.mark.check_all
def test_where_the_newest_checkpoint_is_damaged_the_one_before_is_used(tmp_path: Path) -> None:
    asked = request(write_job(tmp_path, num_ranks=2), tmp_path / "whole", "actor_train.layout=dp2", steps=3)
    run_plan(asked)
    parts = replace(asked, out=tmp_path / "parts", steps=2, checkpoint_every=1)
    run_plan(parts)
    newest = parts.out / "checkpoints" / "step-000002"
    path = max(newest.glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    write_plan(tmp_path / "plan.json", asked.plan)
    command = [BIN / "meshwright", "run", tmp_path / "plan.json", tmp_path / "job-2.yaml", "--resume", "--steps", "3"]
    ended = subprocess.run([*command, "--out", parts.out], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    told = f"checkpoint step-000002 is damaged and was put aside as step-000002.damaged: {path} is not what"
    assert told in ended.stdout
    assert (parts.out / "checkpoints" / "step-000002.damaged").is_dir()
    for one, other in zip(
        read_lines(asked.out / "metrics.jsonl"), read_lines(parts.out / "metrics.jsonl"), strict=True
    ):
        assert {k: v for k, v in one.items() if k not in OF_TIME} == {
            k: v for k, v in other.items() if k not in OF_TIME
        }


@pytest.mark.check_all
def test_a_run_that_cannot_write_any_more_says_so_in_one_sentence(tmp_path: Path) -> None:
    """A process that may write files of so many bytes fares as on a disk that is full."""
    asked = request(write_job(tmp_path, num_ranks=1), tmp_path / "out", steps=1)
    write_plan(tmp_path / "plan.json", asked.plan)
    command = [BIN / "meshwright", "run", tmp_path / "plan.json", tmp_path / "job-1.yaml", "--steps", 1]
    limited = ["prlimit", f"--fsize={100_000}", *map(str, command), "--out", str(asked.out)]
    ended = subprocess.run(limited, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 4, ended.stderr
    assert "Traceback" not in ended.stderr
    (sentence,) = ended.stderr.strip().splitlines()
    assert "cannot be written" in sentence
    assert not list((asked.out / "checkpoints").glob("step-000001"))
