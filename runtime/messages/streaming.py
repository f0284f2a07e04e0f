"""Streaming of responses from generation to the stages that score them, chunk by chunk while they are sampled.

Sends do not wait. The first rank of a replica takes messages from all senders in the order in which they arrive, and
forwards them to its other ranks, so that the whole replica follows one order. The last digits of a result depend on
which rows share a forward pass, and must not depend on when messages arrive. So each message is one pass, and the
sender decides which chunks are in it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.program import Stream, lower
from meshwright.runtime.messages.transport import Transport, pack, unpack


@dataclass(frozen=True)
class TokenChunk:
    """The next tokens of a sequence: first its prompt, then chunks of its response."""

    sequence: int
    """The number of the sequence over all prompt batches: step x batch size + row."""
    tokens: tuple[int, ...]
    is_last: bool = False


@dataclass(frozen=True)
class ChunkMessage:
    """Chunks that a reader takes in one forward pass, or the end of a sender's period."""

    chunks: tuple[TokenChunk, ...] = ()
    delivered: Mapping[int, int] | None = None
    """The row of the batch that each sequence fills, by sequence; only in a sender's last message of a period."""


class ChunkSender:
    """The sending end of one stream. The number of a sequence decides which replica of the reading stage it goes to."""

    def __init__(self, leaders: Sequence[int], transport: Transport, channel: int, *, rows: int = 1) -> None:
        """`leaders` are the first ranks of the reader's replicas; each replica takes up to `rows` rows in a pass."""
        self._leaders, self._transport, self._channel, self._rows = leaders, transport, channel, rows
        self._pending: list[dict[int, TokenChunk]] = [{} for _ in leaders]

    def send(self, chunks: Iterable[TokenChunk], num_live: int = 0) -> None:
        """Queues chunks for the replicas that read their sequences, and sends full messages.

        A replica's message is full with `rows` sequences, or with its share of the `num_live` sequences that are
        still being sampled. Further chunks of a sequence join its chunk in the queue.
        """
        for chunk in chunks:
            pending = self._pending[chunk.sequence % len(self._leaders)]
            before = pending.get(chunk.sequence)
            pending[chunk.sequence] = replace(chunk, tokens=before.tokens + chunk.tokens) if before else chunk
        full_size = min(self._rows, -(-num_live // len(self._leaders)))
        for replica, pending in enumerate(self._pending):
            if len(pending) >= full_size:
                self._send_pending(replica)

    def end(self, delivered: Mapping[int, int]) -> None:
        """Sends all queued chunks and the end of the period; `delivered` maps sequences to rows of the batch."""
        for replica in range(len(self._leaders)):
            self._send_pending(replica)
            rows = {number: row for number, row in delivered.items() if number % len(self._leaders) == replica}
            self._post(replica, ChunkMessage(delivered=rows))

    def _send_pending(self, replica: int) -> None:
        if pending := self._pending[replica]:
            self._post(replica, ChunkMessage(tuple(pending.values())))
            pending.clear()

    def _post(self, replica: int, message: ChunkMessage) -> None:
        self._transport.send(pack(message), self._leaders[replica], self._channel)


class ChunkReader:
    """The reading end of one stream, on a rank of a stage that reads it."""

    def __init__(self, owners: Sequence[int], replica: Sequence[int], transport: Transport, channel: int) -> None:
        """`owners` are the ranks that send: one for each replica that generates.

        `replica` are the ranks of this rank's replica; the first of them receives from the owners.
        """
        self._owners, self._replica, self._transport, self._channel = owners, replica, transport, channel

    def messages(self) -> Iterator[ChunkMessage]:
        """Yields the owners' messages, each for one forward pass, until every owner has ended the period.

        The last one has the delivered rows of all owners. All ranks of the replica get the same messages.
        """
        leader = self._replica[0]
        if self._transport.rank == leader:
            for message in self._arriving():
                for rank in self._replica[1:]:
                    self._transport.send(pack(message), rank, self._channel)
                yield message
            return
        while True:
            message = self._read(leader)
            yield message
            if message.delivered is not None:
                return

    def _arriving(self) -> Iterator[ChunkMessage]:
        """Yields the owners' messages as they arrive, and last the delivered rows of all owners."""
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
        """Puts an owner's messages of one period into the queue."""
        try:
            while True:
                message = self._read(owner)
                arrived.put(message)
                if message.delivered is not None:
                    return
        except BaseException as error:
            arrived.put(error)

    def _read(self, rank: int) -> ChunkMessage:
        message: ChunkMessage = unpack(self._transport.receive(rank, self._channel))
        return message


@dataclass(frozen=True)
class OutgoingStream:
    """A stream that this rank sends, and the maximum number of response tokens in a chunk of it."""

    chunk_tokens: int
    sender: ChunkSender


class Streaming:
    """All stream ends on one rank: `sending` has one for every stage that reads, `readers` are by stage."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        """`transport` may also carry the channels of the program; streams use the numbers after those."""
        program = lower(plan)
        self.sending: list[OutgoingStream] = []
        self.readers: dict[str, ChunkReader] = {}
        for channel, stream in enumerate(program.streams, start=len(program.channels)):
            replicas = _replicas(plan, stream)
            if transport.rank in stream.owners:
                leaders = [replica[0] for replica in replicas]
                rows = plan.placement(stream.consumer).schedule.micro_batch_size
                sender = ChunkSender(leaders, transport, channel, rows=rows)
                self.sending.append(OutgoingStream(stream.chunk_tokens, sender))
            for replica in replicas:
                if transport.rank in replica:
                    self.readers[stream.consumer] = ChunkReader(stream.owners, replica, transport, channel)


def _replicas(plan: Plan, stream: Stream) -> list[tuple[int, ...]]:
    """The ranks of each replica of the stage that reads a stream."""
    layout, pool = plan.placement(stream.consumer).layout, plan.pool_of(stream.consumer)
    replicas: list[list[int]] = [[] for _ in range(layout.dp)]
    for index in range(layout.num_ranks):
        replicas[layout.coordinates(index).dp].append(pool.first_rank + index)
    return [tuple(ranks) for ranks in replicas]
