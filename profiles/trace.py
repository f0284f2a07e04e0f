"""What ran where from when to when, predicted or measured, in one schema."""

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
from meshwright.profiles.segments import SEGMENT_BYTES, Line, append_lines, files_of, lines_of
from meshwright.profiles.values import require_file

MEMORY, RESIDENT = "memory_bytes", "resident_bytes"
"""Facts of a stage's span: bytes on its rank while it runs, and those that stay when it has ended."""

NUM_TOLD_TOKENS, NUM_CALLS, CALL_SECONDS = "num_told_tokens", "num_tool_calls", "tool_seconds"
"""Facts of a generation of several turns: tokens that tools told, and on a rank that calls them how often it did and
the seconds until they were answered, together."""

NUM_CHUNK_TOKENS, NUM_OVERCOMMIT = "num_chunk_tokens", "num_overcommit"
"""Facts of a generation that controllers decided about: its turn's longest chunks, and sequences beyond a batch."""

NUM_DRAWN, NUM_DRAWN_TOKENS = "num_drawn", "num_drawn_tokens"
"""Facts of a generation that overcommits, or comes in waves: responses to the prompt batches that it has made whole, or
to the wave, and their tokens."""

NUM_PROMPT_TOKENS = "num_prompt_tokens"
"""Fact of a generation of one wave of dynamic sampling, beside those of what was drawn: tokens of the prompts."""

LIVE = "num_live_sequences"
"""Fact of a span: sequences in flight on its rank's replica, on average over the span."""

MOST_AHEAD = 8
"""Lines of a trace are behind those of so many steps earlier: stages work ahead by less."""

MOST_SPANS = 50_000
"""Spans that are held at once: as events of a timeline some 400 MiB. Of a longer trace the last steps are read, or one
step after the other."""

_LEAST_STEPS = 20
"""Steps that are read of any trace that has them, however many ranks there are: fewer say little."""


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


