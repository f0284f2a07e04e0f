"""Traces: which instruction ran on which rank from when to when, predicted or measured, in one schema.

Traces are read and written as JSON lines, and exported for Chrome and Perfetto in the Trace Event Format.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.profiles.errors import BadInput
from meshwright.profiles.run_logs import SEGMENT_BYTES, Line, append_lines, log_files, read_log_lines
from meshwright.profiles.untrusted_text import require_file

MEMORY, RESIDENT = "memory_bytes", "resident_bytes"
"""Facts of a stage's span: memory in use on its rank while it runs, and after it has ended."""

NUM_TOOL_TOKENS, NUM_CALLS, CALL_SECONDS = "num_tool_tokens", "num_tool_calls", "tool_seconds"
"""Facts of a multi-turn generation: number of tool tokens; and, on the rank that calls tools, the number of calls and
the sum of their latencies."""

NUM_CHUNK_TOKENS, NUM_OVERCOMMIT = "num_chunk_tokens", "num_overcommit"
"""Facts of a generation under run-time controllers: the longest chunk in the period, and the overcommit."""

NUM_SAMPLES, NUM_SAMPLED_TOKENS = "num_samples", "num_sampled_tokens"
"""Facts of a generation with overcommit or in waves: the number of responses in the prompt batches that it completed,
or in the wave, and their tokens."""

NUM_PROMPT_TOKENS = "num_prompt_tokens"
"""Fact of the generation of one wave of dynamic sampling, in addition to the sampled tokens: tokens of the prompts."""

NUM_ROW_ROUNDS = "num_row_rounds"
"""Fact of a generation with drafts: its decode rounds, counted once for each sequence."""

WAKE_SECONDS, SLEEP_SECONDS, FREED_BYTES = "wake_seconds", "sleep_seconds", "freed_bytes"
"""Facts of a generation by an engine in its own process: the seconds in which it takes the memory of its KV cache
before the first round and frees it after the last, and the bytes that it frees."""

NUM_LIVE = "num_live_sequences"
"""Fact of a span: mean number of sequences in flight on its rank's replica over the span."""


def num_drafted(position: int) -> str:
    """Return the name of a fact of a generation with drafts: rounds that verified a token at this position of a draft,
    from 0, those before it being accepted."""
    return f"num_drafted_{position}"


def is_draft_count(name: str) -> bool:
    """True if a fact counts decode rounds with drafts, or tokens drafted or accepted in them."""
    return name == NUM_ROW_ROUNDS or name.startswith(("num_drafted_", "num_accepted_"))


def num_accepted(position: int) -> str:
    """Return the name of a fact of a generation with drafts: rounds that accepted the token at this position."""
    return f"num_accepted_{position}"


MAX_STEPS_AHEAD = 8
"""Upper bound on the steps by which stages run ahead: all lines of step s - 8 come before the first line of step s."""

MAX_SPANS = 50_000
"""Maximum number of spans held in memory, which take about 400 MiB as timeline events. Of a longer trace only the last
steps are read, or one step at a time."""

_MIN_STEPS = 20
"""Minimum number of steps that are read, whatever the number of ranks: fewer are not representative."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One instruction on one rank. Times are seconds since the start of the run.

    `clock` is measured, rehearsed or simulated.
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


class Endpoints(NamedTuple):
    """The stages from and to which weights or experience are moved."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


def instruction_name(kind: str, source: str, target: str) -> str:
    """Return the name of a refit, send or receive instruction between two stages."""
    return f"{kind} {Endpoints(source, target)}"


def endpoints_of(span: Span) -> Endpoints:
    """Return the stages in the name of a refit, send or receive: the inverse of `instruction_name`."""
    source, _, target = span.instruction.removeprefix(f"{span.kind} ").partition(" -> ")
    return Endpoints(source, target)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The spans of one run on one clock, with the ranks of each pool; `name` distinguishes runs on the same clock.

    `step_seconds` are the step times that the run itself recorded, for steps that have spans; empty if it did not.
    """

    spans: tuple[Span, ...]
    pools: Mapping[str, Sequence[int]] = field(default_factory=dict)
    name: str = ""
    step_seconds: Mapping[int, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Clock and name of the run; the clock is in capitals unless it is measured."""
        clocks = sorted({span.clock for span in self.spans})
        clock_names = " and ".join(clock if clock == "measured" else clock.upper() for clock in clocks)
        return f"{clock_names} {self.name}".strip()


def write_spans(path: Path, spans: Iterable[Span], *, segment_bytes: int = SEGMENT_BYTES) -> None:
    """Append spans to a trace, one JSON object per line with sorted keys."""
    lines = (json.dumps(asdict(span), sort_keys=True) + "\n" for span in spans)
    append_lines(path, lines, segment_bytes=segment_bytes)


def iter_spans(path: Path) -> Iterator[Span]:
    """Iterate over the spans of a trace that `write_spans` wrote, including its segments.

    Raises BadInput, naming the first line that is not a span.
    """
    if not (files := log_files(path)):
        require_file(path, "trace", sys.maxsize)
    for line in read_log_lines(*files):
        yield _parse_line(line)


def read_spans(path: Path) -> tuple[Span, ...]:
    """Read all spans of a trace. Raises BadInput like `iter_spans`."""
    return tuple(iter_spans(path))


