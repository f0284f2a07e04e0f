"""The executor runs a program on one rank, period by period, and records a span for every instruction.

It is the only code that orders work. A run and a rehearsal differ only in their device. Spans are timed by a wall clock
that is not affected when the system clock is changed during the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    is_active,
)
from meshwright.profiles.stages import ENVIRONMENT, GENERATE
from meshwright.profiles.trace import Span
from meshwright.runtime.messages.experience import Experience, ExperienceTransport, StepExperience
from meshwright.runtime.records.results import InstructionResult, PeriodResult

_WALL_CLOCK_OFFSET = time.time() - time.monotonic()


def steady_now() -> float:
    """Return seconds since 1970, which increase steadily even if the system clock is set forward or back."""
    return _WALL_CLOCK_OFFSET + time.monotonic()


class RankDevice(Protocol):
    """The device of a rank, which computes, or waits for as long as computing would take."""

    def begin(self, period: int) -> None:
        """Begin a period."""
        ...

    def run_stage(self, stage: str, batch: StepExperience) -> InstructionResult:
        """Run a stage that this rank belongs to."""
        ...

    def refit(self, source: str, target: str) -> InstructionResult:
        """Copy this rank's share of the weights of `source` to `target`."""
        ...

    def synchronise(self) -> None:
        """Wait until all work submitted to the device is done."""
        ...


class Hosts(Protocol):
    """Workers on this rank's host that score responses while the rank continues."""

    def when_scored(self, batch: StepExperience, send: Callable[[Experience], object]) -> None:
        """Call `send` with the scores of a batch once they are known, possibly from another thread."""
        ...

    def put_scores(self, batch: StepExperience) -> None:
        """Wait for the scores of a batch and put them into it."""
        ...


