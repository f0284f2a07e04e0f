"""What ran where from when to when, predicted or measured, in one schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshwright.profiles.documents import read_text
from meshwright.profiles.errors import BadInput

MEMORY, RESIDENT = "memory_bytes", "resident_bytes"
"""Facts of a stage's span: bytes on its rank while it runs, and those that stay when it has ended."""

_CLOCKS = ("simulated", "rehearsed", "measured")
"""Top to bottom in a timeline."""

Event = dict[str, object]


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


def chrome_trace(spans: Iterable[Span], pools: Mapping[str, Sequence[int]] | None = None) -> str:
    """The spans as Chrome/Perfetto JSON: a process per clock, a lane per rank, named with the `pools` that it is in.

    Arrows lead from sends to receives and along refits; memory is a counter for each rank where the spans tell it.
    """
    spans = list(spans)
    clocks = sorted({span.clock for span in spans}, key=lambda clock: (*_CLOCKS, clock).index(clock))
    events: list[Event] = []
    for pid, clock in enumerate(clocks):
        mine = [span for span in spans if span.clock == clock]
        events += _lanes(pid, clock, mine, pools or {})
        events += [_slice(pid, span) for span in mine]
        events += [event for span in mine for event in _memory(pid, span)]
        for number, (begin, end) in enumerate((*_handovers(mine), *_refits(mine))):
            events += _arrow(pid, f"{clock} {number}", begin, end)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _lanes(pid: int, clock: str, spans: Sequence[Span], pools: Mapping[str, Sequence[int]]) -> Iterator[Event]:
    label = clock if clock == "measured" else clock.upper()
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": label}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for rank in sorted({span.rank for span in spans}):
        where = ", ".join(name for name, ranks in pools.items() if rank in ranks)
        name = f"rank {rank} in {where}" if where else f"rank {rank}"
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": rank, "args": {"sort_index": rank}}


def _slice(pid: int, span: Span) -> Event:
    return {
        "ph": "X",
        "name": span.instruction,
        "cat": span.kind,
        "pid": pid,
        "tid": span.rank,
        "ts": span.start_seconds * 1e6,
        "dur": span.seconds * 1e6,
        "args": {"step": span.step, **span.facts},
    }


def _memory(pid: int, span: Span) -> Iterator[Event]:
    """Two points of the rank's counter: while the span runs, and after it."""
    if MEMORY in span.facts and RESIDENT in span.facts:
        for at, fact in ((span.start_seconds, MEMORY), (span.end_seconds, RESIDENT)):
            value = {"bytes": span.facts[fact]}
            yield {"ph": "C", "name": f"memory of rank {span.rank}", "pid": pid, "ts": at * 1e6, "args": value}


def _handovers(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """For each receive its send: of several owners' the one that ended last."""
    sends: dict[tuple[int, str], Span] = {}
    for span in spans:
        if span.kind == "send":
            key = span.step, span.instruction.removeprefix("send ")
            if key not in sends or sends[key].end_seconds < span.end_seconds:
                sends[key] = span
    for span in spans:
        key = span.step, span.instruction.removeprefix("receive ")
        if span.kind == "receive" and key in sends:
            yield sends[key], span


def _refits(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """For each rank that a refit gives weights to, a rank that has them, where these differ."""
    ranks_of: dict[str, set[int]] = {}
    refits: dict[tuple[int, str], dict[int, Span]] = {}
    for span in spans:
        if span.kind == "stage":
            ranks_of.setdefault(span.instruction, set()).add(span.rank)
        elif span.kind == "refit":
            refits.setdefault((span.step, span.instruction), {})[span.rank] = span
    for (_, name), by_rank in refits.items():
        source, _, target = name.removeprefix("refit ").partition(" -> ")
        givers = sorted(ranks_of.get(source, set()) & by_rank.keys())
        for number, taker in enumerate(sorted(ranks_of.get(target, set()) & by_rank.keys())):
            if givers and givers[number % len(givers)] != taker:
                yield by_rank[givers[number % len(givers)]], by_rank[taker]


def _arrow(pid: int, number: str, begin: Span, end: Span) -> Iterator[Event]:
    """A flow from the start of one span to the end of another; `bp` binds it to the slice that encloses it."""
    flow = {"cat": "flow", "name": begin.instruction.removeprefix("send "), "id": number, "pid": pid}
    yield {"ph": "s", "tid": begin.rank, "ts": begin.start_seconds * 1e6, **flow}
    yield {"ph": "f", "bp": "e", "tid": end.rank, "ts": end.end_seconds * 1e6, **flow}


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
