"""Conditions as bash has them, where the script says enough."""

from __future__ import annotations

import subprocess

import pytest

from meshwright.planner.trainers.shell_script import read_script, words

SET = "A=vllm; N=4; E=; L=(a b)\n"
KNOWN = (
    '[ "$A" = vllm ]',
    '[ "$A" != vllm ]',
    "[[ $A == vl* ]]",
    '[[ $A == "vl*" ]]',
    "[[ $A != sg* && -n $N ]]",
    "[[ -z $E || $N -gt 9 ]]",
    '[ -z "${UNSET:-}" ]',
    '[ -n "$E" ]',
    "! [ $N -eq 4 ]",
    "[ $N -ge 4 ] && [ $N -lt 5 ]",
    "(( N % 2 ))",
    "[[ ( $N -le 3 || $N -ne 5 ) && ! -z $A ]]",
    "test $N -eq 4",
    "true",
    "false",
    "[ ${#L[@]} -eq 2 ]",
    "[[ -v A ]]",
)


@pytest.mark.parametrize("condition", KNOWN)
def test_a_condition_holds_where_it_does_in_the_shell(condition: str) -> None:
    script = f"{SET}if {condition}; then run yes; else run no; fi"
    shown = subprocess.run(
        ["bash", "-c", f"run() {{ echo $1; }}\n{script}"], capture_output=True, text=True, check=True
    )
    assert words(script) == ["run", shown.stdout.strip()]
    assert read_script(script).notes == ()


@pytest.mark.parametrize(
    "condition", ["[ -f x ]", "grep -q x y", "[ $(id -u) -eq 0 ]", "[[ -d / || -z $A ]]", "command -v x"]
)
def test_what_asks_the_machine_is_not_known(condition: str) -> None:
    script = f"{SET}if {condition}; then run yes; else run no; fi"
    assert words(script)[-2:] == ["run", "no"]
    assert words(script, first=True)[-2:] == ["run", "yes"]
    assert any("is not known from the script" in note for note in read_script(script).notes)
