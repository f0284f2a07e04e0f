"""Runs side by side as one Chrome/Perfetto file, in the Trace Event Format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from meshwright.profiles.trace import LIVE, MEMORY, RESIDENT, Ends, Run, Span, ends_of

Event = dict[str, object]


def chrome_trace(runs: Sequence[Run]) -> str:
    """The runs as JSON for Perfetto: a process for each, a lane for each rank, named with the pools that it is in.

    Every run begins at 0. Arrows lead from sends to receives and along refits; memory and live sequences are counters
    for each rank where the spans tell them.
    """
    events: list[Event] = []
    for pid, run in enumerate(runs):
        began = min((span.start_seconds for span in run.spans), default=0.0)
        events += _lanes(pid, run)
        for span in run.spans:
            events.append(_slice(pid, began, span))
            events += _counters(pid, began, span)
        for number, (begin, end) in enumerate((*_handovers(run.spans), *_refits(run.spans))):
            events += _arrow(pid, began, f"{pid}.{number}", begin, end)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _lanes(pid: int, run: Run) -> Iterator[Event]:
    yield _metadata("process_name", pid, 0, name=run.label)
    yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    for rank in sorted({span.rank for span in run.spans}):
        where = ", ".join(name for name, ranks in run.pools.items() if rank in ranks)
        yield _metadata("thread_name", pid, rank, name=f"rank {rank} in {where}" if where else f"rank {rank}")
        yield _metadata("thread_sort_index", pid, rank, sort_index=rank)


def _metadata(what: str, pid: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _slice(pid: int, began: float, span: Span) -> Event:
    return {
        "ph": "X",
        "name": span.instruction,
        "cat": span.kind,
        "pid": pid,
        "tid": span.rank,
        "ts": _microseconds(span.start_seconds - began),
        "dur": _microseconds(span.seconds),
        "args": {"step": span.step, **span.facts},
    }


def _counters(pid: int, began: float, span: Span) -> Iterator[Event]:
    """Two points of a rank's counter: its value while the span runs, and after it."""
    values: list[tuple[str, str, float, float]] = []
    if MEMORY in span.facts and RESIDENT in span.facts:
        values.append(("memory", "bytes", span.facts[MEMORY], span.facts[RESIDENT]))
    if LIVE in span.facts:
        values.append(("live sequences", "sequences", span.facts[LIVE], 0.0))
    for what, unit, during, after in values:
        for at, value in ((span.start_seconds, during), (span.end_seconds, after)):
            yield {
                "ph": "C",
                "name": f"{what} of rank {span.rank}",
                "pid": pid,
                "tid": span.rank,
                "ts": _microseconds(at - began),
                "args": {unit: value},
            }


def _handovers(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """For each receive its send: of several owners' the one that ended last."""
    sends: dict[tuple[int, Ends], Span] = {}
    for span in spans:
        if span.kind == "send":
            key = span.step, ends_of(span)
            if key not in sends or sends[key].end_seconds < span.end_seconds:
                sends[key] = span
    for span in spans:
        if span.kind == "receive" and (span.step, ends_of(span)) in sends:
            yield sends[span.step, ends_of(span)], span


def _refits(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """For each rank that a refit gives weights to, a rank that has them, where these differ."""
    ranks_of: dict[str, set[int]] = {}
    refits: dict[tuple[int, Ends], dict[int, Span]] = {}
    for span in spans:
        if span.kind == "stage":
            ranks_of.setdefault(span.instruction, set()).add(span.rank)
        elif span.kind == "refit":
            refits.setdefault((span.step, ends_of(span)), {})[span.rank] = span
    for (_, ends), by_rank in refits.items():
        givers = sorted(ranks_of.get(ends.source, set()) & by_rank.keys())
        for number, taker in enumerate(sorted(ranks_of.get(ends.target, set()) & by_rank.keys())):
            if givers and givers[number % len(givers)] != taker:
                yield by_rank[givers[number % len(givers)]], by_rank[taker]


def _arrow(pid: int, began: float, number: str, begin: Span, end: Span) -> Iterator[Event]:
    """A flow from the start of one span to the end of another; `bp` binds it to the slice that encloses it."""
    flow: Mapping[str, object] = {
        "cat": "flow",
        "name": str(ends_of(begin)) if begin.kind == "send" else begin.instruction,
        "id": number,
        "pid": pid,
    }
    yield {"ph": "s", "tid": begin.rank, "ts": _microseconds(begin.start_seconds - began), **flow}
    yield {"ph": "f", "bp": "e", "tid": end.rank, "ts": _microseconds(end.end_seconds - began), **flow}


def _microseconds(seconds: float) -> float:
    return seconds * 1e6
