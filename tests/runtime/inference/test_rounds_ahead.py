"""How many rounds a GPU draws between two looks at what was drawn."""

from __future__ import annotations

from meshwright.runtime.inference.decode_rounds import StepsPerSync


def rounds_after(*lengths: int, may_end: bool = True) -> int:
    """Rounds between looks where end tokens came after so many rounds each."""
    pace = StepsPerSync(may_end=may_end)
    for length in lengths:
        pace.record(length, ended=True)
    return pace.rounds


def test_a_turn_begins_with_a_look_at_every_round() -> None:
    assert rounds_after() == 1


def test_looks_are_further_apart_the_rarer_end_tokens_are() -> None:
    found = [rounds_after(*[length] * 50) for length in (1, 4, 40, 400, 40_000)]
    assert found == [1, 1, 3, 9, 16]


def test_without_end_tokens_nothing_is_dropped_and_looks_are_as_far_apart_as_ever() -> None:
    assert rounds_after(may_end=False) == 16


def test_of_rounds_behind_which_no_end_token_came_there_may_be_more_at_once() -> None:
    pace = StepsPerSync(may_end=True)
    for _ in range(64):
        pace.record(pace.rounds, ended=False)
    assert pace.rounds > 4
