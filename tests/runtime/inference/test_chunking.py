"""Streams: the chunks of a response are the response, whole and in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.runtime.inference.chunk_streaming import Chunk, Chunker
from meshwright.runtime.inference.slots import Finish, LiveGroup, PartialResponse, Prompt
from meshwright.runtime.inference.stopping import Stopping


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 5))
def test_the_chunks_of_a_response_join_to_the_response(lengths: list[int], num_slots: int, chunk_tokens: int) -> None:
    waiting = deque(
        Prompt(row=n % 2, step=n // 2, sample_id=n, tokens=(1,), max_response=k) for n, k in enumerate(lengths)
    )
    group, found = LiveGroup(0, num_slots), []
    told: dict[int, list[Chunk]] = {}

    def read(chunks: Sequence[Chunk], _: int) -> None:
        for chunk in chunks:
            told.setdefault(chunk.prompt.sample_id, []).append(chunk)

    stream, stopping = Chunker(chunk_tokens, read), Stopping(eos_tokens=frozenset(), max_response=99)
    while waiting or group.live:
        while waiting and not group.is_full:
            group.add(PartialResponse(prompt=waiting.popleft()))
        tokens = [100 * sequence.prompt.sample_id + sequence.num_sampled for sequence in group.live]
        ended, _ = group.record(np.array(tokens), np.zeros(len(tokens)), version=0, finish=stopping.finish)
        stream.on_round(group.live, ended)
        found += ended
    assert len(found) == len(lengths) == len(told)
    for response in found:
        chunks = told[response.prompt.sample_id]
        assert tuple(token for chunk in chunks for token in chunk.tokens) == response.tokens
        assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [Finish.LENGTH]
        assert all(len(chunk.tokens) == chunk_tokens for chunk in chunks[:-1])


def test_chunks_that_become_whole_together_are_handed_over_together() -> None:
    handed: list[list[int]] = []
    stream = Chunker(2, lambda chunks, _: handed.append([chunk.prompt.row for chunk in chunks]))
    group = LiveGroup(0, 3)
    for row in range(3):
        group.add(PartialResponse(prompt=Prompt(row=row, sample_id=row, tokens=(1,))))
    for _ in range(3):
        group.record(np.full(3, 5), np.zeros(3), version=0, finish=lambda _: {})
        stream.on_round(group.live, [])
    assert handed == [[0, 1, 2]]
