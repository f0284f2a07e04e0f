"""Results of an instruction and of a period on one rank, of a rehearsal, of a replayed batch, and of tried rewards.

No torch is needed to read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.planner.simulation.simulate import StepTimes
from meshwright.profiles.trace import Span


@dataclass(frozen=True, kw_only=True)
class InstructionResult:
    """The record of an instruction: facts on how it ran, and metrics of training."""

    facts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def with_facts(self, facts: Mapping[str, float]) -> InstructionResult:
        """Return a copy with these facts added."""
        return InstructionResult(facts={**self.facts, **facts}, metrics=self.metrics)


@dataclass(frozen=True, kw_only=True)
class PeriodResult:
    """One period on one rank: a span for each instruction, and the metrics of the stages that ran."""

    period: int
    spans: tuple[Span, ...]
    overhead: float = 0.0  # fraction of the rank's time in the period outside stages, messages and barriers
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by stage


@dataclass(frozen=True, kw_only=True)
class UpdateReplay:
    """One update of a replayed batch: its metrics, and the rows whose own loss or gradient is not finite."""

    rows: tuple[int, ...]
    metrics: Mapping[str, float]
    bad_rows: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BatchReplay:
    """The replay of a skipped batch on the weights of a checkpoint of its run."""

    stage: str
    step: int
    weights_of_step: int
    """Step of the newest checkpoint that is not newer than the batch; 0 for the initial weights."""
    reasons: tuple[str, ...]
    """Reasons for which the run skipped the batch."""
    updates: tuple[UpdateReplay, ...]


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The results of a rehearsal.

    `steps` and `spans` are in seconds of the plan, which are wall time divided by `speed`. It is a time scale: with 0.1
    the rehearsal takes a tenth of the planned time.

    `overhead_wall_seconds` is the time that the executor itself takes per instruction (median over ranks and steps).
    `processor_seconds` are those of all processes per step; they take at least `processor_seconds / num_processors` of
    wall time, however long the waits are.
    """

    clock: str
    durations: str
    speed: float
    num_processes: int
    ranks_per_process: int
    steps: StepTimes
    simulated: StepTimes
    overhead_wall_seconds: float
    num_instructions: int
    message_bytes: float  # per step, over all ranks
    processor_seconds: float
    num_processors: int
    error: float  # (rehearsed - simulated) / simulated, of the mean step
    excess_seconds: float  # wall time per step beyond the waits: messages, scheduling, other work of this machine
    spans: tuple[Span, ...] = ()

    @property
    def processor_share(self) -> float:
        """The fraction of processor time that was used, 0 to 1; near 1 the processors were the limit."""
        return self.processor_seconds / (self.num_processors * self.steps.mean * self.speed)


@dataclass(frozen=True, kw_only=True)
class TriedScore:
    """One reward of a tried sample: its score and the seconds until it was known, or the reason why the call failed."""

    reward: str
    score: float | None
    seconds: float | None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class TriedSample:
    """A made-up response with its scores. `is_answer` is True for the prompt's reference answer; `total` is the
    weighted sum of the scores, None if a call failed."""

    id: str
    is_answer: bool
    prompt: str
    response: str
    scores: tuple[TriedScore, ...]
    total: float | None


@dataclass(frozen=True, kw_only=True)
class RewardTrial:
    """The tried samples, and remarks on scores that would teach nothing."""

    samples: tuple[TriedSample, ...]
    notes: tuple[str, ...]

    @property
    def num_failed(self) -> int:
        """Number of calls that failed."""
        return sum(score.error is not None for sample in self.samples for score in sample.scores)
