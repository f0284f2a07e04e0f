"""The logs of a run: files that are appended to without bound, compressed segments, and logs of former plans.

`trace.jsonl` is appended to; once it has reached the size of a segment it becomes `trace.segment-000001.jsonl.gz`,
then `trace.segment-000002.jsonl.gz`, and so on. When a run is re-planned before step 12, its plan and trace so far are
kept as `plan-until-000012.json` and `trace-until-000012.jsonl`; if that happens at the same step again, as
`plan-until-000012-2.json`, and so on.
"""

from __future__ import annotations

import gzip
import itertools
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple

from meshwright.profiles.errors import BadInput
from meshwright.profiles.untrusted_text import require_file

SEGMENT_BYTES = 32 * 2**20
"""Size at which the growing file is compressed, which takes half a second; it bounds the scan of its end."""

MAX_LINE_BYTES = 64 * 2**20
"""Upper bound on the length of a line: metrics of a step and spans have a few KB."""

_COMPRESSION_LEVEL = 1
"""Compression level of gzip: traces shrink to a tenth at any level."""

_SEGMENT = re.compile(r"\.segment-([0-9]{6,})$")


class Line(NamedTuple):
    """A line of a log, with its file and its number in the file, counted from 1."""

    path: Path
    number: int
    text: bytes

    @property
    def is_complete(self) -> bool:
        """False for a last line that is incomplete or still being written."""
        return self.text.endswith(b"\n")


def log_files(path: Path) -> tuple[Path, ...]:
    """Return the segments of a log from the oldest to the newest, then the growing file if it exists."""
    segments: dict[int, Path] = {}
    for other in _files_beside(path):
        name = other.name.removesuffix(".gz").removesuffix(path.suffix)
        match = _SEGMENT.search(name)
        if match and name == f"{path.stem}{match[0]}":
            number = int(match[1])
            # Both exist if a process ended right after compressing; their contents are the same.
            segments[number] = max(other, segments.get(number, other), key=lambda one: one.suffix == ".gz")
    return (*(segments[number] for number in sorted(segments)), *((path,) if path.exists() else ()))


def _files_beside(path: Path) -> Iterator[Path]:
    """Files beside a log that may be its segments. No glob: its name may contain pattern characters."""
    if path.parent.is_dir():
        yield from (file for file in path.parent.iterdir() if file.name.startswith(f"{path.stem}.segment-"))


def read_log_lines(*paths: Path) -> Iterator[Line]:
    """Iterate over the lines of these files. Raises BadInput for a file that cannot be read."""
    for path in paths:
        require_file(path, "the log", sys.maxsize)
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                for number, text in numbered_lines(path, file):
                    yield Line(path, number, text)
        except (OSError, EOFError, zlib.error) as error:
            raise BadInput(
                f"{path} cannot be read: {error}; if the file is damaged, remove it to go on without its lines."
            ) from None


def numbered_lines(path: Path, file: BufferedIOBase) -> Iterator[tuple[int, bytes]]:
    """Iterate over the numbered lines of a file from 1. Raises BadInput for a line of `MAX_LINE_BYTES` or more."""
    for number, text in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), start=1):
        if len(text) >= MAX_LINE_BYTES:
            raise BadInput(f"{path}: line {number} is longer than {MAX_LINE_BYTES} bytes; no run writes one.")
        yield number, text


def append_lines(path: Path, lines: Iterable[str], *, segment_bytes: int = SEGMENT_BYTES) -> None:
    """Append to the growing file, which becomes a segment when it has reached its size. Raises OSError."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)
        size = file.tell()
    if size >= segment_bytes:
        _close_segment(path)


def _close_segment(path: Path) -> None:
    """Compress the growing file into a segment.

    If the process is killed at any point, each line is still in exactly one file that `log_files` returns.
    """
    before = log_files(path)[:-1]
    number = 1 + (_segment_number(before[-1], path) if before else 0)
    plain = path.with_name(f"{path.stem}.segment-{number:06d}{path.suffix}")
    path.rename(plain)
    with plain.open("rb") as lines:
        _write_atomically(plain.with_name(f"{plain.name}.gz"), lines)
    plain.unlink()


def _segment_number(segment: Path, path: Path) -> int:
    match = _SEGMENT.search(segment.name.removesuffix(".gz").removesuffix(path.suffix))
    assert match is not None
    return int(match[1])


def drop_lines(path: Path, is_dropped: Callable[[Line], bool], is_settled: Callable[[Line], bool]) -> None:
    """Drop lines from the end of a log, from the newest file to the oldest.

    The scan stops after a file with a line for which `is_settled` is true: older files have nothing to drop.
    """
    for file in reversed(log_files(path)):
        has_drops = is_last = False
        for line in read_log_lines(file):
            has_drops = has_drops or is_dropped(line)
            is_last = is_last or is_settled(line)
        if has_drops:
            _write_atomically(file, (line.text for line in read_log_lines(file) if not is_dropped(line)))
        if is_last:
            return


def rename_log(path: Path, target: Path) -> None:
    """Rename all files of a log. The target must not exist, except for files that an interrupted earlier call moved."""
    for file in log_files(path):
        file.rename(file.with_name(target.stem + file.name.removeprefix(path.stem)))


def _write_atomically(target: Path, lines: Iterable[bytes]) -> None:
    """Write a temporary file and rename it, so that readers never see a partial file."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as raw:
            if target.suffix == ".gz":
                with gzip.open(raw, "wb", compresslevel=_COMPRESSION_LEVEL) as compressed:
                    compressed.writelines(lines)
            else:
                raw.writelines(lines)
            raw.flush()
            os.fsync(raw.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


_PLAN = re.compile(r"plan-until-([0-9]{6,})(?:-([0-9]+))?\.json")


class FormerPlan(NamedTuple):
    """The files of a former plan and of its trace."""

    plan: Path
    trace: Path


def former_plans(directory: Path) -> tuple[FormerPlan, ...]:
    """Return all former plans of a run, in the order in which they were replaced."""
    matches = ((match, path) for path in directory.iterdir() if (match := _PLAN.fullmatch(path.name)))
    keys = sorted((int(match[1]), int(match[2] or 1)) for match, _ in matches)
    return tuple(_files_of(directory, step, number) for step, number in keys)


def next_former_plan(directory: Path, step: int) -> FormerPlan:
    """Return the files for the plan that is replaced before this step.

    The plan file does not exist yet; trace files may, if an earlier start was interrupted while moving them.
    """
    candidates = (_files_of(directory, step, number) for number in itertools.count(1))
    return next(one for one in candidates if not one.plan.exists())


def _files_of(directory: Path, step: int, number: int) -> FormerPlan:
    end = f"{step:06d}" if number == 1 else f"{step:06d}-{number}"
    return FormerPlan(directory / f"plan-until-{end}.json", directory / f"trace-until-{end}.jsonl")