class Ends(NamedTuple):
    """The stages between which weights or experience go."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


def instruction_name(kind: str, source: str, target: str) -> str:
    """The name of an instruction of this kind (refit, send or receive) by which something goes from stage to stage."""
    return f"{kind} {Ends(source, target)}"


def ends_of(span: Span) -> Ends:
    """The stages that `instruction_name` had of a refit, a send or a receive."""
    source, _, target = span.instruction.removeprefix(f"{span.kind} ").partition(" -> ")
    return Ends(source, target)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The spans of one run on one clock, with the ranks of each pool; `name` tells it from other runs of its clock.

    `step_seconds` are those that the run itself has told of the steps that have spans, if it has.
    """

    spans: tuple[Span, ...]
    pools: Mapping[str, Sequence[int]] = field(default_factory=dict)
    name: str = ""
    step_seconds: Mapping[int, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The clock, in capitals unless it is measured, and the name."""
        clocks = sorted({span.clock for span in self.spans})
        told = " and ".join(clock if clock == "measured" else clock.upper() for clock in clocks)
        return f"{told} {self.name}".strip()


def write_spans(path: Path, spans: Iterable[Span], *, segment_bytes: int = SEGMENT_BYTES) -> None:
    """One JSON object per line, keys sorted; appended to what is there."""
    lines = (json.dumps(asdict(span), sort_keys=True) + "\n" for span in spans)
    append_lines(path, lines, segment_bytes=segment_bytes)


def iter_spans(path: Path) -> Iterator[Span]:
    """The spans of a trace written by `write_spans`, its segments included, one after the other. Raises BadInput naming
    the first line that is not a span."""
    if not (files := files_of(path)):
        require_file(path, "trace", sys.maxsize)
    for line in lines_of(*files):
        yield _span_in(line)


def read_spans(path: Path) -> tuple[Span, ...]:
    """All spans of a trace. Raises BadInput as `iter_spans`."""
    return tuple(iter_spans(path))


def read_most_spans(path: Path, most: int = MOST_SPANS, *, least_steps: int = _LEAST_STEPS) -> tuple[Span, ...]:
    """The spans of a trace that has at most so many; of a longer one those of the last steps that are whole, and of so
    many steps at least. Raises BadInput naming the line that is not a span, of those that are read."""
    files, chosen, num_lines = files_of(path), list[Path](), 0
    for file in reversed(files):
        chosen.insert(0, file)
        num_lines += sum(1 for _ in lines_of(file))
        if num_lines > most:
            break
    else:
        return read_spans(path)
    begin = num_lines - most
    dropped, kept = -sys.maxsize, list[Span]()  # the newest step of which a span was dropped
    for number, line in enumerate(islice(lines_of(*chosen), max(0, begin - most), None), start=max(0, begin - most)):
        span = _span_in(line)
        if number < begin:
            dropped = max(dropped, span.step)
        else:
            kept.append(span)
    whole = tuple(span for span in kept if span.step > dropped)
    return whole if len({span.step for span in whole}) >= least_steps else read_last_spans(path, least_steps)


def by_step(spans: Iterable[Span]) -> Iterator[tuple[int, list[Span]]]:
    """The spans of each step, in the order of the trace, of which a few steps are held at once."""
    found: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.step not in found:
            for step in sorted(step for step in found if step <= span.step - MOST_AHEAD):
                yield step, found.pop(step)
        found[span.step].append(span)
    yield from sorted(found.items())


def read_last_spans(path: Path, num_steps: int) -> tuple[Span, ...]:
    """The spans of the last steps in a trace, in the order of the file, which may still grow: a line counts when it is
    whole. It is read from its end, so that it may be long. Raises BadInput naming the line that is not a span."""
    files = files_of(path)
    if not files:
        require_file(path, "trace", sys.maxsize)
    parts: list[list[Span]] = []
    newest = -sys.maxsize
    for file in reversed(files):
        part = _last_of(file, num_steps, newest)
        newest = max((newest, *(span.step for span in part)))
        parts.append(part)
        if part and part[0].step <= newest - num_steps - MOST_AHEAD:
            break
    return tuple(span for part in reversed(parts) for span in part if span.step > newest - num_steps)


def _last_of(file: Path, num_steps: int, newest: int) -> list[Span]:
    """The spans at the end of one file of a trace, from the last steps before `newest` or its own newest on, and some
    before them, which come first."""
    if file.suffix == ".gz":
        held: deque[Span] = deque()
        for span in map(_span_in, lines_of(file)):
            newest = max(newest, span.step)
            held.append(span)
            while len(held) > 1 and held[1].step <= newest - num_steps - MOST_AHEAD:
                held.popleft()
        return list(held)
    found: list[Span] = []
    try:
        for line in _lines_from_the_end(file):
            found.append(span_of(json.loads(line)))
            newest = max(newest, found[-1].step)
            if found[-1].step <= newest - num_steps - MOST_AHEAD:
                break
    except (ValueError, TypeError, RecursionError):
        raise BadInput(f"trace {file} line {len(found) + 1} from its end is not a span; delete that line.") from None
    return found[::-1]


def _span_in(line: Line) -> Span:
    try:
        return span_of(json.loads(line.text))
    except (ValueError, TypeError, RecursionError):
        raise BadInput(
            f"trace {line.path} line {line.number} is not a span; if the file was cut short, delete that line."
        ) from None


def _lines_from_the_end(path: Path) -> Iterator[bytes]:
    """Those that are whole."""
    require_file(path, "trace", sys.maxsize)
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            end = text.rfind(b"\n")
            while end >= 0:
                before = text.rfind(b"\n", 0, end)
                yield text[before + 1 : end]
                end = before


def is_number(number: Any) -> bool:
    """Whether it is a number that a float holds."""
    return isinstance(number, int | float) and -sys.float_info.max <= number <= sys.float_info.max


def span_of(value: Any) -> Span:
    """The span that a line of a trace has. Raises TypeError or ValueError for what is no span."""
    span = Span(**value)
    if not isinstance(span.facts, dict):
        raise TypeError
    texts = span.instruction, span.kind, span.clock
    numbers = span.start_seconds, span.end_seconds, *span.facts.values()
    if not all(isinstance(text, str) for text in texts) or not all(map(is_number, numbers)):
        raise ValueError
    # Turns before the first step, in which stages only work ahead, count down from -1.
    if not all(isinstance(whole, int) for whole in (span.step, span.rank)) or span.rank < 0:
        raise ValueError
    return span
