"""Expansions as bash has them."""

from __future__ import annotations

import subprocess

import pytest

from meshwright.planner.trainers.shell_expansion import Word, undecided
from meshwright.planner.trainers.shell_script import words

EXPANSIONS = (
    "${A:-x}", "${U:-x}", "${U-x}", "${E:-x}", "${E-x}", "${U:=x}$U", "${A:+x}", "${E:+x}", "${A^^}", "${A,,}",
    "${A%.*}",
    "${A%%.*}", "${A#*/}", "${A##*/}", "${A/models/m}", "${A//o/0}", "${A:2}", "${A:1:3}", "${A: -3}", "${#A}",
    "${#L[@]}",
    "${L[1]}", "${L[-1]}", "${L[@]}", "$L", "${U:-${A:-y}}", "pre${A}post", "$'a\\tb'", "\\$A", "a\\ b",
)  # fmt: skip


@pytest.mark.parametrize("expansion", EXPANSIONS)
def test_an_expansion_is_that_of_the_shell(expansion: str) -> None:
    script = f"A=/models/Qwen2.5-7B.fp8; E=; L=(one 'two words' three)\nrun {expansion} \"{expansion}\"\n"
    shown = subprocess.run(
        ["bash", "-c", f"run() {{ printf '%s\\0' \"$@\"; }}\n{script}"], capture_output=True, text=True, check=True
    )
    assert words(script)[1:] == shown.stdout.split("\0")[:-1]


def test_a_word_is_undecided_by_all_that_its_parts_are() -> None:
    one, other = undecided("$(x)", "x is not run"), Word("$A", ("A is not set",), "")
    assert (one + other).reasons == ("x is not run", "A is not set")
    assert (one + other).in_empty_environment is None
    assert (Word("a") + other).in_empty_environment == "a"
    assert (Word("a") + Word("b")).is_decided
