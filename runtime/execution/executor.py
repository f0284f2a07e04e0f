"""Follows a program on one rank, turn by turn and instruction by instruction, and writes down when each ran.

It is the one piece of code that schedules: the runtime and the rehearsal differ in what a device does, nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from meshwright.planner.program.program import (
    Instruction,
    MoveWeights,
    Program,
    Receive,
    RunStage,
    Send,
    Waves,
    takes_part,
)
from meshwright.profiles.stages import ENVIRONMENT, GENERATE
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


class BatchFilling(Protocol):
    """Fills the batch of a step with what is kept of one wave of prompts after another."""

    @property
    def is_full(self) -> bool: ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """What is reported of all that was drawn."""
        ...

    def next_wave(self) -> StepExperience:
        """An empty wave."""
        ...

    def take(self, wave: StepExperience) -> None:
        """Takes a wave that was scored."""
        ...

    def fill(self, batch: StepExperience) -> None:
        """Puts what is kept into the batch."""
        ...


Watched = Callable[[Instruction, int, int, int], AbstractContextManager[None]]


def _unwatched(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class _Noted:
    """What a turn of a program leaves."""

    program: Program
    turn: int
    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, Mapping[str, float]] = field(default_factory=dict)


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
        filling: Callable[[int], BatchFilling] | None = None,
    ) -> None:
        """`watched` gives what each instruction is done within, from the instruction, its place among all, its turn and
        its step; `hosts` write what the environment stage does, on a rank that owns responses; `filling` fills the
        batch of a step where a program has waves."""
        self._hosts, self._filling = hosts, filling
        self._device, self._exchange, self._batch_of, self._rank = (
            device,
            exchange,
            batch_of,
            rank,
        )
        self._began, self._clock, self._time, self._watched = began, clock, now, watched

    def execute(self, program: Program, turn: int, steps: range) -> Outcome:
        """Executes this rank's part of one turn of a run of these steps."""
        noted = _Noted(program, turn)
        self._device.begin(turn)
        instructions = [i for i in program.of_rank(self._rank) if takes_part(i, turn, steps)]
        self._make_room(instructions, program)
        waves, first = program.waves, program.waves.others if program.waves else 0
        if waves and self._rank in waves.ranks and turn in steps:
            before = set(program.instructions[:first])
            self._follow_all([i for i in instructions if i in before], noted)
            self._draw(waves, noted)
            instructions = [i for i in instructions if i not in before]
        self._follow_all(instructions, noted)
        return Outcome(turn=turn, spans=tuple(noted.spans), metrics=noted.metrics)

    def _make_room(self, instructions: Sequence[Instruction], program: Program) -> None:
        """For what will be received."""
        for instruction in instructions:
            if isinstance(instruction, Receive):
                self._exchange.expect(instruction, program.channels[instruction.producer, instruction.consumer])

    def _follow_all(self, instructions: Sequence[Instruction], noted: _Noted) -> None:
        for instruction in instructions:
            self._follow(
                instruction,
                noted,
                place=noted.program.instructions.index(instruction),
                batch=self._batch_of(noted.turn + instruction.steps_ahead),
            )

    def _draw(self, waves: Waves, noted: _Noted) -> None:
        """Fills the batch of the turn's step with groups of one wave after another."""
        assert self._filling is not None
        filling = self._filling(noted.turn)
        mine = [i for i in waves.instructions if self._rank in i.ranks]
        while not filling.is_full:
            wave = filling.next_wave()
            self._make_room(mine, noted.program)
            for instruction in mine:
                self._follow(instruction, noted, place=waves.others, batch=wave)
            filling.take(wave)
        filling.fill(self._batch_of(noted.turn))
        noted.metrics[GENERATE] = filling.metrics

    def _follow(self, instruction: Instruction, noted: _Noted, *, place: int, batch: StepExperience) -> None:
        """Does an instruction with a batch and notes when; `place` is its among all."""
        with self._watched(instruction, place, noted.turn, batch.step):
            start = self._now()
            findings = self._do(instruction, noted.program, batch)
            end = self._now()
        noted.spans.append(
            Span(
                step=batch.step,
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
            noted.metrics[instruction.stage] = findings.metrics

    def flush(self) -> None:
        """Waits until everything sent has arrived."""
        self._exchange.flush()

    def _do(self, instruction: Instruction, program: Program, batch: StepExperience) -> Findings:
        if isinstance(instruction, Send | Receive):
            channel = program.channels[instruction.producer, instruction.consumer]
        match instruction:
            case MoveWeights(source=source, target=target):
                return self._device.refit(source, target)
            case RunStage(stage=stage):
                return self._device.run_stage(stage, batch)
            case Send(producer=producer) if producer == ENVIRONMENT:
                assert self._hosts is not None
                self._hosts.when_scored(
                    batch, lambda found: self._exchange.send(instruction, found, channel, batch.step)
                )
                return _moved(0)
            case Send():
                return _moved(self._exchange.send(instruction, batch.experience, channel, batch.step))
            case Receive():
                if instruction.producer == ENVIRONMENT and self._rank in instruction.owners:
                    assert self._hosts is not None
                    self._hosts.put_scores(batch)
                return _moved(self._exchange.receive(instruction, batch.experience, channel, batch.step))

    def _now(self) -> float:
        self._device.synchronise()
        return self._time() - self._began


def _moved(num_bytes: int) -> Findings:
    return Findings(facts={"num_bytes": float(num_bytes)})
