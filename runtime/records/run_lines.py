"""The lines that a run appends to its records, a step in each, read one after the other however many there are."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from meshwright.planner.program.controllers import StepObservation
from meshwright.profiles.errors import BadInput
from meshwright.profiles.segments import Line, append_lines, drop_lines, files_of, lines_of
from meshwright.profiles.trace import MOST_AHEAD
from meshwright.profiles.values import json_value, read_text
from meshwright.runtime.records.version_gap import AGE_ROWS, AGE_SCORE

T = TypeVar("T")


def append_line(path: Path, line: Mapping[str, object]) -> None:
    """Appends it as JSON."""
    append_lines(path, [json.dumps(line, sort_keys=True) + "\n"], segment_bytes=sys.maxsize)


def read_lines(path: Path, made: Callable[[dict[str, Any]], T]) -> list[T]:
    """What is made of the lines of a run; the last one, if it was cut short, is none.

    Raises BadInput naming the first line of which nothing can be made.
    """
    return [_made(line, made) for line in lines_of(*files_of(path)) if line.is_whole]


def ended_after(out: Path) -> int | None:
    """The steps after which a run has come to its end, which its summary tells last of all; None for one that was cut
    off."""
    path = out / "summary.json"
    if not path.exists():
        return None
    steps = json_value(read_text(path, "the summary of a run"), f"the summary {path}").get("steps")
    return steps if isinstance(steps, int) else None


def elapsed_seconds(out: Path) -> float:
    """When the last span that a run has written ended, in seconds since its start; 0 without a trace."""
    seconds = 0.0
    for file in reversed(files_of(out / "trace.jsonl")):
        ends = (_made(line, lambda value: float(value["end_seconds"])) for line in lines_of(file) if line.is_whole)
        seconds = max((seconds, *ends))
        if seconds:
            break
    return seconds


def observations(out: Path, first_step: int) -> tuple[StepObservation, ...]:
    """What controllers follow from of the steps before `first_step`, as a run has written it."""
    return tuple(one for one in read_lines(out / "metrics.jsonl", observation) if one.step < first_step)


def observation(line: Mapping[str, Any]) -> StepObservation:
    """What controllers follow from of one step's metrics."""
    ages = range(len([name for name in line if name.startswith(AGE_ROWS)]))
    begun = tuple((int(line[AGE_ROWS + str(age)]), float(line.get(AGE_SCORE + str(age), 0.0))) for age in ages)
    return StepObservation(step=line["step"], seconds=float(line["seconds"]), begun=begun)


def keep_steps_before(path: Path, first_step: int, *, with_evaluation: bool = False) -> None:
    """Drops the lines of steps that will run again; an evaluation before the first of them stays in a trace."""

    def is_dropped(line: Line) -> bool:
        if not line.is_whole:
            return True
        value = _made(line, lambda value: value)
        is_evaluation = with_evaluation and value.get("kind") == "evaluate"
        return bool(value["step"] >= first_step + is_evaluation)

    def is_settled(line: Line) -> bool:
        return line.is_whole and bool(_made(line, lambda value: value["step"]) < first_step - MOST_AHEAD)

    drop_lines(path, is_dropped, is_settled)


def _made(line: Line, made: Callable[[dict[str, Any]], T]) -> T:
    try:
        value = json.loads(line.text)
        if not isinstance(value["step"], int):
            raise TypeError
        return made(value)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        raise BadInput(
            f"{line.path} line {line.number} is none of a run; delete that line if the file was damaged."
        ) from None
