"""Follows a program on one rank, turn by turn and instruction by instruction, and writes down when each ran.

It is the one piece of code that schedules: the runtime and the rehearsal differ in what a device does, nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from meshwright.planner.program.program import Instruction, MoveWeights, Program, Receive, RunStage, Send, takes_part
from meshwright.profiles.stages import ENVIRONMENT
from meshwright.profiles.trace import Span
from meshwright.runtime.execution.steady_clock import steady_now
from meshwright.runtime.messages.experience import Experience, ExperienceTransport
from meshwright.runtime.messages.step_experience import StepExperience
from meshwright.runtime.records.outcome import Findings, Outcome


class RankDevice(Protocol):
    """What a rank's device does: it computes, or it waits for as long as computing would take."""

    def begin(self, turn: int) -> None:
        """A turn begins."""
        ...

    def run_stage(self, stage: str, batch: StepExperience) -> Findings:
        """Runs a stage that this rank belongs to."""
        ...

    def refit(self, source: str, target: str) -> Findings:
        """Takes this rank's part in giving the source's weights to the target."""
        ...

    def synchronise(self) -> None:
        """Returns when everything asked of the device is done."""
        ...


class Hosts(Protocol):
    """Workers of this rank's host that score responses while it goes on."""

    def when_scored(self, batch: StepExperience, send: Callable[[Experience], object]) -> None:
        """Calls `send` with what they have written of a batch when it is there, maybe from another thread."""
        ...

    def put_scores(self, batch: StepExperience) -> None:
        """Waits for it, and puts it into the batch."""
        ...


Watched = Callable[[Instruction, int, int, int], AbstractContextManager[None]]


def _unwatched(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


class Executor:
    """Runs programs on one rank. `began` is the `steady_now()` that spans count from, `clock` whose time it is.

    `batch_of` gives the batch of a step, the same one whenever it is asked for as long as the step is worked on.
    """

    def __init__(
        self,
        device: RankDevice,
        exchange: ExperienceTransport,
        batch_of: Callable[[int], StepExperience],
        *,
        rank: int,
        began: float,
        clock: str,
        now: Callable[[], float] = steady_now,
        watched: Watched = _unwatched,
        hosts: Hosts | None = None,
    ) -> None:
        """`watched` gives what each instruction is done within, from the instruction, its place among all, its turn and
        its step; `hosts` write what the environment stage does, on a rank that owns responses."""
        self._hosts = hosts
        self._device, self._exchange, self._batch_of, self._rank = (
            device,
            exchange,
            batch_of,
            rank,
        )
        self._began, self._clock, self._time, self._watched = began, clock, now, watched

    def execute(self, program: Program, turn: int, steps: range) -> Outcome:
        """Executes this rank's part of one turn of a run of these steps."""
        spans: list[Span] = []
        metrics: dict[str, Mapping[str, float]] = {}
        self._device.begin(turn)
        instructions = [i for i in program.of_rank(self._rank) if takes_part(i, turn, steps)]
        for instruction in instructions:
            if isinstance(instruction, Receive):
                self._exchange.expect(instruction, program.channels[instruction.producer, instruction.consumer])
        for instruction in instructions:
            step = turn + instruction.steps_ahead
            with self._watched(instruction, program.instructions.index(instruction), turn, step):
                start = self._now()
                findings = self._do(instruction, program, step)
                end = self._now()
            spans.append(
                Span(
                    step=step,
                    instruction=instruction.name,
                    kind=instruction.kind,
                    rank=self._rank,
                    start_seconds=start,
                    end_seconds=end,
                    clock=self._clock,
                    facts=findings.facts,
                )
            )
            if isinstance(instruction, RunStage):
                metrics[instruction.stage] = findings.metrics
        return Outcome(turn=turn, spans=tuple(spans), metrics=metrics)

    def flush(self) -> None:
        """Waits until everything sent has arrived."""
        self._exchange.flush()

    def _do(self, instruction: Instruction, program: Program, step: int) -> Findings:
        match instruction:
            case MoveWeights(source=source, target=target):
                return self._device.refit(source, target)
            case RunStage(stage=stage):
                return self._device.run_stage(stage, self._batch_of(step))
            case Send(producer=producer) if producer == ENVIRONMENT:
                channel, batch = program.channels[instruction.producer, instruction.consumer], self._batch_of(step)
                assert self._hosts is not None
                self._hosts.when_scored(batch, lambda found: self._exchange.send(instruction, found, channel, step))
                return _moved(0)
            case Send():
                channel, batch = program.channels[instruction.producer, instruction.consumer], self._batch_of(step)
                return _moved(self._exchange.send(instruction, batch.experience, channel, step))
            case Receive():
                channel, batch = program.channels[instruction.producer, instruction.consumer], self._batch_of(step)
                if instruction.producer == ENVIRONMENT and self._rank in instruction.owners:
                    assert self._hosts is not None
                    self._hosts.put_scores(batch)
                return _moved(self._exchange.receive(instruction, batch.experience, channel, step))

    def _now(self) -> float:
        self._device.synchronise()
        return self._time() - self._began


def _moved(num_bytes: int) -> Findings:
    return Findings(facts={"num_bytes": float(num_bytes)})
