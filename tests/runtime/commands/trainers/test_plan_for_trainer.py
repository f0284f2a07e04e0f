"""plan --for: a plan that the trainer can say, and no other option that says what to search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.planner.export.trainers import TRAINERS
from meshwright.planner.plan.plan import read_plan
from tests.runtime.command import Call
from tests.runtime.small_job import TINY, edited_job


@pytest.mark.parametrize("name", ["verl", "slime"])
def test_the_plan_is_one_that_the_trainer_can_say(call: Call, job: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "plan.json"
    outcome = call("plan", job, "--for", name, "--gap", 0.5, "-o", path)
    assert outcome.code == 0
    plan = read_plan(path)
    assert any(not list(way.broken(plan)) for way in TRAINERS[name].ways(plan.facts))
    assert "job" in plan.digests


@pytest.mark.parametrize(
    "option",
    [("--pin", "actor_train.pp=1"), ("--top", "2"), ("--proof", "proof.json"), ("--forbid", "actor_train.pp=1")],
)
def test_the_trainer_alone_says_what_is_searched(
    call: Call, job: Path, tmp_path: Path, option: tuple[str, str]
) -> None:
    outcome = call("plan", job, "--for", "verl", *option, "-o", tmp_path / "plan.json")
    assert outcome.code == 2
    assert f"{option[0]} with --for verl" in outcome.err


def test_a_job_that_it_cannot_hold_ends_with_the_code_of_no_plan(call: Call, job: Path, tmp_path: Path) -> None:
    small = edited_job(job, "cluster", device=TINY)
    outcome = call("plan", small, "--for", "openrlhf", "-o", tmp_path / "plan.json", "--json")
    assert outcome.code == 3
    assert "no plan that openrlhf" in json.loads(outcome.out)["limits"][0]["sentence"]
