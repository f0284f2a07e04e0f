"""Export of one or more runs as a Chrome/Perfetto file in the Trace Event Format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from meshwright.profiles.trace import MEMORY, NUM_LIVE, RESIDENT, Endpoints, Run, Span, endpoints_of

Event = dict[str, object]


def chrome_trace(runs: Sequence[Run]) -> str:
    """Return the runs as Perfetto JSON: a process for each run, a thread for each rank, named with its pools.

    Every run starts at 0. Flow arrows connect sends to receives and the source and target ranks of refits. Memory and
    live sequences are counters of each rank, if its spans record them.
    """
    events: list[Event] = []
    for pid, run in enumerate(runs):
        start = min((span.start_seconds for span in run.spans), default=0.0)
        events += _lanes(pid, run)
        for span in run.spans:
            events.append(_slice(pid, start, span))
            events += _counters(pid, start, span)
        for number, (begin, end) in enumerate((*_transfers(run.spans), *_refits(run.spans))):
            events += _arrow(pid, start, f"{pid}.{number}", begin, end)
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


def _slice(pid: int, start: float, span: Span) -> Event:
    return {
        "ph": "X",
        "name": span.instruction,
        "cat": span.kind,
        "pid": pid,
        "tid": span.rank,
        "ts": _microseconds(span.start_seconds - start),
        "dur": _microseconds(span.seconds),
        "args": {"step": span.step, **span.facts},
    }


def _counters(pid: int, start: float, span: Span) -> Iterator[Event]:
    """Two events for each counter of a rank: its value while the span runs, and after it."""
    values: list[tuple[str, str, float, float]] = []
    if MEMORY in span.facts and RESIDENT in span.facts:
        values.append(("memory", "bytes", span.facts[MEMORY], span.facts[RESIDENT]))
    if NUM_LIVE in span.facts:
        values.append(("live sequences", "sequences", span.facts[NUM_LIVE], 0.0))
    for what, unit, during, after in values:
        for at, value in ((span.start_seconds, during), (span.end_seconds, after)):
            yield {
                "ph": "C",
                "name": f"{what} of rank {span.rank}",
                "pid": pid,
                "tid": span.rank,
                "ts": _microseconds(at - start),
                "args": {unit: value},
            }


def _transfers(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """For each receive, the matching send; of several senders, the one that ended last."""
    sends: dict[tuple[int, Endpoints], Span] = {}
    for span in spans:
        if span.kind == "send":
            key = span.step, endpoints_of(span)
            if key not in sends or sends[key].end_seconds < span.end_seconds:
                sends[key] = span
    for span in spans:
        if span.kind == "receive" and (span.step, endpoints_of(span)) in sends:
            yield sends[span.step, endpoints_of(span)], span


def _refits(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """(source, target) spans for each rank that receives weights in a refit from a different rank."""
    ranks_of: dict[str, set[int]] = {}
    refits: dict[tuple[int, Endpoints], dict[int, Span]] = {}
    for span in spans:
        if span.kind == "stage":
            ranks_of.setdefault(span.instruction, set()).add(span.rank)
        elif span.kind == "refit":
            refits.setdefault((span.step, endpoints_of(span)), {})[span.rank] = span
    for (_, ends), by_rank in refits.items():
        sources = sorted(ranks_of.get(ends.source, set()) & by_rank.keys())
        for number, target in enumerate(sorted(ranks_of.get(ends.target, set()) & by_rank.keys())):
            if sources and sources[number % len(sources)] != target:
                yield by_rank[sources[number % len(sources)]], by_rank[target]


def _arrow(pid: int, start: float, number: str, begin: Span, end: Span) -> Iterator[Event]:
    """A flow arrow from the start of one span to the end of another; `bp` binds it to the enclosing slice."""
    flow: Mapping[str, object] = {
        "cat": "flow",
        "name": str(endpoints_of(begin)) if begin.kind == "send" else begin.instruction,
        "id": number,
        "pid": pid,
    }
    yield {"ph": "s", "tid": begin.rank, "ts": _microseconds(begin.start_seconds - start), **flow}
    yield {"ph": "f", "bp": "e", "tid": end.rank, "ts": _microseconds(end.end_seconds - start), **flow}


def _microseconds(seconds: float) -> float:
    return seconds * 1e6
