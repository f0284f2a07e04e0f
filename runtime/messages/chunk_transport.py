"""This rank's ends of what streams from generation: chunks of responses as messages, and their order at the reader.

Sends do not wait. A replica's first rank takes messages in the order in which they come, whoever sends them, and passes
them on to its other ranks, so that all of the replica follow one order. What is computed together decides the last
digits of what is computed, and must not depend on when messages come: so a message goes through the model by itself,
and it is the sender who has chunks wait for each other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.program import Stream, lower
from meshwright.runtime.messages.transport import Transport, packed, unpacked


@dataclass(frozen=True)
class TokenChunk:
    """The next tokens of a sequence: first its prompt, then chunks of its response."""

    sequence: int
    """Of the prompt batches laid end to end, the place of its prompt: step x batch size + row."""
    tokens: tuple[int, ...]
    is_last: bool = False


@dataclass(frozen=True)
class ChunkMessage:
    """Chunks that go to a reader at once, or the end of a sender's turn."""

    chunks: tuple[TokenChunk, ...] = ()
    delivered: Mapping[int, int] | None = None
    """In a sender's last message of a turn: by sequence, the row of the batch that it fills."""


class ChunkSender:
    """An owner's end of one stream. A sequence goes to one replica of the reader, chosen by its number."""

    def __init__(self, leaders: Sequence[int], transport: Transport, channel: int, *, rows: int = 1) -> None:
        """`leaders` are the first ranks of the reader's replicas, each of which takes so many `rows` at once."""
        self._leaders, self._transport, self._channel, self._rows = leaders, transport, channel, rows
        self._waiting: list[dict[int, TokenChunk]] = [{} for _ in leaders]

    def send(self, chunks: Iterable[TokenChunk], num_live: int = 0) -> None:
        """Sends chunks to the replicas that read their sequences, one message to each.

        Those of a replica wait until there are as many as it takes at once, or as many as its share of the live
        sequences is, which have one each before any has two.
        """
        for chunk in chunks:
            waiting = self._waiting[chunk.sequence % len(self._leaders)]
            before = waiting.get(chunk.sequence)
            waiting[chunk.sequence] = replace(chunk, tokens=before.tokens + chunk.tokens) if before else chunk
        enough = min(self._rows, -(-num_live // len(self._leaders)))
        for replica, waiting in enumerate(self._waiting):
            if len(waiting) >= enough:
                self._post_waiting(replica)

    def end(self, delivered: Mapping[int, int]) -> None:
        """Ends the turn, in which these sequences fill these rows of the batch."""
        for replica in range(len(self._leaders)):
            self._post_waiting(replica)
            mine = {number: row for number, row in delivered.items() if number % len(self._leaders) == replica}
            self._post(replica, ChunkMessage(delivered=mine))

    def _post_waiting(self, replica: int) -> None:
        if waiting := self._waiting[replica]:
            self._post(replica, ChunkMessage(tuple(waiting.values())))
            waiting.clear()

    def _post(self, replica: int, message: ChunkMessage) -> None:
        self._transport.send(packed(message), self._leaders[replica], self._channel)


class ChunkReader:
    """The end of one stream on a rank of a stage that reads it."""

    def __init__(self, owners: Sequence[int], replica: Sequence[int], transport: Transport, channel: int) -> None:
        """`replica` are the ranks of this rank's replica, the one that takes the messages first."""
        self._owners, self._replica, self._transport, self._channel = owners, replica, transport, channel

    def passes(self) -> Iterator[ChunkMessage]:
        """What to take up next, an owner's message, until every owner has ended the turn.

        The last one tells what was delivered. All ranks of the replica get the same ones.
        """
        leader = self._replica[0]
        if self._transport.rank == leader:
            for message in self._arriving():
                for rank in self._replica[1:]:
                    self._transport.send(packed(message), rank, self._channel)
                yield message
            return
        while True:
            message = self._read(leader)
            yield message
            if message.delivered is not None:
                return

    def _arriving(self) -> Iterator[ChunkMessage]:
        """The owners' messages as they come, and what all of them have delivered at last."""
        arrived: queue.SimpleQueue[ChunkMessage | BaseException] = queue.SimpleQueue()
        for owner in self._owners:
            threading.Thread(target=self._listen, args=(owner, arrived), name=f"from {owner}", daemon=True).start()
        num_open, delivered = len(self._owners), dict[int, int]()
        while num_open:
            message = arrived.get()
            if isinstance(message, BaseException):
                raise message
            if message.delivered is None:
                yield message
            else:
                num_open -= 1
                delivered |= message.delivered
        yield ChunkMessage(delivered=delivered)

    def _listen(self, owner: int, arrived: queue.SimpleQueue[ChunkMessage | BaseException]) -> None:
        """Takes an owner's messages of one turn."""
        try:
            while True:
                message = self._read(owner)
                arrived.put(message)
                if message.delivered is not None:
                    return
        except BaseException as error:
            arrived.put(error)

    def _read(self, rank: int) -> ChunkMessage:
        message: ChunkMessage = unpacked(self._transport.receive(rank, self._channel))
        return message


@dataclass(frozen=True)
class ChunkSending:
    """A stream that this rank owns, and how many tokens of a response go into a chunk of it at most."""

    chunk_tokens: int
    sender: ChunkSender


class Streaming:
    """All ends on one rank: `sending` has one for every stage that reads, `readers` are by stage."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        """`transport` may carry what the program's channels number besides."""
        program = lower(plan)
        self.sending: list[ChunkSending] = []
        self.readers: dict[str, ChunkReader] = {}
        for channel, stream in enumerate(program.streams, start=len(program.channels)):
            replicas = _replicas(plan, stream)
            if transport.rank in stream.owners:
                leaders = [replica[0] for replica in replicas]
                rows = plan.placement(stream.consumer).schedule.micro_batch_size
                sender = ChunkSender(leaders, transport, channel, rows=rows)
                self.sending.append(ChunkSending(stream.chunk_tokens, sender))
            for replica in replicas:
                if transport.rank in replica:
                    self.readers[stream.consumer] = ChunkReader(stream.owners, replica, transport, channel)


def _replicas(plan: Plan, stream: Stream) -> list[tuple[int, ...]]:
    """The ranks of each replica of the stage that reads a stream."""
    layout, pool = plan.placement(stream.consumer).layout, plan.pool_of(stream.consumer)
    found: list[list[int]] = [[] for _ in range(layout.dp)]
    for index in range(layout.num_ranks):
        found[layout.coordinates(index).dp].append(pool.first_rank + index)
    return [tuple(ranks) for ranks in found]
