"""Results of an instruction and of a period on one rank. No torch is needed to read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
