"""Whoever reads the output of a run may go: nothing that is printed then ends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.runtime.records.lasting_output import lasting_output

PRINTS = """
import sys
from meshwright.runtime.records.lasting_output import lasting_output, open_standard_streams
open_standard_streams()
other = open(sys.argv[1], "w")
with lasting_output():
    from rich.console import Console
    for number in range(2_000):
        print("line", number)
        Console().print("rich")
        sys.stderr.write("told\\n")
    sys.stdout.flush()
other.write("went on")
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    return [sys.executable, "-c", PRINTS, str(tmp_path / "other")]


def test_a_process_goes_on_when_its_pipe_is_closed(command: list[str], tmp_path: Path) -> None:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"line 0\n"
        process.stdout.close()
        process.stderr.close()
        assert process.wait(60) == 0
    assert (tmp_path / "other").read_text() == "went on"


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-", ">/dev/full"])
def test_a_stream_that_was_closed_before_or_takes_nothing_is_no_other_file(
    command: list[str], tmp_path: Path, closed: str
) -> None:
    ended = subprocess.run(["bash", "-c", f'"$@" {closed}', "bash", *command], capture_output=True, check=False)
    assert ended.returncode in (0, 120)  # the latter is Python's own, where the last flush fails on a full device
    assert (tmp_path / "other").read_text() == "went on"


def test_what_is_read_is_what_was_printed(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, check=True)
    assert ended.stdout.count(b"line") == ended.stderr.count(b"told") == 2000


def test_what_is_told_beside_the_answer_commands_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with lasting_output():
        sys.stderr.write("the judge answered \x1b[2J\n")
    assert capsys.readouterr().err == "the judge answered \\x1b[2J\n"


def test_a_text_that_a_stream_cannot_encode_is_dropped_and_the_next_one_is_not(tmp_path: Path) -> None:
    script = (
        "from meshwright.runtime.records.lasting_output import lasting_output\n"
        "with lasting_output():\n    print('\\u2713')\n    print('next')\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"},
    )
    assert "next" in found.stdout
