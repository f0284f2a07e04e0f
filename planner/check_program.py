"""Checks a program before anything follows it: hand-overs match, every rank has what it reads, no circle of waits.

It reads only the program and the stages' fields, and nothing of how the program was made.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.planner.program import Instruction, MoveWeights, Program, Receive, RunStage, Send, takes_part
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import STAGE_BY_NAME, STAGES

Check = Callable[[Program], Iterator[str]]

_WRITER = {name: stage.name for stage in STAGES for name in stage.writes}


def check_program(program: Program) -> tuple[str, ...]:
    """One sentence per fault; empty for a program that every rank can follow to its end, any number of times."""
    return tuple(sentence for check in _CHECKS for sentence in check(program))


def require_sound(program: Program) -> None:
    """Raises BadInput with the first fault."""
    for sentence in check_program(program):
        raise BadInput(f"program: {sentence}")


def _sends_and_receives_match(program: Program) -> Iterator[str]:
    """Each pair of producer and consumer has one send and one receive with the same ends, later in the order or in
    a later turn."""
    sends, receives = _by_pair(program, Send), _by_pair(program, Receive)
    for pair, (send, *others) in sends.items():
        if others:
            yield f"{send.name!r} is in the program {1 + len(others)} times; a pair of stages has one."
        if pair not in receives:
            yield f"{send.name!r} has no receive; what it sends would wait for ever."
    for pair, (receive, *others) in receives.items():
        if others:
            yield f"{receive.name!r} is in the program {1 + len(others)} times; a pair of stages has one."
        if pair not in sends:
            yield f"{receive.name!r} has no send; its ranks would wait for ever."
            continue
        yield from _ends_differ(program, sends[pair][0], receive)


def _by_pair(program: Program, kind: type[Instruction]) -> dict[tuple[str, str], list[Instruction]]:
    found: dict[tuple[str, str], list[Instruction]] = {}
    for instruction in program.instructions:
        if isinstance(instruction, kind) and isinstance(instruction, Send | Receive):
            found.setdefault((instruction.producer, instruction.consumer), []).append(instruction)
    return found


def _ends_differ(program: Program, send: Instruction, receive: Instruction) -> Iterator[str]:
    assert isinstance(send, Send)
    assert isinstance(receive, Receive)
    if receive.lead > send.lead:
        yield f"{receive.name!r} has lead={receive.lead}, ahead of its send with lead={send.lead}; use {send.lead}."
    elif receive.lead == send.lead and program.instructions.index(receive) < program.instructions.index(send):
        yield f"{receive.name!r} comes before its send in the order; put it after."
    if set(send.ranks) != set(receive.owners):
        yield f"{send.name!r} is sent by {_ranks(send.ranks)} and expected from {_ranks(receive.owners)}."
    if set(send.targets) != set(receive.ranks):
        yield f"{send.name!r} goes to {_ranks(send.targets)} and is received by {_ranks(receive.ranks)}."
    if set(send.fields) != set(receive.fields):
        yield f"{send.name!r} carries {', '.join(send.fields)} and {', '.join(receive.fields)} is expected."


def _stages_have_what_they_read(program: Program) -> Iterator[str]:
    """Walks through a step: a field is written where its stage ran, and whole where all its owners sent it."""
    ran: dict[str, set[int]] = {}
    whole: dict[str, set[int]] = {}
    for instruction in program.in_order_of_a_step():
        match instruction:
            case RunStage():
                yield from _missing(instruction, whole)
                ran.setdefault(instruction.stage, set()).update(instruction.ranks)
            case Send():
                absent = set(instruction.ranks) - ran.get(instruction.producer, set())
                if absent:
                    yield f"{instruction.name!r} is sent by {_ranks(absent)} before {instruction.producer} ran there."
            case Receive():
                for name in instruction.fields:
                    whole.setdefault(name, set()).update(instruction.ranks)
            case MoveWeights():
                pass


def _missing(run: RunStage, whole: dict[str, set[int]]) -> Iterator[str]:
    for name in STAGE_BY_NAME[run.stage].reads:
        lacking = set(run.ranks) - whole.get(name, set())
        if lacking:
            yield f"{run.stage} reads {name} of {_WRITER[name]}, which has not reached {_ranks(lacking)}."


def _owners_are_one_set(program: Program) -> Iterator[str]:
    """All that a producer sends, it sends from the same ranks: each holds a part of the rows."""
    owners: dict[str, Send] = {}
    for send in program.instructions:
        if isinstance(send, Send):
            first = owners.setdefault(send.producer, send)
            if set(first.ranks) != set(send.ranks):
                yield (
                    f"{first.name!r} is sent by {_ranks(first.ranks)} and {send.name!r} by {_ranks(send.ranks)}; "
                    f"the rows of {send.producer} have one set of owners."
                )


def _weights_arrive_before_they_are_used(program: Program) -> Iterator[str]:
    """A refit precedes its stage in the turn; every rank of the stage takes part in it."""
    ran: set[str] = set()
    at: dict[str, tuple[int, ...]] = {i.stage: i.ranks for i in program.instructions if isinstance(i, RunStage)}
    for instruction in program.instructions:
        if isinstance(instruction, RunStage):
            ran.add(instruction.stage)
        elif isinstance(instruction, MoveWeights):
            if instruction.target in ran:
                yield f"{instruction.name!r} comes after {instruction.target} in the order; put it before."
            left = set(at.get(instruction.target, ())) - set(instruction.ranks)
            if left:
                yield f"{instruction.name!r} leaves out {_ranks(left)}, where {instruction.target} runs."


class _At(NamedTuple):
    """An instruction in a turn."""

    turn: int
    instruction: Instruction

    @property
    def step(self) -> int:
        return self.turn + self.instruction.lead


@dataclass
class _Progress:
    """How far each rank has come when every rank does what it can: sends never wait, all else waits for its partners.

    `waiting` gives the instruction that each unfinished rank stands before.
    """

    waiting: dict[int, _At] = field(default_factory=dict)
    sent: set[tuple[str, str, int, int]] = field(default_factory=set)  # producer, consumer, step, owner
    num_come: Counter[tuple[str, int]] = field(default_factory=Counter)  # ranks that have reached it in a turn

    def can_go_on(self, rank: int) -> bool:
        turn, instruction = self.waiting[rank]
        if isinstance(instruction, Send | Receive):
            return not self.waits_for(rank)
        return self.num_come[instruction.name, turn] == len(instruction.ranks)

    def waits_for(self, rank: int) -> tuple[int, ...]:
        """The ranks whose doing keeps this one from going on."""
        at = self.waiting[rank]
        instruction = at.instruction
        if isinstance(instruction, Receive):
            parcel = instruction.producer, instruction.consumer, at.step
            return tuple(owner for owner in instruction.owners if (*parcel, owner) not in self.sent)
        if isinstance(instruction, Send):
            return ()
        return tuple(other for other in instruction.ranks if self.waiting.get(other) != at)


def _no_circle_of_waits(program: Program) -> Iterator[str]:
    """Follows the program without time until it repeats: where no rank can go on, the circle they wait in is named."""
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


def _wait(progress: _Progress, rank: int, other: int) -> str:
    return f"rank {rank} waits in {progress.waiting[rank].instruction.name!r} for rank {other}"


def _run_without_time(program: Program) -> _Progress:
    streams = _streams(program)
    progress = _Progress()
    ready = deque(sorted(streams))
    while ready:
        rank = ready.popleft()
        if rank not in progress.waiting:
            if not streams[rank]:
                continue
            at = streams[rank].popleft()
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
        return list(instruction.ranks)
    del progress.waiting[rank]
    if isinstance(instruction, Receive):
        return [rank]
    progress.sent.add((instruction.producer, instruction.consumer, at.step, rank))
    return [rank, *(other for other in instruction.targets if _is_receiving(progress, other))]


def _is_receiving(progress: _Progress, rank: int) -> bool:
    return rank in progress.waiting and isinstance(progress.waiting[rank].instruction, Receive)


def _streams(program: Program) -> dict[int, deque[_At]]:
    """Every rank's instructions over as many steps as pass before a turn holds all that it ever holds, and one more."""
    steps = range(program.max_lead + 2)
    streams: dict[int, deque[_At]] = {}
    for turn in program.turns(steps):
        for instruction in program.instructions:
            if takes_part(instruction, turn, steps):
                for rank in instruction.ranks:
                    streams.setdefault(rank, deque()).append(_At(turn, instruction))
    return streams


def _ranks(ranks: set[int] | tuple[int, ...]) -> str:
    """Ranks in words: `rank 3`, `ranks 0, 1` or `ranks 0-7`."""
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"ranks {found[0]}-{found[-1]}"
    return f"ranks {', '.join(map(str, found)) or 'none'}"


_CHECKS: tuple[Check, ...] = (
    _sends_and_receives_match,
    _owners_are_one_set,
    _stages_have_what_they_read,
    _weights_arrive_before_they_are_used,
    _no_circle_of_waits,
)
