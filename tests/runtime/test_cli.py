"""The command line: what a user gets wrong is answered with one sentence and the right exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.runtime.cli.main import COMMANDS
from tests.runtime.command import Call


def test_a_plan_is_made_and_explained_without_torch(job: Path, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from meshwright.runtime.cli.main import main\n"
        "for words in sys.argv[1].split(';'):\n"
        "    sys.argv = words.split()\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, words\n"
        "sys.exit('torch' in sys.modules)"
    )
    plan = tmp_path / "plan.json"
    asked = f"meshwright plan {job} --gap 0.5 -o {plan};meshwright verify {plan};meshwright explain {plan}"
    assert subprocess.run([sys.executable, "-c", script, asked], capture_output=True, check=False).returncode == 0


def test_help_of_every_command_ends_with_an_example(call: Call) -> None:
    for one in COMMANDS:
        outcome = call(one.name, "--help")
        assert outcome.code == 0
        assert "Example: meshwright" in outcome.out


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_an_empty_argument_is_refused_and_never_the_current_directory(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank: str
) -> None:
    monkeypatch.chdir(tmp_path)
    sentence = "is empty; give one (a variable of the shell may be unset)."
    for arguments in (("run", "plan.json", "job.yaml", "--steps", 1), ("export", "plan.json", "--to", "verl")):
        found = call(*arguments, "--out" if arguments[0] == "run" else "-o", blank)
        assert (found.code, found.err.count("\n")) == (2, 1)
        assert f"the value of {'--out' if arguments[0] == 'run' else '-o'} {sentence}" in found.err
    found = call("explain", blank)
    assert (found.code, found.err) == (2, f"error: an argument {sentence}\n")
    assert list(tmp_path.iterdir()) == []


def test_an_error_shows_what_would_move_the_cursor_as_it_is_written(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text('"\\e[2Jmodels": 1\n')
    outcome = call("plan", path, "-o", tmp_path / "plan.json")
    assert outcome.code == 2
    assert outcome.err.strip().isprintable()
    assert "x1b[2Jmodels" in outcome.err


def test_an_error_shows_what_would_move_the_cursor_in_the_name_of_a_file(call: Call, tmp_path: Path) -> None:
    outcome = call("plan", tmp_path / "\x1b[2Jjob.yaml", "-o", tmp_path / "plan.json")
    assert outcome.code == 2
    assert outcome.err.strip().isprintable()
    assert "\\x1b[2Jjob.yaml" in outcome.err
