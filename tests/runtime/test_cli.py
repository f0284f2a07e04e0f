"""The command line: what a user gets wrong is answered with one sentence and the right exit code."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.runtime.command import Call


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
