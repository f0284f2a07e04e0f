"""The program of one turn: the plan lowered to instructions in one order that every rank follows.

In turn n an instruction that is a steps ahead works on step n + a. Turns run from minus the largest a to the last step,
and an instruction is left out where its step lies outside the run: the first turns only fill what works ahead.

A stage that streams reads chunks while their producer goes on: it runs beside it, and receives the whole output after
its own run. Chunks are not instructions, for how many there are is only known when they are drawn.

Hosts score responses while ranks go on: they hold nothing up but the stages that read what they write. The ranks that
generated send it when it is there, which the order notes behind the generation.

A rank executes the instructions that name it and skips the others. Sends never wait, and a receive comes after its
send, in the order of its turn or in a later turn, so ranks that follow the order never wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

from meshwright.planner.plan.evaluate import items
from meshwright.planner.plan.plan import Placement, Plan, Refit
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.trace import instruction_name


@dataclass(frozen=True, kw_only=True)
class MoveWeights:
    """Weights of the `source` stage's copy go to the `target` stage's copy, in every turn.

    A rank of the target waits for them. One of the source alone need not be waited for, nor wait: its device may have
    given the weights away as soon as they were trained. A simulation and a rehearsal let both sides meet.
    """

    source: str
    target: str
    ranks: tuple[int, ...]
    steps_ahead: int = 0

    kind = "refit"

    @property
    def name(self) -> str:
        return instruction_name(self.kind, self.source, self.target)


@dataclass(frozen=True, kw_only=True)
class RunStage:
    """A stage runs on the ranks of its pool."""

    stage: str
    ranks: tuple[int, ...]
    steps_ahead: int = 0

    kind = "stage"

    @property
    def name(self) -> str:
        return self.stage


@dataclass(frozen=True, kw_only=True)
class Send:
    """Owners of the producer's rows hand `fields` to the ranks that do not have them yet. `ranks` are the owners."""

    producer: str
    consumer: str
    fields: tuple[str, ...]
    ranks: tuple[int, ...]
    targets: tuple[int, ...]
    steps_ahead: int = 0  # of the producer

    kind = "send"

    @property
    def name(self) -> str:
        return instruction_name(self.kind, self.producer, self.consumer)


@dataclass(frozen=True, kw_only=True)
class Receive:
    """The other end of the send with the same producer and consumer. `ranks` are the targets."""

    producer: str
    consumer: str
    fields: tuple[str, ...]
    ranks: tuple[int, ...]
    owners: tuple[int, ...]
    steps_ahead: int = 0  # of the consumer

    kind = "receive"

    @property
    def name(self) -> str:
        return instruction_name(self.kind, self.producer, self.consumer)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Chunks of responses that go from the `owners` to the `targets` while the producer and the consumer both run.

    An owner sends its rows' prompts, then every `chunk_tokens` tokens of a row as they are drawn, then what is left of
    it; the consumer's run ends when it has what every owner sent.
    """

    producer: str
    consumer: str
    chunk_tokens: int
    owners: tuple[int, ...]
    targets: tuple[int, ...]


Instruction: TypeAlias = MoveWeights | RunStage | Send | Receive


@dataclass(frozen=True)
class Waves:
    """What is done for one wave of prompts after another until a batch has its groups; each instruction works on its
    wave, and all of them are done behind so many `others` of the turn."""

    instructions: tuple[Instruction, ...]
    others: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that see what is drawn, and choose alike."""
        return tuple(sorted({rank for instruction in self.instructions for rank in instruction.ranks}))


@dataclass(frozen=True)
class Program:
    """Instructions of one turn, in the order that every rank follows, what streams between them, and what is done in
    waves beside them."""

    instructions: tuple[Instruction, ...]
    streams: tuple[Stream, ...] = ()
    waves: Waves | None = None

    def of_rank(self, rank: int) -> tuple[Instruction, ...]:
        return tuple(i for i in self.instructions if rank in i.ranks)

    @cached_property
    def most_ahead(self) -> int:
        return max((i.steps_ahead for i in self.instructions), default=0)

    def turns(self, steps: range) -> range:
        """The turns that a run of these steps takes."""
        return range(steps.start - self.most_ahead, steps.stop)

    def in_order_of_a_step(self) -> tuple[Instruction, ...]:
        """Refits, then all that is done for one step in the order in which it is done, over all of its turns."""
        moves = [i for i in self.instructions if isinstance(i, MoveWeights)]
        others = [i for i in self.instructions if not isinstance(i, MoveWeights)]
        return (*moves, *sorted(others, key=lambda i: -i.steps_ahead))

    def of_one_step(self) -> Program:
        """The program that does all of a step in one turn, with the weights of its beginning; nothing streams, so that
        what streamed is received before it is read."""
        streamed = {(stream.producer, stream.consumer) for stream in self.streams}
        found: list[Instruction] = []
        for instruction in self.in_order_of_a_step():
            now = replace(instruction, steps_ahead=0)
            if isinstance(now, Receive) and (now.producer, now.consumer) in streamed:
                reader = next(
                    i for i, one in enumerate(found) if isinstance(one, RunStage) and one.stage == now.consumer
                )
                found.insert(reader, now)
            else:
                found.append(now)
        return Program(tuple(found))

    @cached_property
    def channels(self) -> Mapping[tuple[str, str], int]:
        """A number for every producer and consumer: a send shares it with its receive and with no other."""
        of_waves = self.waves.instructions if self.waves else ()
        pairs = [(i.producer, i.consumer) for i in (*self.instructions, *of_waves) if isinstance(i, Send)]
        return {pair: index for index, pair in enumerate(pairs)}

    def stream_to(self, consumer: str) -> Stream | None:
        """What streams to a stage, if anything does."""
        return next((stream for stream in self.streams if stream.consumer == consumer), None)