class BatchFilling(Protocol):
    """Fills the batch of a step with samples selected from successive waves of prompts."""

    @property
    def is_full(self) -> bool: ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of all samples of all waves, kept or not."""
        ...

    def next_wave(self) -> StepExperience:
        """Return an empty wave."""
        ...

    def take(self, wave: StepExperience) -> None:
        """Select from a scored wave."""
        ...

    def fill(self, batch: StepExperience) -> None:
        """Put the selected samples into the batch."""
        ...


InstructionContext = Callable[[Instruction, int, int, int], AbstractContextManager[None]]
"""Returns the context in which an instruction runs, from the instruction, its index in the program, its period and its
step."""


def _no_context(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class _PeriodRecord:
    """Spans and metrics of one period of a program."""

    program: Program
    period: int
    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, Mapping[str, float]] = field(default_factory=dict)

    def index_of(self, instruction: Instruction) -> int:
        """Return the index of an instruction in the program. The exchange of waves has the index of the selection."""
        if self.program.waves and instruction in self.program.waves.exchange:
            return self.program.waves.num_before_selection
        return self.program.instructions.index(instruction)


class Executor:
    """Runs programs on one rank.

    Seconds in spans count from `start_seconds`, a value of `steady_now()`; `clock` names the clock in them. `batch_of`
    returns the batch of a step, the same object each time until the step is trained.
    """

    def __init__(
        self,
        device: RankDevice,
        exchange: ExperienceTransport,
        batch_of: Callable[[int], StepExperience],
        *,
        rank: int,
        start_seconds: float,
        clock: str,
        now: Callable[[], float] = steady_now,
        instruction_context: InstructionContext = _no_context,
        hosts: Hosts | None = None,
        filling: Callable[[int], BatchFilling] | None = None,
    ) -> None:
        """Set up the executor of one rank.

        `instruction_context` returns the context that each instruction runs in. `hosts` score responses on a rank
        that owns some. `filling` returns what fills the batch of a step where a program has waves.
        """
        self._hosts, self._filling = hosts, filling
        self._device, self._exchange, self._batch_of, self._rank = (
            device,
            exchange,
            batch_of,
            rank,
        )
        self._start_seconds, self._clock, self._time, self._instruction_context = (
            start_seconds,
            clock,
            now,
            instruction_context,
        )

    def execute(self, program: Program, period: int, steps: range) -> PeriodResult:
        """Execute this rank's part of one period of a run of these steps."""
        record = _PeriodRecord(program, period)
        self._device.begin(period)
        instructions = [i for i in program.of_rank(self._rank) if is_active(i, period, steps)]
        waves = program.waves if program.waves and self._rank in program.waves.ranks else None
        others = [i for i in instructions if not waves or i not in waves.instructions]
        self._post_receives(others, program)
        if waves and period + waves.steps_ahead in steps and not self._is_filled(period + waves.steps_ahead):
            before = set(program.instructions[: waves.num_before_selection])
            self._fill_from_waves(waves, [i for i in instructions if i in before], record)
            others = [i for i in others if i not in before]
        for instruction in others:
            self._run(instruction, record)
        if waves and period in steps:
            record.metrics[GENERATE] = self._batch_of(period).selection
        return PeriodResult(period=period, spans=tuple(record.spans), metrics=record.metrics)

    def _post_receives(self, instructions: Iterable[Instruction], program: Program) -> None:
        for instruction in instructions:
            if isinstance(instruction, Receive):
                self._exchange.post_receive(instruction, program.channels[instruction.producer, instruction.consumer])

    def _is_filled(self, step: int) -> bool:
        """True if the samples of a step were selected before the run was interrupted."""
        return bool(self._batch_of(step).selection)

    def _fill_from_waves(self, waves: Waves, before: Sequence[Instruction], record: _PeriodRecord) -> None:
        """Fill the batch of the step that is sampled in this period.

        Execute the instructions `before` the selection, which include those of the first wave. Then exchange scores and
        select samples, and repeat this with further waves until the batch is full.
        """
        assert self._filling is not None
        step = record.period + waves.steps_ahead
        filling = self._filling(step)
        repeated, exchange = (
            [i for i in part if self._rank in i.ranks] for part in (waves.instructions, waves.exchange)
        )
        pending = before
        while not filling.is_full:
            wave = filling.next_wave()
            self._post_receives([*repeated, *exchange], record.program)
            for instruction in (*pending, *exchange):
                is_of_wave = instruction in repeated or instruction in exchange
                self._run(instruction, record, wave if is_of_wave else None)
            filling.take(wave)
            pending = repeated
        batch = self._batch_of(step)
        filling.fill(batch)
        batch.selection.update(filling.metrics)

    def _run(self, instruction: Instruction, record: _PeriodRecord, wave: StepExperience | None = None) -> None:
        """Run an instruction on a wave, or on the batch of its step, and record its span."""
        batch = wave or self._batch_of(record.period + instruction.steps_ahead)
        with self._instruction_context(instruction, record.index_of(instruction), record.period, batch.step):
            start = self._now()
            result = self._dispatch(instruction, record.program, batch)
            end = self._now()
        record.spans.append(
            Span(
                step=batch.step,
                instruction=instruction.name,
                kind=instruction.kind,
                rank=self._rank,
                start_seconds=start,
                end_seconds=end,
                clock=self._clock,
                facts=result.facts,
            )
        )
        if isinstance(instruction, RunStage):
            record.metrics[instruction.stage] = result.metrics

    def flush(self) -> None:
        """Wait until everything sent has arrived."""
        self._exchange.flush()

    def _dispatch(self, instruction: Instruction, program: Program, batch: StepExperience) -> InstructionResult:
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
                    batch, lambda scores: self._exchange.send(instruction, scores, channel, batch.step)
                )
                return _bytes_result(0)  # the scores are sent later, outside this span
            case Send():
                return _bytes_result(self._exchange.send(instruction, batch.experience, channel, batch.step))
            case Receive():
                if instruction.producer == ENVIRONMENT and self._rank in instruction.owners:
                    assert self._hosts is not None
                    self._hosts.put_scores(batch)
                return _bytes_result(self._exchange.receive(instruction, batch.experience, channel, batch.step))

    def _now(self) -> float:
        self._device.synchronise()
        return self._time() - self._start_seconds


def _bytes_result(num_bytes: int) -> InstructionResult:
    return InstructionResult(facts={"num_bytes": float(num_bytes)})
