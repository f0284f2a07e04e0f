"""What ran where from when to when, predicted or measured, in one schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshwright.profiles.documents import read_text
from meshwright.profiles.errors import BadInput

MEMORY, RESIDENT = "memory_bytes", "resident_bytes"
"""Facts of a stage's span: bytes on its rank while it runs, and those that stay when it has ended."""

NUM_CHUNK_TOKENS, NUM_OVERCOMMIT = "num_chunk_tokens", "num_overcommit"
"""Facts of a generation that controllers decided about: its turn's longest chunks, and sequences beyond a batch."""

LIVE = "num_live_sequences"
"""Fact of a span: sequences in flight on its rank's replica, on average over the span."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One instruction on one rank. Times are seconds since the start of the run.

    `clock` says whose time it is: measured, rehearsed or simulated.
    """

    step: int
    instruction: str
    kind: str  # stage | refit | send | receive | evaluate | checkpoint
    rank: int
    start_seconds: float
    end_seconds: float
    clock: str
    facts: Mapping[str, float] = field(default_factory=dict)  # e.g. num_tokens, memory_bytes

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, kw_only=True)
class Run:
    """The spans of one run on one clock, with the ranks of each pool; `name` tells it from other runs of its clock."""

    spans: tuple[Span, ...]
    pools: Mapping[str, Sequence[int]] = field(default_factory=dict)
    name: str = ""

    @property
    def label(self) -> str:
        """The clock, in capitals unless it is measured, and the name."""
        clocks = sorted({span.clock for span in self.spans})
        told = " and ".join(clock if clock == "measured" else clock.upper() for clock in clocks)
        return f"{told} {self.name}".strip()


def write_spans(path: Path, spans: Iterable[Span]) -> None:
    """One JSON object per line, keys sorted; appended to what is there."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(span), sort_keys=True) + "\n" for span in spans)


def read_spans(path: Path) -> tuple[Span, ...]:
    """The spans of a file written by `write_spans`. Raises BadInput naming the first line that is not a span."""
    spans = []
    for number, line in enumerate(read_text(path, "trace").splitlines(), start=1):
        try:
            spans.append(Span(**json.loads(line)))
        except (ValueError, TypeError):
            raise BadInput(
                f"trace {path} line {number} is not a span; if the file was cut short, delete that line."
            ) from None
    return tuple(spans)
