"""What one turn of a program left on one rank. It needs no torch, so that records are read without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.profiles.trace import Span


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The spans of the turn's instructions on the rank, and what its stages measured of what was learned."""

    turn: int
    spans: tuple[Span, ...]
    overhead: float = 0.0  # of the rank's time since its last turn, the part outside stages, messages and barriers
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by stage
