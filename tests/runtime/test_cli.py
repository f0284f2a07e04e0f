"""The command line: what a user gets wrong is answered with one sentence and the right exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runtime.command import Call


def edited_plan(plan: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    document = json.loads(plan.read_text())
    edit(document)
    path = plan.with_name("edited.json")
    path.write_text(json.dumps(document))
    return path


def test_verify_says_nothing_of_a_compiled_plan(call: Call, plan: Path) -> None:
    outcome = call("verify", plan)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


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


def test_the_command_line_starts_without_torch_and_without_a_solver() -> None:
    script = "import sys, meshwright.runtime.cli; sys.exit('torch' in sys.modules or 'ortools' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_help_of_every_command_ends_with_an_example(call: Call) -> None:
    commands = "profile plan verify explain simulate whatif rehearse run calibrate report export schema"
    for command in commands.split():
        outcome = call(command, "--help")
        assert outcome.code == 0
        assert "Example: meshwright" in outcome.out


def test_the_schema_of_each_document_is_json(call: Call) -> None:
    for document in ("job", "plan", "table"):
        outcome = call("schema", document)
        assert json.loads(outcome.out)["type"] == "object"
