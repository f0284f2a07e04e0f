"""Runs that are evaluated on several sets of held-out prompts, each with its rewards, length limit and interval."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from tests.runtime.rewarded import lines, rewarded, write_rewarded
from tests.runtime.small_job import OF_TIME

THIRD = {"name": "third", "function": "tests.runtime.rewarding:third_word"}
SHORT = {"name": "short", "function": "tests.runtime.rewarding:is_short", "workers": 1}
SETS = {
    "short_ones": {"prompts": "held_out.jsonl", "rewards": [SHORT], "max_response": 5, "every_steps": 1},
    "ends": {"prompts": "held_out.jsonl", "every_steps": 0},
}


def asked_with(directory: Path, sets: dict[str, Any], *, steps: int) -> RunRequest:
    job = write_rewarded(directory, THIRD, evaluation={"every_steps": 2, "sets": sets})
    return rewarded(job, directory / "run", "actor_generate.pool=0:2", steps=steps)


def evaluated(out: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """The evaluations by set and step."""
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in (out / "evaluations.jsonl").read_text().splitlines():
        one = json.loads(line)
        assert one["step"] not in found[one["prompt_set"]]
        found[one["prompt_set"]][one["step"]] = one
    return found


def learned(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run, except those of its speed."""
    timed = {*OF_TIME, "reward_third_seconds"}
    return [{key: value for key, value in line.items() if key not in timed} for line in lines(out)]


@pytest.mark.slow
def test_a_set_has_its_own_rewards_lengths_and_interval_and_changes_no_other_result(tmp_path: Path) -> None:
    asked = asked_with(tmp_path / "several", SETS, steps=3)
    plain = asked_with(tmp_path / "plain", {}, steps=3)
    summary = run_plan(asked)
    run_plan(plain)
    found = evaluated(asked.out)
    assert {name: [*of_set] for name, of_set in found.items()} == {
        "held_out": [0, 2, 3],
        "short_ones": [0, 1, 2, 3],
        "ends": [0, 3],
    }
    # A response of at most five tokens is short. The job's reward is another, and its responses have up to 24.
    assert {score for one in found["short_ones"].values() for score in one["scores"]} == {1.0}
    assert max(one["mean_response_tokens"] for one in found["short_ones"].values()) <= 5
    assert found["ends"][0]["mean_response_tokens"] > 5
    assert set(found["ends"][0]["scores"]) != {1.0}
    assert learned(asked.out) == learned(plain.out)
    assert found["held_out"] == evaluated(plain.out)["held_out"]
    assert summary is not None
    assert summary.evaluated_sets == ("held_out", "ends", "short_ones")  # the job is written with its keys in order
    assert summary.improvement("short_ones") == (0.0, 0.0)


@pytest.mark.check_all
def test_a_resumed_run_has_the_evaluations_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    asked = replace(asked_with(tmp_path, SETS, steps=4), checkpoint_every=2)
    run_plan(asked)
    part = replace(asked, out=tmp_path / "part")
    run_plan(part)
    shutil.rmtree(part.out / "checkpoints" / "step-000004")
    for step in (1, 3):
        shutil.rmtree(part.out / "checkpoints" / f"step-{step:06d}", ignore_errors=True)
    run_plan(replace(part, resume=True))
    assert evaluated(part.out) == evaluated(asked.out)
