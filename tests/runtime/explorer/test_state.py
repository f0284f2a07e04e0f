"""A state is an address and a command line, and comes back from both as it was."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.runtime.explorer.state import State, state_from_query, state_of

STATES = [
    State(),
    state_of(["cluster.nodes=4", "cluster.device=h200"], (), 2.5, 500),
    state_of(["workload.response.scale=1.5"], ("actor_train.tp=2", "actor_train.recompute!=full")),
    state_of(['cluster.inter_node={"seconds": 1e-06, "bytes_per_second": 1e9}'], ()),
    state_of(["staleness=1"], (), grid=["staleness=0,1", "cluster.nodes=1,2,4"]),
    replace(state_of(["staleness=1"], ()), compared_with=state_of(["cluster.nodes=2"], ("actor_train.tp=2",), 3.0)),
]


@pytest.mark.parametrize("state", STATES)
def test_an_address_gives_its_state_back(state: State) -> None:
    assert state_from_query(state.query) == state


@pytest.mark.parametrize("state", STATES)
def test_a_command_line_gives_its_state_back(state: State) -> None:
    path = Path("a job.yaml")
    command, name, source, *words = shlex.split(state.grid_command(path) if state.grid else state.command(path))
    assert (command, name, source) == ("meshwright", "explore", "a job.yaml")
    options: dict[str, list[str]] = {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        options.setdefault(option, []).append(value)
    assert options.pop("-o") == ["grid.json" if state.grid else "plan.json"]
    price = [float(text) for text in options.get("--price", [])]
    steps = [int(text) for text in options.get("--per-steps", ["1000"])]
    found = state_of(
        options.get("--set", ()), options.get("--pin", ()), *(price or [None]), *steps, grid=options.get("--grid", ())
    )
    # The command line of a comparison has the kept state's own.
    assert replace(found, compared_with=state.compared_with) == state


def test_the_order_in_which_something_was_changed_makes_no_other_state() -> None:
    assert state_from_query("pin=b.tp=1&staleness=1&cluster.nodes=2&pin=a.tp=1") == state_from_query(
        "cluster.nodes=2&pin=a.tp=1&pin=b.tp=1&staleness=1"
    )


def test_what_money_costs_needs_no_other_search() -> None:
    state = state_of(["staleness=1"], (), 2.0, 10)
    assert state.searched == state_of(["staleness=1"], ()).searched
    assert state.values == {"staleness": 1}


def test_a_grid_has_all_combinations_on_top_of_what_is_changed() -> None:
    state = state_of(["cluster.nodes=8", "cluster.device=h200"], (), 2.0, grid=["staleness=0,1", "cluster.nodes=1,2"])
    assert [point.settings for point in state.points] == [
        (("cluster.device", "h200"), ("cluster.nodes", nodes), ("staleness", staleness))
        for nodes in "12"
        for staleness in "01"
    ]
    assert {point.price for point in state.points} == {2.0}
    assert state.searched not in {point.searched for point in state.points}
    assert State().points == ()


def test_a_state_is_beside_the_job_as_given_until_another_is_kept() -> None:
    kept = state_of(["cluster.nodes=2"], (), 3.0)
    assert state_of(["staleness=1"], (), 2.0, 10).reference == State(price=2.0, num_steps=10)
    assert replace(State(num_steps=10), compared_with=kept).reference == replace(kept, num_steps=10)
    assert replace(State(price=2.0), compared_with=kept).reference.price == 3.0
    assert replace(State(price=2.0), compared_with=replace(kept, price=None)).reference.price == 2.0
    assert (kept.label, State().label) == ("cluster.nodes=2", "as given")


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("price=dear", "price='dear' is not a number"),
        ("price=-1", "price=-1.0 is out of range"),
        ("price=nan", "price=nan is out of range"),
        ("steps=1.5", "steps='1.5' is not a whole number"),
        ("steps=0", "steps=0 is out of range"),
        ("cluster.nodes=1,2", "a state has one of each"),
        ("kept=kept%3Dstaleness%253D1", "the kept state has a kept state or a grid of its own"),
        ("grid=cluster.nodes", "'cluster.nodes' is not of the form field=value,value"),
        ("grid=cluster.nodes=1,,2", "is not of the form field=value,value"),
        ("grid=a=1&grid=a=2", "a is given twice"),
        (
            f"grid=a={','.join(map(str, range(33)))}",
            "33 combinations of values, and each takes a search; give at most 32",
        ),
        (f"a={'x' * 9000}", "more than 8192 characters"),
    ],
)
def test_an_address_that_is_no_state_is_refused(query: str, sentence: str) -> None:
    with pytest.raises(BadInput) as refusal:
        state_from_query(query)
    assert sentence in str(refusal.value)
