"""Checks of a program before it is executed: sends match receives, every rank has what it reads, no deadlock.

The checks use only the program and the stages' fields, and do not depend on how the program was made. Deadlocks are
found by executing the program step by step, without durations; the sentence says which rank waits for which.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
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
from meshwright.profiles.errors import require_none
from meshwright.profiles.stages import StageGraph


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
            cycle = [*path[path.index(still_waiting[0]) :], still_waiting[0]]
            waits = [_wait(progress, one, other) for one, other in itertools.pairwise(cycle)]
            yield f"deadlock: {', and '.join(waits)}; change the order of one of them."
            return
        path.append(still_waiting[0])


class _Scheduled(NamedTuple):
    """An instruction in a period."""

    period: int
    instruction: Instruction

    @property
    def step(self) -> int:
        return self.period + self.instruction.steps_ahead


@dataclass
class _Progress:
    """The progress of all ranks: sends never wait, every other instruction waits for its partners.

    `waiting` has the next instruction of each unfinished rank, `streams` the stream into each stage that reads one.
    """

    streams: Mapping[str, Stream]
    waiting: dict[int, _Scheduled] = field(default_factory=dict)
    sent: set[tuple[str, str, int, int]] = field(default_factory=set)  # producer, consumer, step, owner
    ran: set[tuple[str, int, int]] = field(default_factory=set)  # stage, step, rank
    num_arrived: Counter[tuple[str, int]] = field(
        default_factory=Counter
    )  # ranks that have reached an instruction in a period

    def can_continue(self, rank: int) -> bool:
        period, instruction = self.waiting[rank]
        if isinstance(instruction, Send | Receive):
            return not self.waits_for(rank)
        return self.num_arrived[instruction.name, period] == len(instruction.ranks) and not self._streaming_to(rank)

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
            progress.num_arrived[scheduled.instruction.name, scheduled.period] += 1
        if progress.can_continue(rank):
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
    steps = range(program.max_steps_ahead + 2)
    remaining: dict[int, deque[_Scheduled]] = {}
    for period in program.periods(steps):
        for instruction in program.instructions:
            if is_active(instruction, period, steps):
                for rank in instruction.ranks:
                    remaining.setdefault(rank, deque()).append(_Scheduled(period, instruction))
    return remaining


Check = Callable[[Program, StageGraph], Iterator[str]]


def check_program(program: Program, graph: StageGraph) -> tuple[str, ...]:
    """Return one sentence per fault; empty if every rank can execute the program to its end, any number of times."""
    return tuple(sentence for check in _CHECKS for sentence in check(program, graph))


def require_sound(program: Program, graph: StageGraph) -> None:
    """Check a program. Raises BadInput with the first fault."""
    require_none(check_program(program, graph), "program")


def _sends_and_receives_match(program: Program, _graph: StageGraph) -> Iterator[str]:
    """Each pair of producer and consumer has one send, and one receive with the same ranks later in the order or in a
    later period."""
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
    by_pair: dict[tuple[str, str], list[Instruction]] = {}
    for instruction in program.instructions:
        if isinstance(instruction, kind) and isinstance(instruction, Send | Receive):
            by_pair.setdefault((instruction.producer, instruction.consumer), []).append(instruction)
    return by_pair


def _ends_differ(program: Program, send: Instruction, receive: Instruction) -> Iterator[str]:
    assert isinstance(send, Send)
    assert isinstance(receive, Receive)
    if receive.steps_ahead > send.steps_ahead:
        yield (
            f"{receive.name!r} has steps_ahead={receive.steps_ahead}, ahead of its send with "
            f"steps_ahead={send.steps_ahead}; use {send.steps_ahead}."
        )
    elif receive.steps_ahead == send.steps_ahead and program.instructions.index(receive) < program.instructions.index(
        send
    ):
        yield f"{receive.name!r} comes before its send in the order; put it after."
    if set(send.ranks) != set(receive.owners):
        yield f"{send.name!r} is sent by {_ranks(send.ranks)} and expected from {_ranks(receive.owners)}."
    if set(send.targets) != set(receive.ranks):
        yield f"{send.name!r} goes to {_ranks(send.targets)} and is received by {_ranks(receive.ranks)}."
    if set(send.fields) != set(receive.fields):
        yield f"{send.name!r} carries {', '.join(send.fields)} and {', '.join(receive.fields)} is expected."


def _streams_fit_their_stages(program: Program, _graph: StageGraph) -> Iterator[str]:
    """A stream goes from the owners of its producer's output to all ranks of its consumer in the same period."""
    runs = {i.stage: i for i in program.instructions if isinstance(i, RunStage)}
    sends = {i.producer: i for i in program.instructions if isinstance(i, Send)}
    streamed: set[str] = set()
    for stream in program.streams:
        name = f"the stream {stream.producer} -> {stream.consumer}"
        if stream.consumer in streamed:
            yield f"{name} is not the only one to {stream.consumer}; a stage has one."
        streamed.add(stream.consumer)
        absent = [stage for stage in (stream.producer, stream.consumer) if stage not in runs]
        if absent:
            yield f"{name} has no {' and no '.join(absent)} in the program; leave it out."
        else:
            yield from _ends_do_not_fit(name, stream, runs[stream.producer], runs[stream.consumer])
        send = sends.get(stream.producer)
        if send and set(send.ranks) != set(stream.owners):
            yield f"{name} comes from {_ranks(stream.owners)} and {send.name!r} from {_ranks(send.ranks)}."


