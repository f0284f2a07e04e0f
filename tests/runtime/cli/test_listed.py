"""The list of commands: what help and completion tell of each is what the command itself says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshwright.runtime.cli.main import COMMANDS, CommandEntry
from tests.runtime.command import Call


@pytest.mark.parametrize("one", COMMANDS, ids=lambda one: one.name)
def test_a_command_is_listed_with_the_first_sentence_of_its_own_help(one: CommandEntry) -> None:
    told = (one.load().help or "").split("\n\n")[0]
    assert " ".join(told.split()) == one.summary


def test_help_lists_every_command_and_loads_none() -> None:
    script = (
        "import sys; sys.argv = ['meshwright', '--help']\n"
        "from meshwright.runtime.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: print(sorted(name for name in sys.modules if name.startswith('meshwright.planner')))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert [one.name for one in COMMANDS if one.name not in found] == []
    assert found.endswith("[]\n")


def test_a_shell_completes_commands_and_their_options(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for typed, offered in (("meshwright pl", "plan"), ("meshwright plan --for", "--forbid")):
        monkeypatch.setenv("_MESHWRIGHT_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
        assert offered in call().out.split()


def test_a_command_that_is_not_there_is_answered_with_those_that_are_near(call: Call) -> None:
    assert "there is no command 'pln'; did you mean 'plan'?" in call("pln").err
