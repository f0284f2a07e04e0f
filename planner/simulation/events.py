"""Discrete-event simulation of a program in virtual time, for any number of steps.

Ranks that execute the same instructions and take the same time are one group. A group is always in one of these states:

    scheduled      an event (time, priority, serial, group) says when it is free for its next instruction
    at a barrier   it waits until all groups of a stage or a refit have arrived; the last one's event starts it. A stage
                   that streams also waits until its producer has started
    at a receive   it waits until every owner has sent; the last send starts the transfer

Events at the same time are ordered by the position of their instruction in the program, then by creation. If no stage
works ahead, a step starts when every rank has ended the previous one, as in the runtime; otherwise ranks start their
next period at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from meshwright.planner.program.durations import StepWork, TransferDelays
from meshwright.planner.program.program import Program, Receive, RunStage, Send, is_active
from meshwright.profiles.stages import ENVIRONMENT

Replica = Callable[[str, int], int]
"""A function from the name of a stage and a rank to the dp replica that the rank belongs to in the stage."""


class Record(NamedTuple):
    """One instruction of one group: when the group `arrived` at it, its `start` and its `end`, in seconds.

    `cause` is the instruction that the group waited for between `arrived` and `start`. `number` is the index of the
    instruction in the program; the number of instructions means the end of the period. A receive only waits: from
    `start` to `end` the data is in transit. A stage that streams waits for its producer for `stream_wait` of the
    seconds from `start` to `end`.
    """

    period: int
    step: int
    number: int
    group: int
    arrived: float
    start: float
    end: float
    cause: str
    stream_wait: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """A program by groups of ranks: `streams` has the indices of each group's instructions in order, `members` the
    groups of each instruction. The index after the last instruction is the end of the period."""

    program: Program
    groups: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[int, ...], ...]  # [group][instruction]
    streams: tuple[tuple[int, ...], ...]
    members: tuple[tuple[int, ...], ...]


def group_ranks(program: Program, num_ranks: int, stages_by_replica: frozenset[str], replica: Replica) -> RankProgram:
    """Group the ranks of a program. Each replica of a stage in `stages_by_replica` has its own duration."""
    instructions = program.instructions
    keys: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(num_ranks)}
    for index, instruction in enumerate(instructions):
        for rank in instruction.ranks:
            keys[rank].append((index, replica(instruction.name, rank) if instruction.name in stages_by_replica else 0))
    ranks_by_key: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank, key in keys.items():
        ranks_by_key.setdefault(tuple(key), []).append(rank)
    streams = tuple((*(index for index, _ in key), len(instructions)) for key in ranks_by_key)
    members: list[list[int]] = [[] for _ in range(len(instructions) + 1)]
    for group, stream in enumerate(streams):
        for index in stream:
            members[index].append(group)
    replicas = [dict(key) for key in ranks_by_key]
    return RankProgram(
        program=program,
        groups=tuple(tuple(ranks) for ranks in ranks_by_key.values()),
        replicas=tuple(
            tuple(by_index.get(index, 0) for index in range(len(instructions) + 1)) for by_index in replicas
        ),
        streams=streams,
        members=tuple(tuple(groups) for groups in members),
    )


def simulate_events(rank_program: RankProgram, works: Sequence[StepWork], delays: TransferDelays) -> Iterator[Record]:
    """Simulate a step for each of `works`; yield the records of all groups as soon as their ends are known."""
    simulator = _Simulator(rank_program, works, delays)
    heap = simulator.heap
    while heap:
        now, _, _, group = heappop(heap)
        yield from simulator.execute_next(group, now)
    assert simulator.has_ended, "a program that was checked cannot deadlock"


class _IncomingStream(NamedTuple):
    """A stream into a stage: the index of the producer's instruction, the seconds until the last chunk has arrived, and
    the planned seconds from then until the stage can end."""

    producer: int
    lag_seconds: float
    tail_seconds: float


def _incoming_streams(program: Program, delays: TransferDelays) -> dict[int, _IncomingStream]:
    """Return the streams by the instruction index of the stage that reads them."""
    numbers = {one.stage: number for number, one in enumerate(program.instructions) if isinstance(one, RunStage)}
    return {
        numbers[stream.consumer]: _IncomingStream(
            numbers[stream.producer], delays.transfers[stream.producer, stream.consumer], delays.tails[stream.consumer]
        )
        for stream in program.streams
    }


class _Barrier(NamedTuple):
    """The arrivals (group, seconds) of all groups at an instruction; `cause` is the instruction that delayed the last
    of them."""

    period: int
    step: int
    number: int
    arrivals: Sequence[tuple[int, float]]
    cause: str


class _Simulator:
    """The state of the simulation: the period, position and last cause of each group, and what the groups wait for."""

    def __init__(self, rank_program: RankProgram, works: Sequence[StepWork], delays: TransferDelays) -> None:
        self._rank_program, self._works = rank_program, works
        instructions = rank_program.program.instructions
        self._steps = range(len(works))
        self._last_period = len(works) - 1
        self._whole_periods = range(len(works) - rank_program.program.max_steps_ahead)
        self._has_end_barrier = rank_program.program.max_steps_ahead == 0
        self._end = len(instructions)
        self._ahead = [*(instruction.steps_ahead for instruction in instructions), 0]
        self._names = [*(instruction.name for instruction in instructions), "end of the period"]
        self._kinds = [*(type(instruction) for instruction in instructions), type(None)]
        self._pair_of = {
            index: (one.producer, one.consumer)
            for index, one in enumerate(instructions)
            if isinstance(one, Send | Receive)
        }
        self._receive_of = {
            pair: index for index, pair in self._pair_of.items() if isinstance(instructions[index], Receive)
        }
        self._delays = {index: delays.transfers[pair] for pair, index in self._receive_of.items()}
        self._host_reward_seconds, self._host_receives = (
            delays.host_reward_seconds,
            {i for (p, _), i in self._receive_of.items() if p == ENVIRONMENT},
        )
        self._incoming_streams = _incoming_streams(rank_program.program, delays)
        self._producers = {stream.producer for stream in self._incoming_streams.values()}
        self._serial = len(rank_program.groups)
        first = -rank_program.program.max_steps_ahead
        self._periods = [first] * self._serial
        self._positions = [self._next(group, 0, first) for group in range(self._serial)]
        self._causes = [""] * self._serial
        self._num_sent: dict[tuple[int, int], int] = {}  # by step and receive
        self._sent_at: dict[tuple[int, int], float] = {}
        self._receiving: dict[tuple[int, int], list[tuple[int, float]]] = {}  # by step and receive
        self._at_barrier: dict[tuple[int, int], list[tuple[int, float]]] = {}  # by period and instruction
        self._producer_ends: dict[tuple[int, int], float] = {}  # by step and stage, of stages that others stream from
        self._waiting_for_producer: dict[tuple[int, int], list[_Barrier]] = {}  # by step and producer
        self.heap = [(0.0, 0, group, group) for group in range(self._serial)] if works else []

    @property
    def has_ended(self) -> bool:
        return not self._at_barrier and not self._receiving and not self._waiting_for_producer

    def execute_next(self, group: int, now: float) -> Sequence[Record]:
        """Execute the group's next instruction; return the records that it completes."""
        index = self._rank_program.streams[group][self._positions[group]]
        kind = self._kinds[index]
        if kind is Send:
            return self._send(group, index, now)
        if kind is Receive:
            return self._receive(group, index, now)
        return self._arrive_at_barrier(group, index, now)

    def _arrive_at_barrier(self, group: int, index: int, now: float) -> Sequence[Record]:
        """Arrive at a stage, a refit or the end of a step, which starts with the last group.

        Instructions that take no time need no barrier.
        """
        period, step, members = self._periods[group], self._step(group, index), self._rank_program.members[index]
        if not any(self._seconds(step, index)) and not self._needs_barrier(index):
            return (self._finish(group, Record(period, step, index, group, now, now, now, "")),)
        arrivals = self._at_barrier.setdefault((period, index), [])
        arrivals.append((group, now))
        if len(arrivals) < len(members):
            return ()
        del self._at_barrier[period, index]
        return self._start(_Barrier(period, step, index, arrivals, self._causes[group]), now)

    def _needs_barrier(self, index: int) -> bool:
        """Return True if the instruction is a barrier even if it takes no time."""
        return (
            self._has_end_barrier if index == self._end else index in self._incoming_streams or index in self._producers
        )

    def _start(self, barrier: _Barrier, now: float) -> Sequence[Record]:
        """Start an instruction and the streaming stages that wait for it, or wait for the producer of a stream."""
        stream = self._incoming_streams.get(barrier.number)
        key = (barrier.step, stream.producer if stream else barrier.number)
        if stream and key not in self._producer_ends:
            self._waiting_for_producer.setdefault(key, []).append(barrier)
            return ()
        min_end = now
        if stream:
            tail = self._works[max(barrier.step, 0)].tail_seconds.get(self._names[barrier.number], stream.tail_seconds)
            min_end = self._producer_ends[key] + stream.lag_seconds + tail
        records = [self._record(barrier, group, arrived, now, min_end) for group, arrived in barrier.arrivals]
        if barrier.number in self._producers:
            self._producer_ends[key] = max(record.end for record in records)
            for waiting in self._waiting_for_producer.pop(key, ()):
                records += self._start(waiting._replace(cause=self._names[barrier.number]), now)
        return records

    def _record(self, barrier: _Barrier, group: int, arrived: float, now: float, min_end: float) -> Record:
        """Return one group's record of an instruction that starts `now` and ends at `min_end` at the earliest."""
        period, step, index, _, cause = barrier
        seconds = self._seconds(step, index)
        computed_end = now + (seconds[self._rank_program.replicas[group][index]] if len(seconds) > 1 else seconds[0])
        if index < self._end:
            self._causes[group] = self._names[index]
        end = max(computed_end, min_end)
        return self._finish(group, Record(period, step, index, group, arrived, now, end, cause, end - computed_end))

    def _seconds(self, step: int, index: int) -> tuple[float, ...]:
        """Return one duration for all ranks, or one for each replica."""
        return self._works[max(step, 0)].seconds[self._names[index]] if index < self._end else (0.0,)

    def _send(self, group: int, index: int, now: float) -> Sequence[Record]:
        """Send without waiting; the last owner to send starts the transfer to the groups that wait for it."""
        period, step, receive = self._periods[group], self._step(group, index), self._receive_of[self._pair_of[index]]
        key = (step, receive)
        self._num_sent[key] = self._num_sent.get(key, 0) + 1
        records = [self._finish(group, Record(period, step, index, group, now, now, now, ""))]
        if self._num_sent[key] == len(self._rank_program.members[index]):
            self._sent_at[key] = now
            for member, arrived in self._receiving.pop(key, ()):
                records.append(self._receive_record(member, receive, arrived))
        return records

    def _receive(self, group: int, index: int, now: float) -> Sequence[Record]:
        key = (self._step(group, index), index)
        if key in self._sent_at:
            return (self._receive_record(group, index, now),)
        self._receiving.setdefault(key, []).append((group, now))
        return ()

    def _receive_record(self, group: int, index: int, arrived: float) -> Record:
        period, step, producer = self._periods[group], self._step(group, index), self._pair_of[index][0]
        sent = self._sent_at[step, index]
        end = max(arrived, sent + self._transfer_seconds(step, index))
        if end > arrived:
            self._causes[group] = producer
        start = min(end, max(arrived, sent))
        return self._finish(group, Record(period, step, index, group, arrived, start, end, producer))

    def _transfer_seconds(self, step: int, index: int) -> float:
        """Return the seconds of a transfer; those of host rewards may differ from the plan's."""
        host_seconds = self._works[step].host_seconds
        if index in self._host_receives and host_seconds is not None:
            return self._delays[index] - self._host_reward_seconds + host_seconds
        return self._delays[index]

    def _step(self, group: int, index: int) -> int:
        """Return the step that the group's instruction in its current period works on."""
        return self._periods[group] + self._ahead[index]

    def _next(self, group: int, position: int, period: int) -> int:
        """Return the first position from `position` on whose instruction is executed in the period."""
        if period in self._whole_periods:
            return position
        stream, instructions = self._rank_program.streams[group], self._rank_program.program.instructions
        while stream[position] < self._end and not is_active(instructions[stream[position]], period, self._steps):
            position += 1
        return position

    def _finish(self, group: int, record: Record) -> Record:
        """Move the group to its next instruction, of this period or the next; return the record."""
        position = self._positions[group] + 1
        if record.number == self._end:
            if self._periods[group] == self._last_period:
                return record
            position = 0
            self._periods[group] += 1
        self._positions[group] = self._next(group, position, self._periods[group])
        following = self._rank_program.streams[group][self._positions[group]]
        self._serial += 1
        heappush(self.heap, (record.end, following, self._serial, group))
        return record
