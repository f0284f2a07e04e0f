"""Follows a program on one rank, instruction by instruction, and writes down when each ran.

It is the one piece of code that schedules: the runtime and the rehearsal differ in what a device does, nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from meshwright.planner.program import Instruction, MoveWeights, Program, Receive, RunStage, Send
from meshwright.profiles.trace import Span
from meshwright.runtime.batch import Batch
from meshwright.runtime.experience import Courier
from meshwright.runtime.outcome import Outcome


class Device(Protocol):
    """What a rank's device does: it computes, or it waits for as long as computing would take."""

    def run_stage(self, stage: str, batch: Batch) -> Mapping[str, float]:
        """Runs a stage that this rank belongs to; returns what is worth recording of it."""
        ...

    def refit(self, source: str, target: str) -> None:
        """Takes this rank's part in giving the source's weights to the target."""
        ...

    def synchronise(self) -> None:
        """Returns when everything asked of the device is done."""
        ...


class Executor:
    """Runs programs on one rank. `began` is the time.time() that spans count from, `clock` whose time it is."""

    def __init__(
        self,
        device: Device,
        courier: Courier,
        *,
        rank: int,
        began: float,
        clock: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._device, self._courier, self._rank = device, courier, rank
        self._began, self._clock, self._time = began, clock, now

    def execute(self, program: Program, batch: Batch) -> Outcome:
        """Executes this rank's part of the program on a batch."""
        spans: list[Span] = []
        metrics: dict[str, Mapping[str, float]] = {}
        for instruction in program.of_rank(self._rank):
            start = self._now()
            facts = self._do(instruction, program, batch)
            spans.append(
                Span(
                    step=batch.step,
                    instruction=instruction.name,
                    kind=instruction.kind,
                    rank=self._rank,
                    start_seconds=start,
                    end_seconds=self._now(),
                    clock=self._clock,
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
                self._device.refit(source, target)
                return {}
            case RunStage(stage=stage):
                return self._device.run_stage(stage, batch)
            case Send():
                tag = program.channels[instruction.producer, instruction.consumer]
                return {"num_bytes": float(self._courier.send(instruction, batch.experience, tag))}
            case Receive():
                tag = program.channels[instruction.producer, instruction.consumer]
                return {"num_bytes": float(self._courier.receive(instruction, batch.experience, tag))}

    def _now(self) -> float:
        self._device.synchronise()
        return self._time() - self._began


def _sizes(facts: Mapping[str, float]) -> Mapping[str, float]:
    return {name: value for name, value in facts.items() if name.startswith("num_")}
