"""Arithmetic as bash has it."""

from __future__ import annotations

import subprocess

import pytest

from meshwright.planner.trainers.shell_script import read_script, words

EXPRESSIONS = (
    "1 + 2 * 3",
    "(1 + 2) * 3",
    "-7 / 2",
    "-7 % 3",
    "7 % -3",
    "2 ** 10",
    "1 << 4 | 3",
    "6 & 3 ^ 1",
    "5 > 3 && 2 >= 2",
    "0 || !1",
    "3 == 3 ? 10 : 20",
    "~5",
    "0x1F + 010",
    "N * 2 + ${N} - $N",
    "M",
)


def test_numbers_are_those_of_the_shell() -> None:
    script = "N=21\nM=N\n" + "\n".join(f"run $(({one}))" for one in EXPRESSIONS)
    shown = subprocess.run(
        ["bash", "-c", f"run() {{ echo $1; }}\n{script}"], capture_output=True, text=True, check=True
    )
    assert words(script)[1::2] == shown.stdout.split()


def test_arithmetic_is_arithmetic_within_a_default_too() -> None:
    script = 'A=5\nB=${B:-$((A + 2))}\nC="${C:-$((A * B))}"\nrun $B $C ${D:-$(((A - 1) / 2))} ${E:-$(echo 8)}\n'
    shown = subprocess.run(
        ["env", "-i", "bash", "-c", f"run() {{ echo $@; }}\n{script}"], capture_output=True, text=True, check=True
    )
    assert words(script)[1:] == shown.stdout.split() == ["7", "35", "2", "8"]


@pytest.mark.parametrize("text", ["1 / 0", "1 % 0", "2 ** 64", "2 ** -1", "1 << 64", "1E3", "09", "A + 1"])
def test_what_is_no_number_is_undecided(text: str) -> None:
    ((_, word),) = read_script(f"run $(({text}))").commands
    assert word.reasons
    assert word.text == f"$(({text}))"
