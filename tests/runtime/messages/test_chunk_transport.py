"""Messages of a stream: every rank of a reader's replica gets the same chunks, in the order of each sequence."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from meshwright.runtime.messages.streaming import ChunkMessage, ChunkReader, ChunkSender, TokenChunk
from meshwright.runtime.messages.transport import Transport, unpack
from tests.runtime.ranks import run_on_ranks

OWNERS, REPLICA = (0, 1), (2, 3)
NUM_SEQUENCES = 6


def chunks_of(sequence: int) -> list[TokenChunk]:
    """A prompt of one token and chunks that count on from it."""
    parts = [TokenChunk(sequence, (10 * sequence,)), *(TokenChunk(sequence, (10 * sequence + n,)) for n in range(1, 4))]
    return [*parts, TokenChunk(sequence, (), is_last=True)]


def turns(num_turns: int) -> list[list[ChunkMessage]]:
    """What a rank read in each turn; owners send the chunks of their sequences, and later ones after fewer others."""
    group = dist.group.WORLD
    assert group is not None
    transport, rank = Transport(group), dist.get_rank()
    read = []
    for _ in range(num_turns):
        if rank in OWNERS:
            sender = ChunkSender(REPLICA[:1], transport, channel=3)
            mine = [chunks_of(sequence) for sequence in range(rank, NUM_SEQUENCES, len(OWNERS))]
            for chunks in zip(*mine, strict=True):
                sender.send(chunks)
            sender.end({sequence: sequence // 2 for sequence in range(rank, NUM_SEQUENCES, len(OWNERS))})
        if rank in REPLICA:
            read.append(list(ChunkReader(OWNERS, REPLICA, transport, channel=3).messages()))
    transport.flush()
    return read


@pytest.mark.slow
def test_all_ranks_of_a_replica_read_every_chunk_once_and_in_the_same_order() -> None:
    of_ranks = run_on_ranks(4, turns, 3)
    assert of_ranks[2] == of_ranks[3]
    assert len(of_ranks[2]) == 3
    for messages in of_ranks[2]:
        for sequence in range(NUM_SEQUENCES):
            got = [chunk for message in messages for chunk in message.chunks if chunk.sequence == sequence]
            assert got == chunks_of(sequence)
        assert all(len({p.sequence for p in message.chunks}) == len(message.chunks) for message in messages)
        assert [message.delivered for message in messages[:-1]] == [None] * (len(messages) - 1)
        assert messages[-1].delivered == {sequence: sequence // 2 for sequence in range(NUM_SEQUENCES)}


def passes(slow: int) -> list[tuple[TokenChunk, ...]]:
    """What went through the model together at a reader of two owners, when one of the three ranks is slow."""
    group = dist.group.WORLD
    assert group is not None
    transport, rank = Transport(group), dist.get_rank()
    pause = 0.05 if rank == slow else 0.0
    found = []
    if rank in OWNERS:
        sender = ChunkSender((2,), transport, channel=0)
        mine = range(rank, NUM_SEQUENCES, len(OWNERS))
        for chunks in zip(*map(chunks_of, mine), strict=True):
            time.sleep(pause)
            sender.send(chunks)
        sender.end({sequence: sequence for sequence in mine})
    if rank == 2:
        for message in ChunkReader(OWNERS, (2,), transport, channel=0).messages():
            time.sleep(pause)
            found.append(message.chunks)
    transport.flush()
    return sorted(found, key=str)


@pytest.mark.slow
def test_what_goes_through_a_model_together_does_not_depend_on_when_it_came() -> None:
    """The last digits of what is computed do depend on it, and a run is repeated bit for bit."""
    none_slow, *others = (run_on_ranks(4, passes, slow)[2] for slow in (3, 0, 1, 2))
    assert {len(chunks) for chunks in none_slow} == {0, NUM_SEQUENCES // len(OWNERS)}
    assert others == [none_slow] * 3


class Sent:
    """A transport that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[ChunkMessage] = []

    def send(self, message: torch.Tensor, _: int, __: int) -> None:
        self.messages.append(unpack(message))


def test_chunks_wait_for_as_many_as_go_through_the_model_together_or_as_sequences_are_live() -> None:
    sent = Sent()
    sender = ChunkSender((0,), sent, channel=0, rows=3)  # type: ignore[arg-type]
    for number, live in ((0, 9), (1, 9), (2, 9), (3, 2), (4, 2), (5, 0), (6, 9)):
        sender.send([TokenChunk(number, (number,))], live)
    sender.end({})
    assert [[chunk.sequence for chunk in message.chunks] for message in sent.messages] == [
        [0, 1, 2],
        [3, 4],
        [5],
        [6],
        [],
    ]


def test_a_chunk_that_waits_goes_together_with_the_next_of_its_sequence() -> None:
    sent = Sent()
    sender = ChunkSender((0,), sent, channel=0, rows=3)  # type: ignore[arg-type]
    sender.send([TokenChunk(7, (1, 2))], 9)
    sender.send([TokenChunk(7, (3,), is_last=True), TokenChunk(8, (4,))], 9)
    sender.end({7: 0})
    assert sent.messages[0].chunks == (TokenChunk(7, (1, 2, 3), is_last=True), TokenChunk(8, (4,)))
    assert sent.messages[1].delivered == {7: 0}


def shares() -> list[tuple[int, int]]:
    """The sequences and rows that reach the readers of a stage of two replicas."""
    group = dist.group.WORLD
    assert group is not None
    transport, rank = Transport(group), dist.get_rank()
    if rank == 0:
        sender = ChunkSender((2, 3), transport, channel=0)
        sender.send(TokenChunk(sequence, (sequence,)) for sequence in range(NUM_SEQUENCES))
        sender.end({sequence: sequence for sequence in range(NUM_SEQUENCES)})
    read = list(ChunkReader((0,), (rank,), transport, channel=0).messages()) if rank in REPLICA else []
    transport.flush()
    assert {p.sequence for message in read for p in message.chunks} == set((read[-1].delivered or {}) if read else ())
    return [(p.sequence, p.tokens[0]) for message in read for p in message.chunks]


@pytest.mark.slow
def test_a_sequence_goes_to_one_replica() -> None:
    _, _, one, other = run_on_ranks(4, shares)
    assert one == [(0, 0), (2, 2), (4, 4)]
    assert other == [(1, 1), (3, 3), (5, 5)]
