"""Virtual time: discrete events over a program, for any number of steps.

Ranks that follow the same instructions and take the same time are one group. A group is always in one of these states:

    on its way     an event (time, priority, serial, group) says when it is free for its next instruction
    in a meeting   it waits until all groups of a stage or a refit have come; the last one's event starts it. A stage
                   that streams also waits until its producer has started
    at a receive   it waits until every owner has sent; the last send starts the hand-over

Of events at one time the earlier instruction of the program goes first, then the event that was made first. Where no
stage works ahead, a step begins when every rank has ended the last one, as the runtime's does; else ranks go on to
their next turn at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from meshwright.planner.program.instruction_durations import Lags, StepWork
from meshwright.planner.program.program import Program, Receive, RunStage, Send, takes_part
from meshwright.profiles.stages import ENVIRONMENT

Replica = Callable[[str, int], int]
"""The dp replica of a stage that a rank belongs to."""


class Record(NamedTuple):
    """One instruction of one group: it came, what it had waited for was there, it was done. Seconds.

    `cause` is what the group waited for between `arrived` and `start`. `number` counts the program's instructions;
    one more is the end of the turn. A receive does nothing but wait: from `start` to `end` what was sent is on its way.
    A stage that streams spends `starved` of the seconds from `start` to `end` waiting for its producer.
    """

    turn: int
    step: int
    number: int
    group: int
    arrived: float
    start: float
    end: float
    cause: str
    starved: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """A program by groups of ranks. `streams` has the instructions of each group, `members` the groups of each one."""

    program: Program
    groups: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[int, ...], ...]  # of each group at each instruction
    streams: tuple[tuple[int, ...], ...]
    members: tuple[tuple[int, ...], ...]


def score(program: Program, num_ranks: int, split: frozenset[str], replica: Replica) -> RankProgram:
    """Groups the ranks. The replicas of the stages in `split` take times of their own."""
    instructions = program.instructions
    keys: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(num_ranks)}
    for index, instruction in enumerate(instructions):
        for rank in instruction.ranks:
            keys[rank].append((index, replica(instruction.name, rank) if instruction.name in split else 0))
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank, key in keys.items():
        alike.setdefault(tuple(key), []).append(rank)
    streams = tuple((*(index for index, _ in key), len(instructions)) for key in alike)
    members: list[list[int]] = [[] for _ in range(len(instructions) + 1)]
    for group, stream in enumerate(streams):
        for index in stream:
            members[index].append(group)
    replicas = [dict(key) for key in alike]
    return RankProgram(
        program=program,
        groups=tuple(tuple(ranks) for ranks in alike.values()),
        replicas=tuple(tuple(of.get(index, 0) for index in range(len(instructions) + 1)) for of in replicas),
        streams=streams,
        members=tuple(tuple(groups) for groups in members),
    )


def play(score: RankProgram, works: Sequence[StepWork], lags: Lags) -> Iterator[Record]:
    """Runs a step for each work, in virtual time, and tells what each group did in order of completion known."""
    run = _Playing(score, works, lags)
    heap = run.heap
    while heap:
        now, _, _, group = heappop(heap)
        yield from run.go_on(group, now)
    assert run.has_ended, "a program that was checked cannot stop halfway"


class _Feed(NamedTuple):
    """What a stage reads in chunks: the number of its producer, the seconds until the last of it has arrived, and the
    plan's until the stage can end."""

    producer: int
    lag_seconds: float
    tail_seconds: float


def _feeds(program: Program, lags: Lags) -> dict[int, _Feed]:
    """By the number of the stage that streams."""
    numbers = {one.stage: number for number, one in enumerate(program.instructions) if isinstance(one, RunStage)}
    return {
        numbers[stream.consumer]: _Feed(
            numbers[stream.producer], lags.whole[stream.producer, stream.consumer], lags.tails[stream.consumer]
        )
        for stream in program.streams
    }


