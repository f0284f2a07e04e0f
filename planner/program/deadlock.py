"""Deadlock detection: executes a program without time and reports which rank waits for which if it cannot end."""

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
    is_active,
)


def find_deadlock(program: Program) -> Iterator[str]:
    """Execute the program until it repeats; if no rank can continue, yield a sentence that names the deadlock."""
    progress = _run_without_time(program)
    if not progress.waiting:
        return
    path = [min(progress.waiting)]
    while True:
        blocking = progress.waits_for(path[-1])
        still_waiting = [rank for rank in blocking if rank in progress.waiting]
        if not still_waiting:
            yield f"{_wait(progress, path[-1], blocking[0])}, which has ended: it waits for ever."
            return
        if still_waiting[0] in path:
            circle = [*path[path.index(still_waiting[0]) :], still_waiting[0]]
            waits = [_wait(progress, one, other) for one, other in itertools.pairwise(circle)]
            yield f"deadlock: {', and '.join(waits)}; change the order of one of them."
            return
        path.append(still_waiting[0])


class _Scheduled(NamedTuple):
    """An instruction in a period."""

    turn: int
    instruction: Instruction

    @property
    def step(self) -> int:
        return self.turn + self.instruction.steps_ahead


@dataclass
class _Progress:
    """The progress of all ranks: sends never wait, every other instruction waits for its partners.

    `waiting` has the next instruction of each unfinished rank, `streams` the stream to each stage that has one.
    """

    streams: Mapping[str, Stream]
    waiting: dict[int, _Scheduled] = field(default_factory=dict)
    sent: set[tuple[str, str, int, int]] = field(default_factory=set)  # producer, consumer, step, owner
    ran: set[tuple[str, int, int]] = field(default_factory=set)  # stage, step, rank
    num_come: Counter[tuple[str, int]] = field(
        default_factory=Counter
    )  # ranks that have reached an instruction in a period

    def can_go_on(self, rank: int) -> bool:
        turn, instruction = self.waiting[rank]
        if isinstance(instruction, Send | Receive):
            return not self.waits_for(rank)
        return self.num_come[instruction.name, turn] == len(instruction.ranks) and not self._streaming_to(rank)

    def waits_for(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that block this one."""
        scheduled = self.waiting[rank]
        instruction = scheduled.instruction
        if isinstance(instruction, Receive):
            message = instruction.producer, instruction.consumer, scheduled.step
            return tuple(owner for owner in instruction.owners if (*message, owner) not in self.sent)
        if isinstance(instruction, Send):
            return ()
        missing = tuple(other for other in instruction.ranks if self.waiting.get(other) != scheduled)
        return missing or self._streaming_to(rank)

    def _streaming_to(self, rank: int) -> tuple[int, ...]:
        """Return the owners that have not finished streaming to the stage that the rank is to run next."""
        scheduled = self.waiting[rank]
        stream = self.streams.get(scheduled.instruction.name)
        if stream is None:
            return ()
        return tuple(owner for owner in stream.owners if (stream.producer, scheduled.step, owner) not in self.ran)


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
            scheduled = remaining[rank].popleft()
            progress.waiting[rank] = scheduled
            progress.num_come[scheduled.instruction.name, scheduled.turn] += 1
        if progress.can_go_on(rank):
            ready.extend(_finish(progress, rank))
    return progress


def _finish(progress: _Progress, rank: int) -> list[int]:
    """Complete the rank's next instruction; return the ranks that may be able to continue now."""
    scheduled = progress.waiting[rank]
    instruction = scheduled.instruction
    if isinstance(instruction, RunStage | MoveWeights):
        for member in instruction.ranks:
            del progress.waiting[member]
            progress.ran.add((instruction.name, scheduled.step, member))
        return [*instruction.ranks, *_streamed_to(progress, instruction.name)]
    del progress.waiting[rank]
    if isinstance(instruction, Receive):
        return [rank]
    progress.sent.add((instruction.producer, instruction.consumer, scheduled.step, rank))
    return [rank, *(other for other in instruction.targets if _is_receiving(progress, other))]


def _streamed_to(progress: _Progress, producer: str) -> list[int]:
    """Return the ranks that wait to run a stage to which the producer streams."""
    consumers = {stream.consumer for stream in progress.streams.values() if stream.producer == producer}
    return [rank for rank, at in progress.waiting.items() if at.instruction.name in consumers]


def _is_receiving(progress: _Progress, rank: int) -> bool:
    return rank in progress.waiting and isinstance(progress.waiting[rank].instruction, Receive)


def _instructions_of_ranks(program: Program) -> dict[int, deque[_Scheduled]]:
    """Return every rank's instructions up to the first period with all instructions, and one more period."""
    steps = range(program.most_ahead + 2)
    remaining: dict[int, deque[_Scheduled]] = {}
    for turn in program.periods(steps):
        for instruction in program.instructions:
            if is_active(instruction, turn, steps):
                for rank in instruction.ranks:
                    remaining.setdefault(rank, deque()).append(_Scheduled(turn, instruction))
    return remaining
