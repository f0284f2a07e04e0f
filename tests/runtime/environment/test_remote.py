"""Two sides use each other's objects, and one that says what is none is refused."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from meshwright.runtime.environment.remote_objects import Peer, PeerError, RemoteObject


def peer(*said: Any) -> tuple[Peer, io.BytesIO]:
    """One whose other side has said all this already, and what it says itself."""
    lines = b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in said)
    written = io.BytesIO()
    return Peer(io.BytesIO(lines), written), written


def test_what_is_asked_of_an_object_of_the_other_side_is_a_line_and_its_answer_the_value() -> None:
    one, written = peer({"value": 3}, {"value": {"tuple": [1, 2]}})
    other = RemoteObject(one, 5)
    assert len(other) == 3
    assert other.pair == (1, 2)
    asked = [json.loads(line) for line in written.getvalue().splitlines()]
    assert asked[0] == {"ask": "__len__", "args": [{"yours": 5}], "kwargs": {}}
    assert asked[1] == {"ask": "get", "args": [{"yours": 5}, "pair"], "kwargs": {}}


def test_arguments_that_a_call_has_changed_are_changed_here_too() -> None:
    one, _ = peer({"value": None, "changed": [[1, [1, 2]]]})
    given = [2, 1]
    RemoteObject(one, 0)(given)
    assert given == [1, 2]


def test_what_an_own_object_answers_goes_back_by_number() -> None:
    one, written = peer({"ask": "get", "args": [{"yours": 0}, "real"], "kwargs": {}})
    assert one.encode_value(one) == {"mine": 0}
    one.serve()
    assert json.loads(written.getvalue())["error"]["kinds"] == ["AttributeError"]


def test_an_object_is_equal_to_a_plain_value_only_by_its_own_plain_value() -> None:
    one, _ = peer({"value": None}, {"value": {"mine": 9}}, {"value": [1]})
    assert [RemoteObject(one, 0) == other for other in (1, 1, [1])] == [False, False, True]


@pytest.mark.parametrize(
    "said",
    [
        *(b"", b"{", b"[]", b"[" * 10**5, b"\xff"),
        *({"value": {"int": "x"}}, {"value": {"mine": "x"}}, {"error": {"kinds": ["print"], "args": []}}),
        *({"nothing": 0}, {"value": 1, "changed": [[5, []]]}, {"value": {"mine": 1, "plain": None}}, {"error": 3}),
    ],
)
def test_what_is_no_answer_is_refused(said: Any) -> None:
    with pytest.raises(PeerError):
        peer(said)[0].request("__call__", 1)


def test_an_end_of_the_code_is_an_error_of_the_call_and_no_end_of_the_tests() -> None:
    with pytest.raises(RuntimeError):
        peer({"error": {"kinds": ["SystemExit"], "args": [0]}})[0].request("__call__", 1)