class _Meeting(NamedTuple):
    """All groups of an instruction have come, each at its time; `cause` is what the last one did before."""

    turn: int
    step: int
    number: int
    come: Sequence[tuple[int, float]]
    cause: str


class _Playing:
    """The state of all groups."""

    def __init__(self, score: RankProgram, works: Sequence[StepWork], lags: Lags) -> None:
        self._score, self._works = score, works
        instructions = score.program.instructions
        self._steps = range(len(works))
        self._last_turn = len(works) - 1
        self._whole_turns = range(len(works) - score.program.most_ahead)
        self._meets_at_end = score.program.most_ahead == 0
        self._end = len(instructions)
        self._ahead = [*(instruction.steps_ahead for instruction in instructions), 0]
        self._names = [*(instruction.name for instruction in instructions), "end of the turn"]
        self._kinds = [*(type(instruction) for instruction in instructions), type(None)]
        self._pair_of = {
            index: (one.producer, one.consumer)
            for index, one in enumerate(instructions)
            if isinstance(one, Send | Receive)
        }
        self._receive_of = {
            pair: index for index, pair in self._pair_of.items() if isinstance(instructions[index], Receive)
        }
        self._lags = {index: lags.whole[pair] for pair, index in self._receive_of.items()}
        self._of_hosts, self._hosted = lags.of_hosts, {i for (p, _), i in self._receive_of.items() if p == ENVIRONMENT}
        self._feeds = _feeds(score.program, lags)
        self._feeding = {feed.producer for feed in self._feeds.values()}
        self._serial = len(score.groups)
        first = -score.program.most_ahead
        self._turns = [first] * self._serial
        self._positions = [self._next(group, 0, first) for group in range(self._serial)]
        self._causes = [""] * self._serial
        self._num_sent: dict[tuple[int, int], int] = {}  # by step and receive
        self._sent_at: dict[tuple[int, int], float] = {}
        self._expecting: dict[tuple[int, int], list[tuple[int, float]]] = {}  # by step and receive
        self._meeting: dict[tuple[int, int], list[tuple[int, float]]] = {}  # by turn and instruction
        self._fed_until: dict[tuple[int, int], float] = {}  # when a stage that feeds others ends, by step and stage
        self._unfed: dict[tuple[int, int], list[_Meeting]] = {}  # what waits for that stage to start
        self.heap = [(0.0, 0, group, group) for group in range(self._serial)] if works else []

    @property
    def has_ended(self) -> bool:
        return not self._meeting and not self._expecting and not self._unfed

    def go_on(self, group: int, now: float) -> Sequence[Record]:
        """The group takes up its next instruction; what became complete by that."""
        index = self._score.streams[group][self._positions[group]]
        kind = self._kinds[index]
        if kind is Send:
            return self._send(group, index, now)
        if kind is Receive:
            return self._receive(group, index, now)
        return self._meet(group, index, now)

    def _meet(self, group: int, index: int, now: float) -> Sequence[Record]:
        """A stage, a refit or the end of a step starts when the last group has come; what takes no time needs none."""
        turn, step, members = self._turns[group], self._step(group, index), self._score.members[index]
        if not any(self._seconds(step, index)) and not self._has_to_meet(index):
            return (self._done(group, Record(turn, step, index, group, now, now, now, "")),)
        come = self._meeting.setdefault((turn, index), [])
        come.append((group, now))
        if len(come) < len(members):
            return ()
        del self._meeting[turn, index]
        return self._start(_Meeting(turn, step, index, come, self._causes[group]), now)

    def _has_to_meet(self, index: int) -> bool:
        """Whether the groups meet even if what they meet for takes no time."""
        return self._meets_at_end if index == self._end else index in self._feeds or index in self._feeding

    def _start(self, meeting: _Meeting, now: float) -> Sequence[Record]:
        """Starts what all groups have come to, and what waited for that; what streams only once its producer runs."""
        feed = self._feeds.get(meeting.number)
        key = (meeting.step, feed.producer if feed else meeting.number)
        if feed and key not in self._fed_until:
            self._unfed.setdefault(key, []).append(meeting)
            return ()
        least_end = now
        if feed:
            tail = self._works[max(meeting.step, 0)].tail_seconds.get(self._names[meeting.number], feed.tail_seconds)
            least_end = self._fed_until[key] + feed.lag_seconds + tail
        records = [self._record(meeting, group, arrived, now, least_end) for group, arrived in meeting.come]
        if meeting.number in self._feeding:
            self._fed_until[key] = max(record.end for record in records)
            for reader in self._unfed.pop(key, ()):
                records += self._start(reader._replace(cause=self._names[meeting.number]), now)
        return records

    def _record(self, meeting: _Meeting, group: int, arrived: float, now: float, least_end: float) -> Record:
        """One group from the start of what it came to until that is done, which is not before `least_end`."""
        turn, step, index, _, cause = meeting
        seconds = self._seconds(step, index)
        done = now + (seconds[self._score.replicas[group][index]] if len(seconds) > 1 else seconds[0])
        if index < self._end:
            self._causes[group] = self._names[index]
        end = max(done, least_end)
        return self._done(group, Record(turn, step, index, group, arrived, now, end, cause, end - done))

    def _seconds(self, step: int, index: int) -> tuple[float, ...]:
        """For all ranks, or for each replica."""
        return self._works[max(step, 0)].seconds[self._names[index]] if index < self._end else (0.0,)

    def _send(self, group: int, index: int, now: float) -> Sequence[Record]:
        """Does not wait. The last owner to send starts the hand-over to the groups that wait for it."""
        turn, step, receive = self._turns[group], self._step(group, index), self._receive_of[self._pair_of[index]]
        key = (step, receive)
        self._num_sent[key] = self._num_sent.get(key, 0) + 1
        records = [self._done(group, Record(turn, step, index, group, now, now, now, ""))]
        if self._num_sent[key] == len(self._score.members[index]):
            self._sent_at[key] = now
            for member, arrived in self._expecting.pop(key, ()):
                records.append(self._arrive(member, receive, arrived))
        return records

    def _receive(self, group: int, index: int, now: float) -> Sequence[Record]:
        key = (self._step(group, index), index)
        if key in self._sent_at:
            return (self._arrive(group, index, now),)
        self._expecting.setdefault(key, []).append((group, now))
        return ()

    def _arrive(self, group: int, index: int, arrived: float) -> Record:
        turn, step, producer = self._turns[group], self._step(group, index), self._pair_of[index][0]
        sent = self._sent_at[step, index]
        end = max(arrived, sent + self._lag(step, index))
        if end > arrived:
            self._causes[group] = producer
        start = min(end, max(arrived, sent))
        return self._done(group, Record(turn, step, index, group, arrived, start, end, producer))

    def _lag(self, step: int, index: int) -> float:
        """Seconds until what was sent has arrived; rewards on hosts may take others than the plan expects."""
        drawn = self._works[step].host_seconds
        if index in self._hosted and drawn is not None:
            return self._lags[index] - self._of_hosts + drawn
        return self._lags[index]

    def _step(self, group: int, index: int) -> int:
        """The step that the group works on with an instruction of its turn."""
        return self._turns[group] + self._ahead[index]

    def _next(self, group: int, position: int, turn: int) -> int:
        """The first position from this one whose instruction is followed in the turn."""
        if turn in self._whole_turns:
            return position
        stream, instructions = self._score.streams[group], self._score.program.instructions
        while stream[position] < self._end and not takes_part(instructions[stream[position]], turn, self._steps):
            position += 1
        return position

    def _done(self, group: int, record: Record) -> Record:
        """Moves the group to its next instruction, of this turn or of the next one."""
        position = self._positions[group] + 1
        if record.number == self._end:
            if self._turns[group] == self._last_turn:
                return record
            position = 0
            self._turns[group] += 1
        self._positions[group] = self._next(group, position, self._turns[group])
        following = self._score.streams[group][self._positions[group]]
        self._serial += 1
        heappush(self.heap, (record.end, following, self._serial, group))
        return record
