"""Slots: nobody is lost, sequences keep what they have drawn, and a free slot is refilled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.runtime.inference.slots import Finish, LiveGroup, PartialResponse, Prompt, Response, split_into_batches
from meshwright.runtime.inference.stopping import Stopping

EOS = 0


def partial(row: int, *, most: int | None = None) -> PartialResponse:
    return PartialResponse(
        prompt=Prompt(row=row, sample_id=row, tokens=(1,) * (row % 3 + 1), max_response=most), first_period=4
    )


def seated(*partials: PartialResponse, num_slots: int = 0) -> LiveGroup:
    group = LiveGroup(first_slot=2, num_slots=num_slots or len(partials))
    for one in partials:
        group.add(one)
    return group


def record(group: LiveGroup, tokens: Sequence[int], most: int, *, version: int = 0) -> tuple[list[Response], list[int]]:
    stopping = Stopping(eos_tokens=frozenset({EOS}), max_response=most)
    logprobs = -np.arange(1.0, len(tokens) + 1)
    return group.record(np.array(tokens), logprobs, version=version, finish=stopping.finish)


def test_the_lowest_free_slot_is_taken_next() -> None:
    group = seated(*map(partial, range(3)), num_slots=4)
    assert [one.slot for one in group.live] == [2, 3, 4]
    assert (group.next_slot, group.is_full) == (5, False)
    assert group.remove([1]) == [3]
    assert group.add(partial(7)).slot == 3
    assert [one.prompt.row for one in group.live] == [0, 2, 7]


def test_what_ends_leaves_its_slot_and_the_others_stay_in_theirs() -> None:
    group = seated(*map(partial, range(3)))
    responses, freed = record(group, [EOS, 5, 6], 9)
    assert [(one.row, one.tokens, one.logprobs, one.finish) for one in responses] == [(0, (EOS,), (-1.0,), Finish.EOS)]
    assert freed == [2]
    assert [(one.slot, one.tokens, one.num_cached) for one in group.live] == [(3, [5], 2), (4, [6], 3)]


def test_a_response_that_reaches_the_limit_ends_by_length() -> None:
    group = seated(partial(0))
    assert record(group, [7], 2) == ([], [])
    [response], _ = record(group, [7], 2)
    assert response.finish is Finish.LENGTH


def test_a_prompt_may_ask_for_less_than_the_limit_but_not_for_more() -> None:
    group = seated(partial(1, most=1), partial(9, most=9))
    assert [response.row for response in record(group, [7, 7], 2)[0]] == [1]
    assert [response.row for response in record(group, [7], 2)[0]] == [9]


def test_every_token_carries_the_version_that_drew_it() -> None:
    group = seated(partial(0))
    for version in (3, 3, 5):
        responses, _ = record(group, [7], 3, version=version)
    assert responses[0].versions == (3, 3, 5)
    assert responses[0].first_period == 4


def test_the_end_token_at_the_limit_counts_as_an_end() -> None:
    [response], _ = record(seated(partial(0)), [EOS], 1)
    assert response.finish is Finish.EOS


def test_a_sequence_that_gave_way_goes_on_with_what_it_had() -> None:
    group = seated(partial(0), partial(1))
    for token in range(1, 200):
        record(group, [token, -token], 999)
    kept = group.live[0].to_partial()
    group.remove([0])
    assert group.add(kept).tokens == list(range(1, 200))
    record(group, [EOS, 200], 999)
    assert group.live[0].tokens == [*range(1, 200), 200]


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(1, 5))
def test_every_prompt_gets_exactly_its_own_tokens_whatever_the_slots(lengths: list[int], num_slots: int) -> None:
    group, waiting = LiveGroup(first_slot=0, num_slots=num_slots), list(range(len(lengths)))
    found: list[Response] = []
    while waiting or group.live:
        while waiting and not group.is_full:
            group.add(partial(waiting.pop(0)))
        tokens = [EOS if one.num_sampled + 1 == lengths[one.prompt.row] else one.prompt.row + 1 for one in group.live]
        found += record(group, tokens, 100)[0]
    assert sorted(response.row for response in found) == list(range(len(lengths)))
    for response in found:
        assert response.tokens == (response.row + 1,) * (lengths[response.row] - 1) + (EOS,)


@given(st.lists(st.integers(0, 30), max_size=9), st.integers(1, 20))
def test_packs_hold_every_token_once_and_none_holds_too_many(lengths: list[int], most: int) -> None:
    found = list(split_into_batches(lengths, most))
    assert all(sum(end - first for _, first, end in pack) <= most for pack in found)
    places = [(row, place) for pack in found for row, first, end in pack for place in range(first, end)]
    assert places == [(row, place) for row, length in enumerate(lengths) for place in range(length)]