def read_recent_spans(path: Path, max_spans: int = MAX_SPANS, *, min_steps: int = _MIN_STEPS) -> tuple[Span, ...]:
    """Read all spans of a trace with at most `max_spans` spans; of a longer trace, those of its last complete steps.

    At least the last `min_steps` steps are read. Raises BadInput, naming the first line it reads that is not a span.
    """
    files, files_read, num_lines = log_files(path), list[Path](), 0
    for file in reversed(files):
        files_read.insert(0, file)
        num_lines += sum(1 for _ in read_log_lines(file))
        if num_lines > max_spans:
            break
    else:
        return read_spans(path)
    begin = num_lines - max_spans
    newest_dropped, recent = -sys.maxsize, list[Span]()  # newest_dropped: the newest step with a dropped span
    for number, line in enumerate(
        islice(read_log_lines(*files_read), max(0, begin - max_spans), None), start=max(0, begin - max_spans)
    ):
        span = _parse_line(line)
        if number < begin:
            newest_dropped = max(newest_dropped, span.step)
        else:
            recent.append(span)
    complete = tuple(span for span in recent if span.step > newest_dropped)
    return complete if len({span.step for span in complete}) >= min_steps else read_last_spans(path, min_steps)


def group_by_step(spans: Iterable[Span]) -> Iterator[tuple[int, list[Span]]]:
    """Group spans by step, keeping their order; only a few steps are held in memory."""
    spans_by_step: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.step not in spans_by_step:
            for step in sorted(step for step in spans_by_step if step <= span.step - MAX_STEPS_AHEAD):
                yield step, spans_by_step.pop(step)
        spans_by_step[span.step].append(span)
    yield from sorted(spans_by_step.items())


def read_last_spans(path: Path, num_steps: int) -> tuple[Span, ...]:
    """Read the spans of the last steps of a trace, in the order of the file.

    The trace is read from its end, so it may be long. It may still grow: incomplete lines are ignored. Raises
    BadInput, naming the line that is not a span.
    """
    files = log_files(path)
    if not files:
        require_file(path, "trace", sys.maxsize)
    parts: list[list[Span]] = []
    newest = -sys.maxsize
    for file in reversed(files):
        part = _last_spans_of_file(file, num_steps, newest)
        newest = max((newest, *(span.step for span in part)))
        parts.append(part)
        if part and part[0].step <= newest - num_steps - MAX_STEPS_AHEAD:
            break
    return tuple(span for part in reversed(parts) for span in part if span.step > newest - num_steps)


def _last_spans_of_file(file: Path, num_steps: int, newest: int) -> list[Span]:
    """The spans at the end of one file of a trace that include those of the last `num_steps` steps.

    `newest` is the newest step in later files. Some spans of earlier steps may precede the result.
    """
    if file.suffix == ".gz":
        recent: deque[Span] = deque()
        for span in map(_parse_line, read_log_lines(file)):
            newest = max(newest, span.step)
            recent.append(span)
            while len(recent) > 1 and recent[1].step <= newest - num_steps - MAX_STEPS_AHEAD:
                recent.popleft()
        return list(recent)
    reversed_spans: list[Span] = []
    try:
        for line in _lines_reversed(file):
            reversed_spans.append(parse_span(json.loads(line)))
            newest = max(newest, reversed_spans[-1].step)
            if reversed_spans[-1].step <= newest - num_steps - MAX_STEPS_AHEAD:
                break
    except (ValueError, TypeError, RecursionError):
        raise BadInput(
            f"trace {file} line {len(reversed_spans) + 1} from its end is not a span; delete that line."
        ) from None
    return reversed_spans[::-1]


def _parse_line(line: Line) -> Span:
    try:
        return parse_span(json.loads(line.text))
    except (ValueError, TypeError, RecursionError):
        raise BadInput(
            f"trace {line.path} line {line.number} is not a span; if the file was cut short, delete that line."
        ) from None


def _lines_reversed(path: Path) -> Iterator[bytes]:
    """The complete lines of a file, from the last to the first."""
    require_file(path, "trace", sys.maxsize)
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            end = text.rfind(b"\n")
            while end >= 0:
                previous = text.rfind(b"\n", 0, end)
                yield text[previous + 1 : end]
                end = previous


def is_finite_number(number: Any) -> bool:
    """True for an int or float within the range of finite floats."""
    return isinstance(number, int | float) and -sys.float_info.max <= number <= sys.float_info.max


def parse_span(value: Any) -> Span:
    """Return the span of a parsed line of a trace. Raises TypeError or ValueError if it is not a span."""
    span = Span(**value)
    if not isinstance(span.facts, dict):
        raise TypeError
    texts = span.instruction, span.kind, span.clock
    numbers = span.start_seconds, span.end_seconds, *span.facts.values()
    if not all(isinstance(text, str) for text in texts) or not all(map(is_finite_number, numbers)):
        raise ValueError
    # Periods before the first step, in which stages only run ahead, count down from -1.
    if not all(isinstance(index, int) for index in (span.step, span.rank)) or span.rank < 0:
        raise ValueError
    return span


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
        for seconds, value in ((span.start_seconds, during), (span.end_seconds, after)):
            yield {
                "ph": "C",
                "name": f"{what} of rank {span.rank}",
                "pid": pid,
                "tid": span.rank,
                "ts": _microseconds(seconds - start),
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
