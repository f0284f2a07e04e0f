"""What instructions, and one turn of them, left on one rank. It needs no torch, so that records are read without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.profiles.trace import Span


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What is worth recording of an instruction: facts of what was done and how, and metrics of what was learned."""

    facts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def with_facts(self, facts: Mapping[str, float]) -> Findings:
        """The same with these facts behind the others."""
        return Findings(facts={**self.facts, **facts}, metrics=self.metrics)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one turn: a span for each instruction, with its facts, and the metrics of the stages that ran."""

    turn: int
    spans: tuple[Span, ...]
    overhead: float = 0.0  # of the rank's time since its last turn, the part outside stages, messages and barriers
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by stage
