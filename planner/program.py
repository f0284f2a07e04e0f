"""The program of one synchronous PPO step: the plan lowered to instructions in one order that every rank follows.

A rank executes the instructions that name it and skips the others. Sends never wait and every receive comes after its
send in the order, so ranks that follow the order cannot wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.planner.evaluate import items
from meshwright.planner.plan import Placement, Plan, Refit
from meshwright.profiles.stages import STAGE_BY_NAME, stage_graph


@dataclass(frozen=True, kw_only=True)
class MoveWeights:
    """Weights of the `source` stage's copy go to the `target` stage's copy."""

    source: str
    target: str
    ranks: tuple[int, ...]

    kind = "refit"

    @property
    def name(self) -> str:
        return f"refit {self.source} -> {self.target}"


@dataclass(frozen=True, kw_only=True)
class RunStage:
    stage: str
    ranks: tuple[int, ...]

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

    kind = "send"

    @property
    def name(self) -> str:
        return f"send {self.producer} -> {self.consumer}"


@dataclass(frozen=True, kw_only=True)
class Receive:
    """The other end of the send with the same producer and consumer. `ranks` are the targets."""

    producer: str
    consumer: str
    fields: tuple[str, ...]
    ranks: tuple[int, ...]
    owners: tuple[int, ...]

    kind = "receive"

    @property
    def name(self) -> str:
        return f"receive {self.producer} -> {self.consumer}"


Instruction: TypeAlias = MoveWeights | RunStage | Send | Receive


@dataclass(frozen=True)
class Program:
    """Instructions of one step, in the order that every rank follows."""

    instructions: tuple[Instruction, ...]

    def of_rank(self, rank: int) -> tuple[Instruction, ...]:
        return tuple(i for i in self.instructions if rank in i.ranks)

    def tag(self, producer: str, consumer: str) -> int:
        """A number that a send shares with its receive and with no other."""
        pairs = [(i.producer, i.consumer) for i in self.instructions if isinstance(i, Send)]
        return pairs.index((producer, consumer))


def lower(plan: Plan, stages: Collection[str] = tuple(STAGE_BY_NAME)) -> Program:
    """The program of these stages of a verified synchronous plan: their refits and they, in order of their start.

    A stage's output goes to a rank once, before the first stage there that reads it.
    """
    names = list(STAGE_BY_NAME)
    tasks = [item for item in items(plan) if _stage(item) in stages]
    tasks.sort(key=lambda t: (t.start_seconds, isinstance(t, Placement), names.index(_stage(t))))
    deliveries = _deliveries(plan, [task.stage for task in tasks if isinstance(task, Placement)])
    instructions: list[Instruction] = []
    for task in tasks:
        if isinstance(task, Refit):
            ranks = {*plan.pool_of(task.source).ranks, *plan.pool_of(task.target).ranks}
            instructions.append(MoveWeights(source=task.source, target=task.target, ranks=tuple(sorted(ranks))))
            continue
        instructions += [d.receive for d in deliveries if d.consumer == task.stage]
        instructions.append(RunStage(stage=task.stage, ranks=tuple(plan.pool_of(task.stage).ranks)))
        instructions += [d.send for d in deliveries if d.producer == task.stage]
    return Program(tuple(instructions))


def _stage(task: Refit | Placement) -> str:
    return task.target if isinstance(task, Refit) else task.stage


def owners(plan: Plan, stage: str) -> tuple[int, ...]:
    """The rank that holds each replica's output: first of its tensor-parallel group, on the last pipeline stage."""
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

    @property
    def send(self) -> Send:
        return Send(
            producer=self.producer,
            consumer=self.consumer,
            fields=self.fields,
            ranks=self.owners,
            targets=self.targets,
        )

    @property
    def receive(self) -> Receive:
        return Receive(
            producer=self.producer,
            consumer=self.consumer,
            fields=self.fields,
            ranks=self.targets,
            owners=self.owners,
        )


def _deliveries(plan: Plan, order: list[str]) -> list[_Delivery]:
    """Every producer's whole output goes to each consuming rank once, with the first consumer there."""
    graph = stage_graph()
    found = []
    for producer in order:
        served: set[int] = set()
        for consumer in order:
            if not graph.has_edge(producer, consumer):
                continue
            targets = tuple(rank for rank in plan.pool_of(consumer).ranks if rank not in served)
            served.update(targets)
            if targets:
                found.append(
                    _Delivery(
                        producer=producer,
                        consumer=consumer,
                        fields=STAGE_BY_NAME[producer].writes,
                        owners=owners(plan, producer),
                        targets=targets,
                    )
                )
    return found
