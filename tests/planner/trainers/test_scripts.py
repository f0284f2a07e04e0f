"""Words of a script as a shell would give them to a command."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from meshwright.planner.trainers.shell_script import read_script, words
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


def run_by_bash(script: str) -> list[str]:
    """The words that bash gives `run`, one after the other."""
    shown = f'run() {{ printf "%s\\0" run "$@"; }}\n{script}'
    done = subprocess.run(["env", "-i", "bash", "-c", shown], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


BEYOND_ASSIGNMENTS = """\
A=(--a 1)
A+=(key=value "two words" other=${NONE:-x})
A+=(# nothing
  last=${A:-y}  # "run #3" --off 1
)
NAME="run #3"
B=${NAME,,}; C=${NAME##* }; D=${B/run/walk}; E=${#A[@]}
[[ $NAME == run* ]] && F=1 || F=2
if [ -z "${UNSET:-}" ]; then G=unset; elif true; then G=other; else G=set; fi
if (( E > 3 )); then H=many; else H=few; fi
case "$NAME" in walk*) I=walk ;; run*|jog) I=run ;; *) I=none ;; esac
J=
for n in 1 2 3; do J=$J$n; done
for ((i = 0; i < 3; i++)); do K=$((i * 2)); done
pick() { local given=$1; L="<$given>"; }
pick three
read -r -d '' M <<EOF
of $NAME
EOF
N=$(echo "$C" 4)
export O=1E-6 P=$((2 ** 10 % 7 ? 5 : 6))
# run --not 1
Q=${A[1]}; R=${NAME:0:3}; S="${A[*]}"
run "${A[@]}" "$B" "$C" "$D" $E $F $G $H $I $J $K "$L" "$M" "$N" $O $P $Q $R "$S" '$x' "\\$y" a\\ b --z='["p","q"]'
"""


@pytest.mark.parametrize("script", [SCRIPT.replace("set -x\n", ""), BEYOND_ASSIGNMENTS])
def test_words_are_those_of_the_shell(script: str) -> None:
    wanted = run_by_bash(script)
    assert len(wanted) > 5
    assert words(script) == wanted


def test_what_is_not_run_is_no_word() -> None:
    assert words("# run a=1\necho run n=77\nprintf run n=78\nfalse && run n=79\n: run n=80\n") == []
    assert words("if false; then run a=1; else run a=2; fi") == ["run", "a=2"]


def test_what_is_not_known_stays_as_it_is_written_and_says_why() -> None:
    (command,) = read_script("run $HOME/x n=${OTHER} $(date +%s) $((1 / 0)) $1").commands
    assert [word.text for word in command] == ["run", "$HOME/x", "n=${OTHER}", "$(date +%s)", "$((1 / 0))", "$1"]
    assert [word.reasons for word in command] == [
        (),
        ("HOME is set by no line of the script",),
        ("OTHER is set by no line of the script",),
        ("$(date +%s) is the output of a command",),
        ("1 / 0 divides by 0",),
        ("argument 1 of the script is not given",),
    ]
    assert words("A=$A\nrun $A") == ["run", "$A"]


def test_what_a_command_answers_leaves_undecided_all_that_is_made_of_it() -> None:
    script = "N=$(nvidia-smi | wc -l)\nM=$((N * 2))\nif [ $N -gt 0 ]; then K=1; else K=0; fi\nrun a=$M b=${N:-8} c=$K\n"
    (command,) = read_script(script).commands
    assert [bool(word.reasons) for word in command] == [False, True, True, False]
    assert command[3].text == "c=0"
    assert words(script, first=True)[3] == "c=1"
    assert any("[ $N -gt 0 ]" in note for note in read_script(script).notes)


@pytest.mark.parametrize("text", ["run 'x", 'run "x', "A=1\nrun 'x y\nB=2\n"])
def test_a_quote_that_does_not_end_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="unclosed quote"):
        words(text)


def test_quotes_may_span_lines_and_hide_comments() -> None:
    text = 'ENV="{\n  a: # 1\n}"\nrun --env "$ENV" \'it is\n# not a comment\' "it\'s" --tp 4\n'
    assert words(text) == run_by_bash(text)


def test_of_undecided_branches_the_last_is_taken_or_the_first() -> None:
    text = "N=1\nif [ -f big ]; then\n  N=8\n  A=(--a 2)\nelse\n  N=4\n  A=(--a 3)\nfi\nM=$N\nrun $N $M ${A[@]}\n"
    assert words(text)[-5:] == ["run", "4", "4", "--a", "3"]
    assert words(text, first=True)[-5:] == ["run", "8", "8", "--a", "2"]
    assert words("N=1\nN=2\nrun $N", first=True) == ["run", "2"]  # one behind the other is no branch
    assert words("N=1\n[ -f big ] && N=2\nrun $N") == ["run", "2"]
    assert words("N=1\n[ -f big ] && N=2\nrun $N", first=True) == ["run", "1"]


def test_a_branch_that_ends_the_script_is_not_taken() -> None:
    assert words("[ -f x ] || exit 1\nif [ $# -lt 2 ]; then\n  echo usage\n  exit 1\nfi\nrun a=1") == ["run", "a=1"]
    assert words("case x in y) ;; *) exit 1 ;; esac\nrun a=1") == ["run", "a=1"]
    assert words("run a=1\nexit 0\nrun a=2") == ["run", "a=1"]


def test_a_script_within_a_word_or_a_here_document_is_read() -> None:
    wrapped = "N=4\nsrun -N1 bash -c \\\n\"pip install x \\\n&& ray job submit -- run a=$N \\\n  b='c d'\" &>> log\n"
    assert words(wrapped)[-3:] == ["run", "a=4", "b=c d"]
    assert words("bash <<EOF\nrun a=1\nEOF\n") == ["run", "a=1"]
    assert words("read -r -d '' T <<EOF\nrun --a 1 \\\n  --b 2\nEOF\n$T\n") == ["run", "--a", "1", "--b", "2"]


def test_a_script_that_is_sourced_is_read_where_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "one.sh").write_text("ARGS=(--layers 4)\n")
    text = 'D="$(cd "$(dirname "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nsource "$D/models/one.sh"\nrun ${ARGS[@]}\n'
    assert words_of(text, tmp_path) == ["run", "--layers", "4"]
    (tmp_path / "models" / "one.sh").unlink()
    found = read_script(text, tmp_path / "run.sh")
    assert any("one.sh, which the script sources, is not beside it" in note for note in found.notes)
    assert found.commands[0][1].reasons == ("ARGS is set by no line of the script",)


def words_of(text: str, directory: Path) -> list[str]:
    """Those of a script in a directory."""
    return [word.text for command in read_script(text, directory / "run.sh").commands for word in command]


def test_variables_that_grow_beyond_reason_are_refused() -> None:
    doubled = "\n".join(f"A{n}=$A{n - 1}$A{n - 1}" for n in range(1, 60))
    with pytest.raises(BadInput, match="grow too long"):
        words(f"A0=xx\n{doubled}\nrun $A59\n")


def test_arithmetic_that_is_none_stays_as_it_is_written() -> None:
    for text in ("1 / 0", "9" * 5000, "-" * 100 + "1", "2 ** 99", "1 << 70", "x y"):
        assert words(f"run $(({text}))")[:1] == ["run"]


@pytest.mark.parametrize(
    "text",
    [
        "f() { f; }\nf\n",
        "f() { eval f; }\nf\n",
        "while true; do run; done\n",
        "for ((i = 0; i >= 0; i++)); do run; done\n",
        "A=$(A=$(A=$(echo 1)))\nrun $A",
        "run $((" + "(" * 500 + "1" + ")" * 500 + "))",
        "if " * 300 + "true",
        "${" * 400,
        "(" * 2000,
        "a" * 100_000,
        "\x00\x1b[31m",
    ],
)
def test_no_script_is_followed_without_end(text: str) -> None:
    with contextlib.suppress(BadInput):
        assert len(words(text)) < 1000


def test_a_program_that_asks_for_devices_which_are_no_gpus_fails() -> None:
    probe = "$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)"
    script = f"""
D=${{D:-{probe}}}
case "$D" in gpu) N=8;; npu) N=16;; esac
if python3 -c "import torch_npu"; then M=1; else M=2; fi
train nodes=$N more=$M
"""
    found = read_script(script)
    assert ("train", "nodes=8", "more=2") in [tuple(word.text for word in command) for command in found.commands]
    assert found.notes == ()