def version_of_generation(plan: Plan, turn: int, first_step: int) -> int:
    """Updates that the weights have seen with which a turn of a run from `first_step` generates.

    A refit comes before the training of its turn. Without one, the copy is the one that is trained.
    """
    if turn < first_step:
        return first_step
    generation, training = plan.placement(GENERATE), plan.placement(plan.graph.trainer_of(GENERATE))
    is_trained = plan.copy_of(generation.stage) == training.stage
    return turn + (is_trained and generation.start_seconds >= training.end_seconds)


def takes_part(instruction: Instruction, turn: int, steps: range) -> bool:
    """Whether the instruction is followed in this turn of a run of these steps."""
    return isinstance(instruction, MoveWeights) or turn + instruction.steps_ahead in steps


def lower(plan: Plan, stages: Collection[str] | None = None) -> Program:
    """The program of these stages of a verified plan, of all without them: their refits and they, in order of their
    start.

    A stage's output goes to a rank once, before the first stage there that reads it.
    """
    position = plan.graph.position
    tasks = [item for item in items(plan) if stages is None or _stage(item) in stages]
    tasks.sort(key=lambda t: (t.start_seconds, isinstance(t, Placement), position[_stage(t)]))
    deliveries = _deliveries(plan, [task for task in tasks if isinstance(task, Placement)])
    instructions: list[Instruction] = []
    for task in tasks:
        if isinstance(task, Refit):
            ranks = {*plan.pool_of(task.source).ranks, *plan.pool_of(task.target).ranks}
            instructions.append(MoveWeights(source=task.source, target=task.target, ranks=tuple(sorted(ranks))))
            continue
        received = [d for d in deliveries if d.consumer == task.stage]
        late = [d for d in received if task.schedule.chunk_tokens and plan.stage(d.producer).generates]
        instructions += [d.receive for d in received if d not in late]
        instructions.append(
            RunStage(stage=task.stage, ranks=tuple(plan.pool_of(task.stage).ranks), steps_ahead=task.steps_ahead)
        )
        instructions += [d.receive for d in late]
        hosted = [host.name for host in plan.graph.hosted] if task.stage == GENERATE else []
        instructions += [d.send for d in deliveries if d.producer in (task.stage, *hosted)]
    return Program(tuple(instructions), tuple(_streams(plan, [t for t in tasks if isinstance(t, Placement)])))


def _streams(plan: Plan, tasks: Sequence[Placement]) -> Iterator[Stream]:
    for consumer in tasks:
        if consumer.schedule.chunk_tokens:
            yield Stream(
                producer=GENERATE,
                consumer=consumer.stage,
                chunk_tokens=consumer.schedule.chunk_tokens,
                owners=owners(plan, GENERATE),
                targets=tuple(plan.pool(consumer.pool).ranks),
            )


def _stage(task: Refit | Placement) -> str:
    return task.target if isinstance(task, Refit) else task.stage


def owners(plan: Plan, stage: str) -> tuple[int, ...]:
    """The rank that holds each replica's output: first of its tensor-parallel group, on the last pipeline stage. What
    hosts write is with the ranks that generated."""
    stage = stage if stage in plan.graph.by_name else GENERATE
    layout, pool = plan.placement(stage).layout, plan.pool_of(stage)
    return tuple(pool.first_rank + layout.index(dp=dp, pp=layout.pp - 1) for dp in range(layout.dp))


@dataclass(frozen=True, kw_only=True)
class _Delivery:
    """What one producer gives to one consumer: only the ranks that no earlier consumer served."""

    producer: str
    consumer: str
    fields: tuple[str, ...]
    owners: tuple[int, ...]
    targets: tuple[int, ...]
    ahead: tuple[int, int]

    @property
    def send(self) -> Send:
        return Send(
            producer=self.producer,
            consumer=self.consumer,
            fields=self.fields,
            ranks=self.owners,
            targets=self.targets,
            steps_ahead=self.ahead[0],
        )

    @property
    def receive(self) -> Receive:
        return Receive(
            producer=self.producer,
            consumer=self.consumer,
            fields=self.fields,
            ranks=self.targets,
            owners=self.owners,
            steps_ahead=self.ahead[1],
        )


class _Producer(NamedTuple):
    """A stage that hands over what it writes."""

    stage: str
    steps_ahead: int
    writes: tuple[str, ...]


def _deliveries(plan: Plan, tasks: Sequence[Placement]) -> list[_Delivery]:
    """Every producer's whole output goes to each consuming rank once, with the first consumer there."""
    edges = {(edge.producer, edge.consumer) for edge in (*plan.graph.edges, *plan.graph.host_edges)}
    in_order_of_a_step = sorted(tasks, key=lambda placement: -placement.steps_ahead)
    producers = [_Producer(task.stage, task.steps_ahead, plan.stage(task.stage).writes) for task in in_order_of_a_step]
    if any(task.stage == GENERATE for task in tasks):
        ahead = plan.placement(GENERATE).steps_ahead
        producers += [_Producer(host.name, ahead, host.writes) for host in plan.graph.hosted]
    found = []
    for producer in producers:
        served: set[int] = set()
        for consumer in in_order_of_a_step:
            if (producer.stage, consumer.stage) not in edges:
                continue
            targets = tuple(rank for rank in plan.pool(consumer.pool).ranks if rank not in served)
            served.update(targets)
            if targets:
                found.append(
                    _Delivery(
                        producer=producer.stage,
                        consumer=consumer.stage,
                        fields=producer.writes,
                        owners=owners(plan, producer.stage),
                        targets=targets,
                        ahead=(producer.steps_ahead, consumer.steps_ahead),
                    )
                )
    return found
