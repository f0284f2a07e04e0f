"""The program itself: started as a module, with its version and its help."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "meshwright", *arguments], capture_output=True, text=True, check=False)


def test_the_version_is_that_of_the_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    found = started("--version")
    assert (found.returncode, found.stdout, found.stderr) == (0, f"meshwright {setup['metadata']['version']}\n", "")


@pytest.mark.parametrize("command", [(), ("plan",)])
def test_the_short_option_gives_the_same_help_as_the_long_one(command: tuple[str, ...]) -> None:
    short, long = started(*command, "-h"), started(*command, "--help")
    assert short.stdout == long.stdout
    assert " ".join(("Usage: python -m meshwright", *command)) in short.stdout
    assert (short.returncode, short.stderr) == (0, "")


def test_a_mistake_ends_a_module_as_it_ends_the_program() -> None:
    found = started("verify", "nowhere.json")
    assert found.returncode == 2
    assert found.stderr.startswith("error: plan nowhere.json does not exist")
    assert "see `python -m meshwright plan --help`" in started("plan", "job.yaml").stderr
