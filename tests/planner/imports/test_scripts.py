"""Words of a script as a shell would give them to a command."""

from __future__ import annotations

import subprocess

import pytest

from meshwright.planner.imports.scripts import words
from meshwright.profiles.errors import BadInput

SCRIPT = """\
#!/usr/bin/env bash
set -x
SIZE=${SIZE:-8}  # ranks
export HALF=$((SIZE / 2))
PATH_OF='models/it is'
ARGS=(
  --tp $HALF  # half
  --path "$PATH_OF"
  # --off 1
)
MORE=(a.b=${SIZE} c="d e")
run "${ARGS[@]}" \\
    ${MORE[@]} last=$((2 * (SIZE + 1)))
"""


def test_words_are_those_of_the_shell() -> None:
    found = words(SCRIPT)
    shell = subprocess.run(
        ["bash", "-c", SCRIPT.replace("set -x", "run() { printf '%s\\n' run \"$@\"; }")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    quoted = ["a.b=8", "c=d e"]
    assert found[found.index("run") :][:5] == shell[:5] == ["run", "--tp", "4", "--path", "models/it is"]
    assert [word for word in found if word in quoted] == quoted
    assert found[-1] == shell[-1] == "last=18"
    assert "--off" not in found


def test_what_is_not_known_stays_as_it_is_written() -> None:
    assert words("run $HOME/x ${OTHER} $(date) $((1 / 0))")[1:3] == ["$HOME/x", "${OTHER}"]
    assert words("A=$A\nrun $A") == ["run", "$A"]


def test_a_quote_that_does_not_end_is_refused() -> None:
    with pytest.raises(BadInput, match="close its quotes"):
        words("run 'x")


def test_quotes_may_span_lines_and_hide_comments() -> None:
    text = 'ENV="{\n  a: # 1\n}"\nrun --env "$ENV" \'it is\n# not a comment\' "it\'s" --tp 4\n'
    assert words(text) == ["run", "--env", "{   a: # 1 }", "it is # not a comment", "it's", "--tp", "4"]


def test_of_branches_the_last_assignment_counts_or_the_first() -> None:
    text = 'N=1\nif [ -n "$BIG" ]; then\n  N=8\n  A=(--a 2)\nelse\n  N=4\n  A=(--a 3)\nfi\nM=$N\nrun $N $M ${A[@]}\n'
    assert words(text)[-5:] == ["run", "4", "4", "--a", "3"]
    assert words(text, first=True)[-5:] == ["run", "1", "1", "--a", "2"]
    assert words("N=1\nN=2\nrun $N", first=True) == ["run", "2"]  # one behind the other is no branch


def test_variables_that_grow_beyond_reason_are_refused() -> None:
    doubled = "\n".join(f"A{n}=$A{n - 1}$A{n - 1}" for n in range(1, 60))
    with pytest.raises(BadInput, match="grow beyond reason"):
        words(f"A0=xx\n{doubled}\nrun $A59\n")


def test_arithmetic_that_is_none_stays_as_it_is_written() -> None:
    for text in ("1 / 0", "(" * 60 + "1", "9" * 5000, "-" * 100 + "1"):
        assert words(f"run $(({text}))")[0] == "run"