def _ends_do_not_fit(name: str, stream: Stream, producer: RunStage, consumer: RunStage) -> Iterator[str]:
    foreign = set(stream.owners) - set(producer.ranks)
    if foreign:
        yield f"{name} comes from {_ranks(foreign)}, where {stream.producer} does not run."
    if set(stream.targets) != set(consumer.ranks):
        yield f"{name} goes to {_ranks(stream.targets)} and {stream.consumer} runs on {_ranks(consumer.ranks)}."
    if producer.steps_ahead != consumer.steps_ahead:
        yield (
            f"{name} goes from steps_ahead={producer.steps_ahead} to steps_ahead={consumer.steps_ahead}; "
            f"a stage streams within its own period: use {producer.steps_ahead}."
        )


def _stages_have_what_they_read(program: Program, graph: StageGraph) -> Iterator[str]:
    """A stage runs after its rank has received every field that it reads.

    A rank that ran the writing stage has only its own rows; all rows are on ranks that received the field. Ranks to
    which the writing stage streams read it in chunks instead.
    """
    ran: dict[str, set[int]] = {}
    received: dict[str, set[int]] = {}
    for instruction in program.in_step_order():
        match instruction:
            case RunStage():
                yield from _missing(instruction, received, program.stream_to(instruction.stage), graph)
                ran.setdefault(instruction.stage, set()).update(instruction.ranks)
                hosted = graph.host_stages if graph.by_name[instruction.stage].generates else ()
                ran.update({host.name: set(instruction.ranks) for host in hosted})
            case Send():
                absent = set(instruction.ranks) - ran.get(instruction.producer, set())
                if absent:
                    yield f"{instruction.name!r} is sent by {_ranks(absent)} before {instruction.producer} ran there."
            case Receive():
                for name in instruction.fields:
                    received.setdefault(name, set()).update(instruction.ranks)
            case MoveWeights():
                pass


def _missing(run: RunStage, received: dict[str, set[int]], stream: Stream | None, graph: StageGraph) -> Iterator[str]:
    for name in graph.by_name[run.stage].reads:
        without_field = set(run.ranks) - received.get(name, set())
        if stream and stream.producer == graph.writer[name]:
            without_field -= set(stream.targets)
        if without_field:
            yield f"{run.stage} reads {name} of {graph.writer[name]}, which has not reached {_ranks(without_field)}."


def _owners_are_one_set(program: Program, _graph: StageGraph) -> Iterator[str]:
    """A producer sends everything from the same ranks, each of which holds a part of the rows."""
    owners: dict[str, Send] = {}
    for send in program.instructions:
        if isinstance(send, Send):
            first = owners.setdefault(send.producer, send)
            if set(first.ranks) != set(send.ranks):
                yield (
                    f"{first.name!r} is sent by {_ranks(first.ranks)} and {send.name!r} by {_ranks(send.ranks)}; "
                    f"the rows of {send.producer} have one set of owners."
                )


def _weights_arrive_before_they_are_used(program: Program, _graph: StageGraph) -> Iterator[str]:
    """A refit precedes its target stage in the period, and includes every rank of that stage."""
    ran: set[str] = set()
    ranks_of: dict[str, tuple[int, ...]] = {i.stage: i.ranks for i in program.instructions if isinstance(i, RunStage)}
    for instruction in program.instructions:
        if isinstance(instruction, RunStage):
            ran.add(instruction.stage)
        elif isinstance(instruction, MoveWeights):
            if instruction.target in ran:
                yield f"{instruction.name!r} comes after {instruction.target} in the order; put it before."
            left_out = set(ranks_of.get(instruction.target, ())) - set(instruction.ranks)
            if left_out:
                yield f"{instruction.name!r} leaves out {_ranks(left_out)}, where {instruction.target} runs."


def _no_deadlock(program: Program, _graph: StageGraph) -> Iterator[str]:
    yield from find_deadlock(program)


def _ranks(ranks: set[int] | tuple[int, ...]) -> str:
    """Return ranks in words: `rank 3`, `ranks 0, 1` or `ranks 0-7`."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]}-{ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered)) or 'none'}"


_CHECKS: tuple[Check, ...] = (
    _sends_and_receives_match,
    _owners_are_one_set,
    _streams_fit_their_stages,
    _stages_have_what_they_read,
    _weights_arrive_before_they_are_used,
    _no_deadlock,
)
