"""Follows a program without time, to see whether every rank can go on to its end, and who waits for whom if not."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.planner.program.program import (
    Instruction,
    MoveWeights,
    Program,
    Receive,
    RunStage,
    Send,
    Stream,
    takes_part,
)


def circle_of_waits(program: Program) -> Iterator[str]:
    """Follows the program until it repeats: where no rank can go on, a sentence names the circle they wait in."""
    progress = _run_without_time(program)
    if not progress.waiting:
        return
    path = [min(progress.waiting)]
    while True:
        blocking = progress.waits_for(path[-1])
        others = [rank for rank in blocking if rank in progress.waiting]
        if not others:
            yield f"{_wait(progress, path[-1], blocking[0])}, which has ended: it waits for ever."
            return
        if others[0] in path:
            circle = [*path[path.index(others[0]) :], others[0]]
            waits = [_wait(progress, one, other) for one, other in itertools.pairwise(circle)]
            yield f"a circle of waits: {', and '.join(waits)}; change the order of one of them."
            return
        path.append(others[0])


class _At(NamedTuple):
    """An instruction in a turn."""

    turn: int
    instruction: Instruction

    @property
    def step(self) -> int:
        return self.turn + self.instruction.steps_ahead


@dataclass
class _Progress:
    """How far each rank has come when every rank does what it can: sends never wait, all else waits for its partners.

    `waiting` gives the instruction that each unfinished rank stands before, `streams` what streams to each stage.
    """

    streams: Mapping[str, Stream]
    waiting: dict[int, _At] = field(default_factory=dict)
    sent: set[tuple[str, str, int, int]] = field(default_factory=set)  # producer, consumer, step, owner
    ran: set[tuple[str, int, int]] = field(default_factory=set)  # stage, step, rank
    num_come: Counter[tuple[str, int]] = field(default_factory=Counter)  # ranks that have reached it in a turn

    def can_go_on(self, rank: int) -> bool:
        turn, instruction = self.waiting[rank]
        if isinstance(instruction, Send | Receive):
            return not self.waits_for(rank)
        return self.num_come[instruction.name, turn] == len(instruction.ranks) and not self._streaming_to(rank)

    def waits_for(self, rank: int) -> tuple[int, ...]:
        """The ranks whose doing keeps this one from going on."""
        at = self.waiting[rank]
        instruction = at.instruction
        if isinstance(instruction, Receive):
            parcel = instruction.producer, instruction.consumer, at.step
            return tuple(owner for owner in instruction.owners if (*parcel, owner) not in self.sent)
        if isinstance(instruction, Send):
            return ()
        absent = tuple(other for other in instruction.ranks if self.waiting.get(other) != at)
        return absent or self._streaming_to(rank)

    def _streaming_to(self, rank: int) -> tuple[int, ...]:
        """The owners that have not sent the last of what streams to the stage that the rank stands before."""
        at = self.waiting[rank]
        stream = self.streams.get(at.instruction.name)
        if stream is None:
            return ()
        return tuple(owner for owner in stream.owners if (stream.producer, at.step, owner) not in self.ran)


def _wait(progress: _Progress, rank: int, other: int) -> str:
    return f"rank {rank} waits in {progress.waiting[rank].instruction.name!r} for rank {other}"


def _run_without_time(program: Program) -> _Progress:
    remaining = _instructions_of_ranks(program)
    progress = _Progress({stream.consumer: stream for stream in program.streams})
    ready = deque(sorted(remaining))
    while ready:
        rank = ready.popleft()
        if rank not in progress.waiting:
            if not remaining[rank]:
                continue
            at = remaining[rank].popleft()
            progress.waiting[rank] = at
            progress.num_come[at.instruction.name, at.turn] += 1
        if progress.can_go_on(rank):
            ready.extend(_finish(progress, rank))
    return progress


def _finish(progress: _Progress, rank: int) -> list[int]:
    """Completes the instruction that the rank stands before; the ranks that may be able to go on now."""
    at = progress.waiting[rank]
    instruction = at.instruction
    if isinstance(instruction, RunStage | MoveWeights):
        for member in instruction.ranks:
            del progress.waiting[member]
            progress.ran.add((instruction.name, at.step, member))
        return [*instruction.ranks, *_streamed_to(progress, instruction.name)]
    del progress.waiting[rank]
    if isinstance(instruction, Receive):
        return [rank]
    progress.sent.add((instruction.producer, instruction.consumer, at.step, rank))
    return [rank, *(other for other in instruction.targets if _is_receiving(progress, other))]


def _streamed_to(progress: _Progress, producer: str) -> list[int]:
    """The ranks that stand before a stage to which the producer streams."""
    consumers = {stream.consumer for stream in progress.streams.values() if stream.producer == producer}
    return [rank for rank, at in progress.waiting.items() if at.instruction.name in consumers]


def _is_receiving(progress: _Progress, rank: int) -> bool:
    return rank in progress.waiting and isinstance(progress.waiting[rank].instruction, Receive)


def _instructions_of_ranks(program: Program) -> dict[int, deque[_At]]:
    """Every rank's instructions over as many steps as pass before a turn holds all that it ever holds, and one more."""
    steps = range(program.most_ahead + 2)
    remaining: dict[int, deque[_At]] = {}
    for turn in program.turns(steps):
        for instruction in program.instructions:
            if takes_part(instruction, turn, steps):
                for rank in instruction.ranks:
                    remaining.setdefault(rank, deque()).append(_At(turn, instruction))
    return remaining
