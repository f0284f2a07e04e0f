"""Slots: nobody is lost, live sequences stay contiguous, and a free slot is refilled."""

import random
from collections import deque
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from meshwright.runtime.generation.slots import Finish, LiveGroup, LiveSequence, Prompt
from meshwright.runtime.generation.stopping import Stopping
from meshwright.runtime.model.row_bands import bands

EOS = 0


def prompts(count: int) -> deque[Prompt]:
    return deque(Prompt(row=row, draw=row, tokens=(1,) * (row % 3 + 1)) for row in range(count))


def ending_after(max_response: int) -> Callable[[LiveSequence], Finish | None]:
    return Stopping(eos_tokens=frozenset({EOS}), max_response=max_response).finish


def test_free_slots_are_filled_from_the_front_of_the_queue() -> None:
    waiting = prompts(5)
    group = LiveGroup(first_slot=2, num_slots=3)
    assert [s.prompt.row for s in group.admit(waiting)] == [0, 1, 2]
    assert [p.row for p in waiting] == [3, 4]
    assert group.admit(waiting) == []


def test_the_last_live_sequence_moves_into_a_freed_slot_with_what_it_has_cached() -> None:
    group = LiveGroup(first_slot=4, num_slots=3)
    group.admit(prompts(3))
    # Row 0 ends; row 2 (3 prompt tokens, 1 drawn and not yet cached) moves from slot 6 to slot 4.
    responses, moves = group.record([EOS, 5, 6], [-1.0, -2.0, -3.0], version=0, finish=ending_after(9))
    assert [(r.row, r.tokens, r.finish) for r in responses] == [(0, (EOS,), Finish.EOS)]
    assert [(m.source, m.target, m.num_tokens) for m in moves] == [(6, 4, 3)]
    assert [s.prompt.row for s in group.live] == [2, 1]


def of_lengths(*lengths: int) -> LiveGroup:
    """A group of sequences with so many cached tokens each, once the next token is drawn."""
    group = LiveGroup(first_slot=0, num_slots=len(lengths))
    group.admit(deque(Prompt(row=row, draw=row, tokens=(1,) * length) for row, length in enumerate(lengths)))
    return group


def without_first(group: LiveGroup) -> list[tuple[int, int, int]]:
    """The moves when the first sequence ends: source, target, tokens."""
    tokens = [EOS, *[5] * (len(group.live) - 1)]
    _, moves = group.record(tokens, [0.0] * len(tokens), version=0, finish=ending_after(9))
    return [(move.source, move.target, move.num_tokens) for move in moves]


def test_longer_sequences_stay_before_shorter_ones() -> None:
    group = of_lengths(300, 200, 190, 160, 90, 80, 20)
    assert without_first(group) == [(3, 0, 160), (5, 3, 80), (6, 5, 20)]
    assert [sequence.num_cached for sequence in group.live] == [160, 200, 190, 80, 90, 20]


def test_one_move_is_enough_among_sequences_that_are_alike() -> None:
    assert without_first(of_lengths(*[100] * 20)) == [(19, 0, 100)]


def test_a_slot_that_is_freed_behind_all_others_needs_no_move() -> None:
    assert without_first(of_lengths(100)) == []


def test_bands_of_slots_that_are_refilled_read_little_more_than_the_rows() -> None:
    """With the last sequence in every freed slot they would read 1.6 times as much."""
    draw, group, read, own = random.Random(0), LiveGroup(first_slot=0, num_slots=128), 0, 0
    for turn in range(40):
        group.admit(deque(Prompt(row=row, draw=row, tokens=(1,) * draw.randint(6, 16)) for row in range(16)), turn)
        for _ in range(30):
            tokens = [EOS if draw.random() < 1 / 64 else 5 for _ in group.live]
            group.record(tokens, [0.0] * len(tokens), version=0, finish=ending_after(512))
            cached = [sequence.num_cached for sequence in group.live]
            own += sum(cached)
            read += sum(len(cached[band]) * max(cached[band], default=0) for band in bands(cached))
    assert read < 1.25 * own


def test_a_response_that_reaches_the_limit_ends_by_length() -> None:
    group = LiveGroup(first_slot=0, num_slots=1)
    group.admit(prompts(1))
    assert group.record([7], [0.0], version=0, finish=ending_after(2)) == ([], [])
    responses, _ = group.record([7], [0.0], version=0, finish=ending_after(2))
    assert responses[0].finish is Finish.LENGTH


def test_a_prompt_may_ask_for_less_than_the_limit_but_not_for_more() -> None:
    group = LiveGroup(first_slot=0, num_slots=2)
    group.admit(deque(Prompt(row=n, draw=n, tokens=(1,), max_response=n) for n in (1, 9)))
    responses, _ = group.record([7, 7], [0.0, 0.0], version=0, finish=ending_after(2))
    assert [response.row for response in responses] == [1]
    responses, _ = group.record([7], [0.0], version=0, finish=ending_after(2))
    assert [response.row for response in responses] == [9]


def test_every_token_carries_the_version_that_drew_it() -> None:
    group = LiveGroup(first_slot=0, num_slots=1)
    group.admit(prompts(1), turn=4)
    for version in (3, 3, 5):
        responses, _ = group.record([7], [0.0], version=version, finish=ending_after(3))
    assert responses[0].versions == (3, 3, 5)
    assert responses[0].first_turn == 4


def test_the_end_token_at_the_limit_counts_as_an_end() -> None:
    group = LiveGroup(first_slot=0, num_slots=1)
    group.admit(prompts(1))
    responses, _ = group.record([EOS], [0.0], version=0, finish=ending_after(1))
    assert responses[0].finish is Finish.EOS


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 5))
def test_every_prompt_gets_exactly_its_own_tokens_whatever_the_slots(lengths: list[int], num_slots: int) -> None:
    waiting = prompts(len(lengths))
    group = LiveGroup(first_slot=0, num_slots=num_slots)
    slot_of: dict[int, int] = {}
    found = []
    while waiting or group.live:
        first_new = len(group.live)
        for index, sequence in enumerate(group.admit(waiting)):
            slot_of[sequence.prompt.row] = first_new + index
        assert [slot_of[s.prompt.row] for s in group.live] == list(range(len(group.live)))
        tokens = [EOS if len(s.tokens) + 1 == lengths[s.prompt.row] else s.prompt.row + 1 for s in group.live]
        responses, moves = group.record(tokens, [0.0] * len(tokens), version=0, finish=ending_after(100))
        for move in moves:
            row = next(r for r, slot in slot_of.items() if slot == move.source and r not in {x.row for x in responses})
            slot_of[row] = move.target
        for response in responses:
            slot_of.pop(response.row)
        found += responses
    assert sorted(r.row for r in found) == list(range(len(lengths)))
    for response in found:
        assert response.tokens == (response.row + 1,) * (lengths[response.row] - 1) + (EOS,)
