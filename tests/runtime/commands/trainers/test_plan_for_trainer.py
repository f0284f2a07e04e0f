"""plan --for: a plan that the trainer can say and that keeps pins, and no other option that says how to search."""

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
    [("--top", "2"), ("--proof", "proof.json"), ("--from", "plan.json")],
)
def test_the_trainer_alone_says_what_is_searched(
    call: Call, job: Path, tmp_path: Path, option: tuple[str, str]
) -> None:
    outcome = call("plan", job, "--for", "verl", *option, "-o", tmp_path / "plan.json")
    assert outcome.code == 2
    assert f"{option[0]} with --for verl" in outcome.err


def test_pins_are_kept_as_well(call: Call, job: Path, tmp_path: Path) -> None:
    path, pins = tmp_path / "plan.json", tmp_path / "pins.txt"
    pins.write_text("actor_train.micro_batch_size=2\n")
    asked = ("--pin", "actor_generate.tp=1", "--pins", pins, "--forbid", "critic_train.recompute=full")
    assert call("plan", job, "--for", "verl", "--gap", 0.5, *asked, "-o", path).code == 0
    plan = read_plan(path)
    assert plan.placement("actor_generate").layout.tp == 1
    assert plan.placement("actor_train").schedule.micro_batch_size == 2
    assert plan.placement("critic_train").schedule.recompute != "full"
    assert any(not list(way.broken(plan)) for way in TRAINERS["verl"].ways(plan.facts))


def test_a_pin_that_is_not_legal_is_refused(call: Call, job: Path, tmp_path: Path) -> None:
    asked = ("--pin", "reward_score.chunk_tokens=8")
    outcome = call("plan", job, "--for", "verl", "--gap", 0.5, *asked, "-o", tmp_path / "plan.json")
    assert outcome.code == 2
    assert "'reward_score.chunk_tokens=8': no legal choice has it" in outcome.err


def test_a_job_that_it_cannot_hold_ends_with_the_code_of_no_plan(call: Call, job: Path, tmp_path: Path) -> None:
    small = edited_job(job, "cluster", device=TINY)
    outcome = call("plan", small, "--for", "openrlhf", "-o", tmp_path / "plan.json", "--json")
    assert outcome.code == 3
    assert "no plan that openrlhf" in json.loads(outcome.out)["limits"][0]["sentence"]
