"""Drafts: where they come from, and which of their tokens a verification keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.runtime.inference.drafts import AcceptanceCounts, Drafter, PromptTexts, ResponseHistory, VerifiedRows
from meshwright.runtime.inference.slots import Finish, PartialResponse, Prompt, Response


@dataclass
class Live:
    """A live sequence with these tokens after its prompt."""

    prompt: Prompt
    tokens: list[int]

    def tokens_from(self, first: int) -> Sequence[int]:
        return self.tokens[first:]


def prompt(row: int, *tokens: int, step: int = 0) -> Prompt:
    return Prompt(row=row, sample_id=10 * step + row, tokens=tokens, step=step)


def response(one: Prompt, *tokens: int) -> Response:
    zeros = (0,) * len(tokens)
    return Response(prompt=one, tokens=tokens, logprobs=zeros, versions=zeros, finish=Finish.EOS)


def test_a_draft_continues_the_longest_suffix_that_occurred_before() -> None:
    texts = PromptTexts((1, 2, 3))
    texts.add((9, 4, 5, 6, 7, 20, 21))
    texts.add((8, 6, 7, 30, 31))  # later, but of the suffix 4 5 6 7 only 6 7 occurs in it
    assert texts.draft(texts.add((4, 5, 6, 7)), 2) == (20, 21)
    assert texts.draft(texts.add((5, 5, 6, 7)), 4) == (30, 31)
    assert texts.draft(texts.add((6, 8)), 4) == ()


def test_a_draft_starts_from_the_prompt_before_anything_is_sampled() -> None:
    texts = PromptTexts((1, 2, 3, 1, 2))
    assert texts.draft(texts.add(()), 2) == (3, 1)
    texts.add((7, 8, 9))
    assert texts.draft(texts.add(()), 2) == (7, 8)  # how another response began


def test_a_sequence_repeats_itself() -> None:
    texts = PromptTexts((1,))
    assert texts.draft(texts.add((5, 6, 7, 5, 6)), 8) == (7, 5, 6)


def test_drafts_come_from_history_from_sequences_in_flight_and_from_samples_that_ended() -> None:
    first, second = prompt(0, 1, 2), prompt(1, 1, 2)
    history = ResponseHistory()
    history.add((1, 2), (11, 12, 13), step=0)
    drafter = Drafter(4, history)
    drafter.begin_period([PartialResponse(prompt=prompt(2, 1, 2), tokens=(21, 22, 23))])
    assert drafter.draft(Live(first, [11, 12]), 4) == (13,)
    assert drafter.draft(Live(first, [11, 12, 21, 22]), 4) == (23,)
    drafter.end(response(second, 31, 32, 33))
    assert drafter.draft(Live(first, [11, 12, 21, 22, 31, 32]), 4) == (33,)
    assert drafter.draft(Live(prompt(3, 7, 8), [31, 32]), 4) == ()  # another prompt


def test_what_a_resumed_period_drafts_depends_on_nothing_but_history_and_flight() -> None:
    history = ResponseHistory()
    history.add((1, 2), (5, 6, 7, 8), step=0)
    again = ResponseHistory()
    for entry, step, tokens in history.entries():
        again.add(entry, tokens, step)
    live = [PartialResponse(prompt=prompt(row, 1, 2), tokens=(5, 6, row)) for row in range(3)]
    used, fresh = Drafter(3, history), Drafter(3, again)
    used.begin_period(())
    used.draft(Live(prompt(9, 1, 2), [5, 6, 7]), 3)
    for drafter, order in ((used, live), (fresh, live[::-1])):
        drafter.begin_period(order)
    sequence = Live(prompt(0, 1, 2), [5, 6])
    assert used.draft(sequence, 3) == fresh.draft(sequence, 3) != ()


def test_a_history_keeps_the_last_responses_of_a_prompt_and_forgets_the_oldest_prompts() -> None:
    history = ResponseHistory(max_tokens=6)
    history.add((1,), (1, 1), step=0)
    history.add((1,), (2, 2), step=0)
    assert history.responses((1,)) == [(1, 1), (2, 2)]
    history.add((1,), (3,), step=4)
    assert history.responses((1,)) == [(3,)]
    history.add((2,), (4,) * 4, step=4)
    history.add((3,), (5,) * 2, step=5)
    assert not history.responses((1,))
    assert [prompt for prompt, _, _ in history.entries()] == [(2,), (3,)]


def test_tokens_are_kept_up_to_the_first_that_is_not_the_drafted_one() -> None:
    rows = VerifiedRows.of([(1, 2, 3), (), (4, 5)])
    #          1 is accepted, 7 is in place of 2; one token; both accepted and one more
    sampled = np.array([1, 7, 3, 9, 6, 4, 5, 8])
    assert rows.num_kept(sampled).tolist() == [2, 1, 3]


def test_acceptance_counts_the_positions_that_were_reached() -> None:
    counts = AcceptanceCounts(3)
    counts.record(np.array([3, 0, 2]), np.array([2, 1, 3]), np.array([2, 1, 3]))
    assert (counts.num_rounds, counts.drafted.tolist(), counts.accepted.tolist()) == (3, [2, 2, 0], [2, 1, 0])
    # The first of three accepted tokens ended the sequence: nothing is known of the others.
    counts.record(np.array([3]), np.array([4]), np.array([1]))
    assert (counts.drafted.tolist(), counts.accepted.tolist()) == ([3, 2, 0], [3, 1, 0])
