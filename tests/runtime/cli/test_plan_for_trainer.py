"""plan --for: plans that the trainer can say and that keep pins, the best few or from another one, with a proof."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.planner.plan.plan import read_plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.proof.document import read_proof
from meshwright.planner.trainers.registry import TRAINERS
from tests.runtime.command import Call
from tests.runtime.small_job import TINY, edited_job


@pytest.mark.parametrize("name", ["verl", "slime"])
def test_the_plan_is_one_that_the_trainer_can_say(call: Call, job: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "plan.json"
    outcome = call("plan", job, "--for", name, "--gap", 0.5, "-o", path)
    assert outcome.code == 0
    plan = read_plan(path)
    assert any(not list(way.inexpressible(plan)) for way in TRAINERS[name].modes(plan.facts))
    assert "job" in plan.digests


def test_the_best_few_differ_and_the_trainer_can_say_each_of_them(call: Call, job: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    pin = ("--pin", "actor_train.micro_batch_size=2")
    outcome = call("plan", job, "--for", "verl", "--gap", 0.5, "--top", 3, *pin, "-o", path, "--json")
    assert outcome.code == 0
    plans = [read_plan(Path(row["path"])) for row in json.loads(outcome.out)]
    assert len({tuple(placement.layout for placement in plan.placements) for plan in plans}) == 3
    assert len({plan.solver.bound_seconds for plan in plans}) == 1
    for plan in plans:
        assert any(not list(way.inexpressible(plan)) for way in TRAINERS["verl"].modes(plan.facts))
        assert plan.placement("actor_train").schedule.micro_batch_size == 2
        assert verify(plan) == ()


def test_a_search_starts_from_a_plan_that_the_trainer_can_say(call: Call, job: Path, tmp_path: Path) -> None:
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    assert call("plan", job, "--for", "verl", "--gap", 0.2, "-o", first).code == 0
    longer = edited_job(job, "workload", batch_size=32)
    assert call("plan", longer, "--for", "verl", "--gap", 0.2, "--from", first, "-o", again).code == 0
    found = read_plan(again)
    assert "start" in found.digests
    assert verify(found) == ()
    assert any(not list(way.inexpressible(found)) for way in TRAINERS["verl"].modes(found.facts))
    anew = call("plan", longer, "--for", "slime", "--gap", 0.5, "--from", first, "-o", again)
    assert "slime, does not allow the placements" in anew.err
    assert "start" not in read_plan(again).digests


@pytest.mark.check_all
def test_a_proof_of_all_plans_is_one_of_what_the_trainer_can_say(call: Call, job: Path, tmp_path: Path) -> None:
    path, proof = tmp_path / "plan.json", tmp_path / "proof.json"
    assert call("plan", job, "--for", "openrlhf", "--gap", 0.5, "--proof", proof, "-o", path).code == 0
    assert read_proof(proof).bound_seconds <= read_plan(path).period_seconds
    assert call("verify", path, "--proof", proof).code == 0


def test_pins_are_kept_as_well(call: Call, job: Path, tmp_path: Path) -> None:
    path, pins = tmp_path / "plan.json", tmp_path / "pins.txt"
    pins.write_text("actor_train.micro_batch_size=2\n")
    asked = ("--pin", "actor_generate.tp=1", "--pins", pins, "--forbid", "critic_train.recompute=full")
    assert call("plan", job, "--for", "verl", "--gap", 0.5, *asked, "-o", path).code == 0
    plan = read_plan(path)
    assert plan.placement("actor_generate").layout.tp == 1
    assert plan.placement("actor_train").schedule.micro_batch_size == 2
    assert plan.placement("critic_train").schedule.recompute != "full"
    assert any(not list(way.inexpressible(plan)) for way in TRAINERS["verl"].modes(plan.facts))


def test_a_pin_that_is_not_legal_is_refused(call: Call, job: Path, tmp_path: Path) -> None:
    asked = ("--pin", "reward_score.chunk_tokens=8")
    outcome = call("plan", job, "--for", "verl", "--gap", 0.5, *asked, "-o", tmp_path / "plan.json")
    assert outcome.code == 2
    assert "'reward_score.chunk_tokens=8': no legal choice has this value" in outcome.err


def test_a_job_that_it_cannot_hold_ends_with_the_code_of_no_plan(call: Call, job: Path, tmp_path: Path) -> None:
    small = edited_job(job, "cluster", device=TINY)
    outcome = call("plan", small, "--for", "openrlhf", "-o", tmp_path / "plan.json", "--json")
    assert outcome.code == 3
    assert "no plan that openrlhf" in json.loads(outcome.out)["limits"][0]["sentence"]
