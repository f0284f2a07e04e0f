"""The JSON-lines files of a run, with a `step` in each line, read as a whole or while another process appends to
them."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from meshwright.planner.program.controllers import StepObservation
from meshwright.profiles.errors import BadInput
from meshwright.profiles.run_logs import (
    MAX_LINE_BYTES,
    Line,
    append_lines,
    drop_lines,
    log_files,
    numbered_lines,
    read_log_lines,
)
from meshwright.profiles.trace import MAX_STEPS_AHEAD
from meshwright.profiles.untrusted_text import json_value, read_text, require_file
from meshwright.runtime.records.version_gap import AGE_ROWS, AGE_SCORE

T = TypeVar("T")


def append_line(path: Path, line: Mapping[str, object]) -> None:
    """Append a line as JSON."""
    append_lines(path, [json.dumps(line, sort_keys=True) + "\n"], segment_bytes=sys.maxsize)


def read_lines(path: Path, parse: Callable[[dict[str, Any]], T]) -> list[T]:
    """Parse the lines of a file and return what `parse` makes of each; an incomplete last line is ignored.

    Raises BadInput naming the first line that cannot be parsed.
    """
    return [_parsed(line, parse) for line in read_log_lines(*log_files(path)) if line.is_complete]


def completed_steps(out: Path) -> int | None:
    """Return the number of steps of a completed run, from its summary; None if it did not complete."""
    path = out / "summary.json"
    if not path.exists():
        return None
    steps = json_value(read_text(path, "the summary of a run"), f"the summary {path}").get("steps")
    return steps if isinstance(steps, int) else None


def elapsed_seconds(out: Path) -> float:
    """Return the end of the last span of a run, in seconds since its start; 0 without a trace."""
    seconds = 0.0
    for file in reversed(log_files(out / "trace.jsonl")):
        ends = (
            _parsed(line, lambda value: float(value["end_seconds"]))
            for line in read_log_lines(file)
            if line.is_complete
        )
        seconds = max((seconds, *ends))
        if seconds:
            break
    return seconds


def observations(out: Path, first_step: int) -> tuple[StepObservation, ...]:
    """Return the observations of a run's steps before `first_step`, on which controllers act."""
    return tuple(one for one in read_lines(out / "metrics.jsonl", observation) if one.step < first_step)


def observation(line: Mapping[str, Any]) -> StepObservation:
    """Return the observation in the metrics of one step, on which controllers act."""
    ages = range(len([name for name in line if name.startswith(AGE_ROWS)]))
    by_age = tuple((int(line[AGE_ROWS + str(age)]), float(line.get(AGE_SCORE + str(age), 0.0))) for age in ages)
    return StepObservation(step=line["step"], seconds=float(line["seconds"]), scores_by_age=by_age)


def keep_steps_before(path: Path, first_step: int, *, with_evaluation: bool = False) -> None:
    """Drop the lines from `first_step` on, whose steps will run again.

    With `with_evaluation`, for a trace, the evaluation that ran just before `first_step` is kept.
    """

    def is_dropped(line: Line) -> bool:
        if not line.is_complete:
            return True
        value = _parsed(line, lambda value: value)
        is_evaluation = with_evaluation and value.get("kind") == "evaluate"
        return bool(value["step"] >= first_step + is_evaluation)

    def is_settled(line: Line) -> bool:  # all earlier lines are of steps before `first_step`
        return line.is_complete and bool(_parsed(line, lambda value: value["step"]) < first_step - MAX_STEPS_AHEAD)

    drop_lines(path, is_dropped, is_settled)


def _parsed(line: Line, parse: Callable[[dict[str, Any]], T]) -> T:
    try:
        value = json.loads(line.text)
        if not isinstance(value["step"], int):
            raise TypeError
        return parse(value)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        raise BadInput(
            f"{line.path} line {line.number} is not a line of a run; delete it if the file was damaged."
        ) from None


_CHUNK_BYTES = 2**16
"""Bytes read at a time when a file is searched from its end."""


class Tail:
    """A reader of the complete lines that are new since its last call, at most the last `max_lines`.

    A file that was replaced, by a resume or because the log started a new segment, is read from its beginning.
    """

    def __init__(self, path: Path, max_lines: int = 100_000) -> None:
        self._max_lines = max_lines
        self._path, self._offset, self._inode = path, 0, 0

    def read(self) -> tuple[bool, list[str]]:
        """Return (True if the file was replaced, new lines); (False, []) if it does not exist."""
        if not self._path.exists():
            return False, []
        require_file(self._path, "the record of a run", sys.maxsize)
        file = self._path.open("rb")
        with file:
            is_replaced = self._is_replaced(file.fileno())
            if is_replaced:
                self._offset = 0
            file.seek(self._offset)
            lines: deque[bytes] = deque(maxlen=self._max_lines)
            for _, line in numbered_lines(self._path, file):
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    lines.append(line[:-1])
        return is_replaced, [line.decode("utf-8", errors="replace") for line in lines]

    def skip(self) -> bool:
        """Skip the lines of a file that was replaced, as the caller reads them otherwise; return True if it was."""
        if not self._path.exists():
            return False
        require_file(self._path, "the record of a run", sys.maxsize)
        with self._path.open("rb") as file:
            is_replaced = self._is_replaced(file.fileno())
            if is_replaced:
                self._offset = _end_of_lines(self._path, file)
        return is_replaced

    def _is_replaced(self, descriptor: int) -> bool:
        status = os.fstat(descriptor)
        is_same_file, self._inode = status.st_ino == self._inode, status.st_ino
        return not is_same_file or status.st_size < self._offset


def _end_of_lines(path: Path, file: BinaryIO) -> int:
    """Return the offset at which the last complete line ends. Raises BadInput if the last line is too long."""
    end = size = file.seek(0, os.SEEK_END)
    while end > 0:
        if size - end >= MAX_LINE_BYTES:
            raise BadInput(f"{path}: its last line is longer than {MAX_LINE_BYTES} bytes; no run writes one.")
        begin = max(0, end - _CHUNK_BYTES)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
