"""What ran where from when to when, predicted or measured, in one schema."""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.profiles.errors import BadInput
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

PLAN_UNTIL, TRACE_UNTIL = "plan-until-", "trace-until-"
"""What the names of a plan that a run has left, and of its trace, begin with in the run's directory; then comes the
step before which it was left."""

_MOST_BYTES = 2**29
"""Of a trace: some millions of spans."""

_MOST_AHEAD = 8
"""Lines of a trace are behind those of so many steps earlier: stages work ahead by less."""


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
    require_file(path, "trace", _MOST_BYTES)
    spans, number = [], 0
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):  # noqa: B007 - told when a line is wrong
                spans.append(span_of(json.loads(line)))
        except (ValueError, TypeError, RecursionError):
            raise BadInput(
                f"trace {path} line {number} is not a span; if the file was cut short, delete that line."
            ) from None
    return tuple(spans)


def read_last_spans(path: Path, num_steps: int) -> tuple[Span, ...]:
    """The spans of the last steps in a trace, in the order of the file, which may still grow: a line counts when it is
    whole. It is read from its end, so that it may be long. Raises BadInput naming the line that is not a span."""
    require_file(path, "trace", sys.maxsize)
    found: list[Span] = []
    newest = -sys.maxsize
    try:
        for line in _lines_from_the_end(path):
            found.append(span_of(json.loads(line)))
            newest = max(newest, found[-1].step)
            if found[-1].step <= newest - num_steps - _MOST_AHEAD:
                break
    except (ValueError, TypeError, RecursionError):
        raise BadInput(f"trace {path} line {len(found) + 1} from its end is not a span; delete that line.") from None
    return tuple(span for span in reversed(found) if span.step > newest - num_steps)


def _lines_from_the_end(path: Path) -> Iterator[bytes]:
    """Those that are whole."""
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
