"""The verify command: nothing is said of a plan that is right, and a sentence of each thing that is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.command import Call
from tests.runtime.measured import measured_table


def edited_plan(plan: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    document = json.loads(plan.read_text())
    edit(document)
    path = plan.with_name("edited.json")
    path.write_text(json.dumps(document))
    return path


def test_a_plan_edited_to_tp_3_is_told_the_stage_the_rule_and_the_nearest_value(call: Call, plan: Path) -> None:
    def edit(document: dict[str, Any]) -> None:
        placement = next(p for p in document["placements"] if p["stage"] == "actor_train")
        placement["layout"] = {"tp": 3, "pp": 1, "dp": 1, "sp": False}

    outcome = call("verify", edited_plan(plan, edit))
    assert outcome.code == 2
    assert outcome.err.splitlines() == ["actor_train: tp=3 does not divide the 4 attention heads of actor; use tp=2."]


def test_a_plan_of_another_schema_version_is_refused(call: Call, plan: Path) -> None:
    outcome = call("verify", edited_plan(plan, lambda document: document.update(schema_version=99)))
    assert outcome.code == 2
    assert "schema_version=99" in outcome.err


def test_nothing_is_said_of_a_plan_that_is_right_and_states_no_bound(call: Call, plan: Path) -> None:
    outcome = call("verify", plan)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


def test_a_bound_without_a_proof_is_said_to_be_unchecked(call: Call, plan: Path) -> None:
    """A bound that somebody made equal to the objective passed for a checked one."""

    def edit(document: dict[str, Any]) -> None:
        document["solver"].update(bound_seconds=document["solver"]["objective_seconds"], gap=0.0, status="optimal")

    outcome = call("verify", edited_plan(plan, edit))
    assert (outcome.code, outcome.err) == (0, "")
    first, second = outcome.out.splitlines()
    assert first == "it breaks no rule, and its costs are right."
    assert re.match(r"its bound of \S+ s is the solver's claim and was not checked: give a proof", second)


def test_a_bound_below_0_is_refused(call: Call, plan: Path) -> None:
    def edit(document: dict[str, Any]) -> None:
        solver = document["solver"]
        solver.update(bound_seconds=-1.0, gap=(solver["objective_seconds"] + 1.0) / solver["objective_seconds"])

    outcome = call("verify", edited_plan(plan, edit))
    assert outcome.code == 2
    assert "a bound lies between 0 and the objective" in outcome.err


def test_a_stage_as_slow_as_a_run_has_shown_it_names_the_run(call: Call, plan: Path) -> None:
    """Half the costs at a pace of 0.5 were accepted, of a plan that no run had shown anything of."""

    def edit(document: dict[str, Any]) -> None:
        placement = next(p for p in document["placements"] if p["stage"] == "actor_train")
        placement["pace"] = 0.5

    outcome = call("verify", edited_plan(plan, edit))
    assert outcome.code == 2
    assert "actor_train: pace=0.5 must come from a run, and the plan names no trace of one" in outcome.err


def test_a_cost_that_somebody_changed_is_told_beside_what_it_is(call: Call, plan: Path) -> None:
    def edit(document: dict[str, Any]) -> None:
        document["edges"][0]["cost"]["terms"][0]["amount"] /= 2

    outcome = call("verify", edited_plan(plan, edit), "--json")
    assert outcome.code == 2
    (sentence,) = json.loads(outcome.out)["violations"]
    assert sentence.startswith(
        "the edge actor_generate -> reward_score: its cost: the term 'experience' is recorded as "
    )


def test_costs_of_a_measured_table_are_checked_with_it_and_said_to_be_unchecked_without(
    call: Call, job: Path, plan: Path, tmp_path: Path
) -> None:
    table, measured = measured_table(job, tmp_path / "table.json"), tmp_path / "measured.json"
    assert call("plan", job, "--profile", table, "--gap", 0.5, "-o", measured).code == 0
    assert "it breaks no rule, and its costs are right." in call("verify", measured, "--profile", table).out
    assert "its costs come from a measured table and were not checked" in call("verify", measured).out
    told = json.loads(call("verify", measured, "--json").out)
    assert [sentence.split(" was ")[0].split(" were ")[0][:10] for sentence in told.pop("not_checked")] == [
        "its costs ",
        "its bound ",
    ]
    assert told == {
        "violations": [],
        "costs_checked": False,
        "certified_seconds": None,
        "engine": "meshwright-eager",
    }
    assert "without a table; give none" in call("verify", plan, "--profile", table).err


@pytest.mark.slow
def test_a_proof_that_was_written_with_a_plan_certifies_it_until_somebody_changes_it(
    call: Call, job: Path, tmp_path: Path
) -> None:
    path, proof = tmp_path / "plan.json", tmp_path / "proof.json"
    assert call("plan", job, "-o", path, "--proof", proof).code == 0
    outcome = call("verify", path, "--proof", proof)
    assert outcome.code == 0
    assert re.match(
        r"certified: no plan is faster than \S+ s \(this plan is within \S+%\); the solver claims \S+ s\n",
        outcome.out,
    )
    stated = json.loads(proof.read_text())
    assert (
        json.loads(call("verify", path, "--proof", proof, "--json").out)["certified_seconds"] == stated["bound_seconds"]
    )
    proof.write_text(json.dumps({**stated, "bound_seconds": 0.999 * stated["bound_seconds"]}))
    outcome = call("verify", path, "--proof", proof)
    assert outcome.code == 2
    assert outcome.err.startswith("the proof states ")
