"""What ran where from when to when, predicted or measured, in one schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path


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
    facts: Mapping[str, float] = field(default_factory=dict)  # e.g. num_tokens, peak_bytes

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def chrome_trace(spans: Iterable[Span]) -> str:
    """The spans as Chrome/Perfetto JSON: one process per clock, one lane per rank."""
    spans = list(spans)
    clocks = sorted({span.clock for span in spans})
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": clock}}
        for pid, clock in enumerate(clocks)
    ]
    for pid, clock in enumerate(clocks):
        ranks = sorted({span.rank for span in spans if span.clock == clock})
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in ranks
        ]
    events += [
        {
            "ph": "X",
            "name": span.instruction,
            "cat": span.kind,
            "pid": clocks.index(span.clock),
            "tid": span.rank,
            "ts": span.start_seconds * 1e6,
            "dur": span.seconds * 1e6,
            "args": {"step": span.step, **span.facts},
        }
        for span in spans
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def write_spans(path: Path, spans: Iterable[Span]) -> None:
    """One JSON object per line, keys sorted; appended to what is there."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(span), sort_keys=True) + "\n" for span in spans)


def read_spans(path: Path) -> tuple[Span, ...]:
    """The spans of a file written by `write_spans`."""
    return tuple(Span(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())
