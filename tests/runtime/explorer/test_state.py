"""A state is an address and a command line, and comes back from both as it was."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.runtime.explorer.state import State, state_from_query, state_of

STATES = [
    State(),
    state_of(["cluster.nodes=4", "cluster.device=h200"], (), 2.5, 500),
    state_of(["workload.response.scale=1.5"], ("actor_train.tp=2", "actor_train.recompute!=full")),
    state_of(['cluster.inter_node={"seconds": 1e-06, "bytes_per_second": 1e9}'], ()),
]


@pytest.mark.parametrize("state", STATES)
def test_an_address_gives_its_state_back(state: State) -> None:
    assert state_from_query(state.query) == state


@pytest.mark.parametrize("state", STATES)
def test_a_command_line_gives_its_state_back(state: State) -> None:
    command, name, source, *words = shlex.split(state.command(Path("a job.yaml")))
    assert (command, name, source) == ("meshwright", "explore", "a job.yaml")
    options: dict[str, list[str]] = {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        options.setdefault(option, []).append(value)
    assert options.pop("-o") == ["plan.json"]
    price = [float(text) for text in options.get("--price", [])]
    steps = [int(text) for text in options.get("--per-steps", ["1000"])]
    assert state_of(options.get("--set", ()), options.get("--pin", ()), *(price or [None]), *steps) == state


def test_the_order_in_which_something_was_changed_makes_no_other_state() -> None:
    assert state_from_query("pin=b.tp=1&staleness=1&cluster.nodes=2&pin=a.tp=1") == state_from_query(
        "cluster.nodes=2&pin=a.tp=1&pin=b.tp=1&staleness=1"
    )


def test_what_money_costs_needs_no_other_search() -> None:
    state = state_of(["staleness=1"], (), 2.0, 10)
    assert state.searched == state_of(["staleness=1"], ()).searched
    assert state.values == {"staleness": 1}


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("price=dear", "price='dear' is not a number"),
        ("price=-1", "price=-1.0 is out of range"),
        ("price=nan", "price=nan is out of range"),
        ("steps=1.5", "steps='1.5' is not a whole number"),
        ("steps=0", "steps=0 is out of range"),
        ("cluster.nodes=1,2", "a state has one of each"),
        (f"a={'x' * 9000}", "more than 8192 characters"),
    ],
)
def test_an_address_that_is_no_state_is_refused(query: str, sentence: str) -> None:
    with pytest.raises(BadInput) as refusal:
        state_from_query(query)
    assert sentence in str(refusal.value)
