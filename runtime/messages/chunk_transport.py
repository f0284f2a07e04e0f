"""This rank's ends of what streams from generation: chunks of responses as letters, and their order at the reader.

Sends do not wait. A replica's first rank takes letters in the order in which they come, whoever sends them, makes up
the passes through the model and tells them to the other ranks, so that all of the replica follow one order.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import GENERATE
from meshwright.planner.program.program import Stream, lower
from meshwright.profiles.stages import STAGE_BY_NAME, TRAIN_STAGE
from meshwright.runtime.messages.transport import Mail, packed, unpacked


@dataclass(frozen=True)
class Piece:
    """The next tokens of a sequence: first its prompt, then chunks of its response."""

    sequence: int
    """Of the prompt batches laid end to end, the place of its prompt: step x batch size + row."""
    tokens: tuple[int, ...]
    is_last: bool = False


@dataclass(frozen=True)
class Letter:
    pieces: tuple[Piece, ...] = ()
    delivered: Mapping[int, int] | None = None
    """In a sender's last letter of a turn: by sequence, the row of the batch that it fills."""


class ChunkSender:
    """An owner's end of one stream. A sequence goes to one replica of the reader, chosen by its number."""

    def __init__(self, leaders: Sequence[int], mail: Mail, channel: int) -> None:
        """`leaders` are the first ranks of the reader's replicas."""
        self._leaders, self._mail, self._channel = leaders, mail, channel

    def send(self, pieces: Iterable[Piece]) -> None:
        parts: dict[int, list[Piece]] = {}
        for piece in pieces:
            parts.setdefault(piece.sequence % len(self._leaders), []).append(piece)
        for replica, part in parts.items():
            self._post(replica, Letter(tuple(part)))

    def end(self, delivered: Mapping[int, int]) -> None:
        """Ends the turn, in which these sequences fill these rows of the batch."""
        for replica in range(len(self._leaders)):
            mine = {number: row for number, row in delivered.items() if number % len(self._leaders) == replica}
            self._post(replica, Letter(delivered=mine))

    def _post(self, replica: int, letter: Letter) -> None:
        self._mail.send(packed(letter), self._leaders[replica], self._channel)


@dataclass
class _Backlog:
    """What has come and has not been passed on."""

    num_open: int
    """Owners that have not ended the turn."""
    pieces: dict[int, deque[Piece]] = field(default_factory=dict)
    delivered: dict[int, int] = field(default_factory=dict)

    def add(self, letter: Letter) -> None:
        for piece in letter.pieces:
            self.pieces.setdefault(piece.sequence, deque()).append(piece)
        if letter.delivered is not None:
            self.num_open -= 1
            self.delivered |= letter.delivered

    def take(self) -> Letter:
        """The next piece of every sequence that has one."""
        found = tuple(pieces.popleft() for pieces in self.pieces.values())
        self.pieces = {number: pieces for number, pieces in self.pieces.items() if pieces}
        return Letter(found)


class ChunkReader:
    """The end of one stream on a rank of a stage that reads it."""

    def __init__(self, owners: Sequence[int], replica: Sequence[int], mail: Mail, channel: int) -> None:
        """`replica` are the ranks of this rank's replica, the one that takes the letters first."""
        self._owners, self._replica, self._mail, self._channel = owners, replica, mail, channel

    def passes(self) -> Iterator[Letter]:
        """What to take up next, one piece of a sequence at most, until every owner has ended the turn.

        The last one tells what was delivered. All ranks of the replica get the same ones.
        """
        leader = self._replica[0]
        if self._mail.rank == leader:
            for letter in self._made_up():
                for rank in self._replica[1:]:
                    self._mail.send(packed(letter), rank, self._channel)
                yield letter
            return
        while True:
            letter = self._read(leader)
            yield letter
            if letter.delivered is not None:
                return

    def _made_up(self) -> Iterator[Letter]:
        arriving: queue.SimpleQueue[Letter | BaseException] = queue.SimpleQueue()
        for owner in self._owners:
            threading.Thread(target=self._listen, args=(owner, arriving), name=f"from {owner}", daemon=True).start()
        backlog = _Backlog(num_open=len(self._owners))
        while backlog.num_open or backlog.pieces:
            while backlog.num_open and not (arriving.empty() and backlog.pieces):
                letter = arriving.get()
                if isinstance(letter, BaseException):
                    raise letter
                backlog.add(letter)
            if backlog.pieces:
                yield backlog.take()
        yield Letter(delivered=backlog.delivered)

    def _listen(self, owner: int, arriving: queue.SimpleQueue[Letter | BaseException]) -> None:
        """Takes an owner's letters of one turn."""
        try:
            while True:
                letter = self._read(owner)
                arriving.put(letter)
                if letter.delivered is not None:
                    return
        except BaseException as error:
            arriving.put(error)

    def _read(self, rank: int) -> Letter:
        letter: Letter = unpacked(self._mail.receive(rank, self._channel))
        return letter


@dataclass(frozen=True)
class ChunkSending:
    chunk_tokens: int
    sender: ChunkSender


class Streaming:
    """All ends on one rank: `sending` has one for every stage that reads, `readers` are by stage."""

    def __init__(self, plan: Plan, mail: Mail) -> None:
        """`mail` may carry what the program's channels number besides."""
        program = lower(plan)
        self.sending: list[ChunkSending] = []
        self.readers: dict[str, ChunkReader] = {}
        for channel, stream in enumerate(program.streams, start=len(program.channels)):
            replicas = _replicas(plan, stream)
            if mail.rank in stream.owners:
                leaders = [replica[0] for replica in replicas]
                self.sending.append(ChunkSending(stream.chunk_tokens, ChunkSender(leaders, mail, channel)))
            for replica in replicas:
                if mail.rank in replica:
                    self.readers[stream.consumer] = ChunkReader(stream.owners, replica, mail, channel)


def streaming_violations(plan: Plan) -> tuple[str, ...]:
    """What cannot be streamed: a stage whose weights are trained between two chunks of one response."""
    schedule = plan.placement(GENERATE).schedule
    if schedule.batches_in_flight == 1 and not schedule.overcommit:
        return ()
    return tuple(
        f"{p.stage}: chunk_tokens={p.schedule.chunk_tokens} while {GENERATE} keeps sequences in flight from turn to "
        f"turn, and {TRAIN_STAGE[p.role]} changes the weights between their chunks; use chunk_tokens=0."
        for p in plan.placements
        if p.schedule.chunk_tokens and STAGE_BY_NAME[p.stage].role in TRAIN_STAGE
    )


def _replicas(plan: Plan, stream: Stream) -> list[tuple[int, ...]]:
    """The ranks of each replica of the stage that reads a stream."""
    layout, pool = plan.placement(stream.consumer).layout, plan.pool_of(stream.consumer)
    found: list[list[int]] = [[] for _ in range(layout.dp)]
    for index in range(layout.num_ranks):
        found[layout.coordinates(index).dp].append(pool.first_rank + index)
    return [tuple(ranks) for ranks in found]
