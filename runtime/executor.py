"""Executes a program on this rank, instruction by instruction, and writes down when each ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from meshwright.planner.program import Instruction, MoveWeights, Program, Receive, RunStage, Send
from meshwright.profiles.trace import Span
from meshwright.runtime import host
from meshwright.runtime.actions import Actions
from meshwright.runtime.batch import Batch
from meshwright.runtime.experience import Courier
from meshwright.runtime.outcome import Outcome
from meshwright.runtime.refit import Refit


class Executor:
    """Runs programs over the same stages, refits and couriers. `began` is the time.time() that spans count from."""

    def __init__(
        self,
        actions: Actions,
        refits: Mapping[tuple[str, str], Refit],
        courier: Courier,
        *,
        began: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._actions, self._refits, self._courier = actions, refits, courier
        self._began, self._clock = began, clock

    def execute(self, program: Program, batch: Batch) -> Outcome:
        """Executes this rank's part of the program on a batch."""
        rank = dist.get_rank()
        spans: list[Span] = []
        metrics: dict[str, Mapping[str, float]] = {}
        for instruction in program.of_rank(rank):
            start = self._now()
            facts = self._do(instruction, program, batch)
            spans.append(
                Span(
                    step=batch.step,
                    instruction=instruction.name,
                    kind=instruction.kind,
                    rank=rank,
                    start_seconds=start,
                    end_seconds=self._now(),
                    clock="measured",
                    facts=facts if instruction.kind != "stage" else _sizes(facts),
                )
            )
            if isinstance(instruction, RunStage):
                metrics[instruction.stage] = facts
        self._courier.flush()
        return Outcome(spans=tuple(spans), metrics=metrics)

    def _do(self, instruction: Instruction, program: Program, batch: Batch) -> Mapping[str, float]:
        match instruction:
            case MoveWeights(source=source, target=target):
                self._refits[source, target].run()
                return {}
            case RunStage(stage=stage):
                return self._actions.run(stage, batch)
            case Send():
                tag = program.tag(instruction.producer, instruction.consumer)
                return {"num_bytes": float(self._courier.send(instruction, batch.experience, tag))}
            case Receive():
                tag = program.tag(instruction.producer, instruction.consumer)
                return {"num_bytes": float(self._courier.receive(instruction, batch.experience, tag))}

    def _now(self) -> float:
        host.synchronise()
        return self._clock() - self._began


def _sizes(facts: Mapping[str, float]) -> Mapping[str, float]:
    return {name: value for name, value in facts.items() if name.startswith("num_")}
