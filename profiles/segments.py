"""A log of lines that may grow without end: the growing file, and before it segments that are compressed.

`trace.jsonl` is appended to; once it has grown to the size of a segment it becomes `trace.segment-000001.jsonl.gz`, the
next `trace.segment-000002.jsonl.gz`. All of it is read line by line, so that neither its length nor its readers are
limited by memory. A log that was written as a single file is one whose segments are still to come.
"""

from __future__ import annotations

import gzip
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
from meshwright.profiles.values import require_file

SEGMENT_BYTES = 32 * 2**20
"""Of the growing file, beyond which it is compressed: half a second of work, and what a reader of its end looks at."""

MOST_LINE_BYTES = 64 * 2**20
"""Of a line that is read: the metrics of a step and the span of an instruction have a few KB."""

_LEVEL = 1
"""Of compression: a line of a trace shrinks to a tenth at any level."""

_SEGMENT = re.compile(r"\.segment-([0-9]{6,})$")


class Line(NamedTuple):
    """A line of a log, with the file that has it and its number there, counted from 1."""

    path: Path
    number: int
    text: bytes

    @property
    def is_whole(self) -> bool:
        """False for a last line that was cut short, or is still being written."""
        return self.text.endswith(b"\n")


def files_of(path: Path) -> tuple[Path, ...]:
    """The segments of a log from the oldest on, then the growing file if there is one."""
    found: dict[int, Path] = {}
    for other in _beside(path):
        name = other.name.removesuffix(".gz").removesuffix(path.suffix)
        match = _SEGMENT.search(name)
        if match and name == f"{path.stem}{match[0]}":
            number = int(match[1])
            # Both are there where a process ended right after it had compressed one; they say the same.
            found[number] = max(other, found.get(number, other), key=lambda one: one.suffix == ".gz")
    return (*(found[number] for number in sorted(found)), *((path,) if path.exists() else ()))


def _beside(path: Path) -> Iterator[Path]:
    """The files in its directory that may be segments of a log; no pattern, for a name may hold what one means."""
    if path.parent.is_dir():
        yield from (other for other in path.parent.iterdir() if other.name.startswith(f"{path.stem}.segment-"))


def lines_of(*paths: Path) -> Iterator[Line]:
    """The lines of these files, one after the other. Raises BadInput for a file that cannot be read."""
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
    """The lines that follow in a file, counted from 1. Raises BadInput for one of `MOST_LINE_BYTES` or more."""
    for number, text in enumerate(iter(partial(file.readline, MOST_LINE_BYTES), b""), start=1):
        if len(text) >= MOST_LINE_BYTES:
            raise BadInput(f"{path}: line {number} is longer than {MOST_LINE_BYTES} bytes; no run writes one.")
        yield number, text


def append_lines(path: Path, lines: Iterable[str], *, segment_bytes: int = SEGMENT_BYTES) -> None:
    """Appends to the growing file, which becomes a segment when it is as long as one. Raises OSError."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)
        size = file.tell()
    if size >= segment_bytes:
        _close_segment(path)


def _close_segment(path: Path) -> None:
    """Whenever this is cut off, each line is in one file that `files_of` names."""
    before = files_of(path)[:-1]
    number = 1 + (_number(before[-1], path) if before else 0)
    plain = path.with_name(f"{path.stem}.segment-{number:06d}{path.suffix}")
    path.rename(plain)
    with plain.open("rb") as lines:
        _write_whole(plain.with_name(f"{plain.name}.gz"), lines)
    plain.unlink()


def _number(segment: Path, path: Path) -> int:
    match = _SEGMENT.search(segment.name.removesuffix(".gz").removesuffix(path.suffix))
    assert match is not None
    return int(match[1])


def drop_lines(path: Path, is_dropped: Callable[[Line], bool], is_settled: Callable[[Line], bool]) -> None:
    """Drops lines from the end of a log. It is gone through from the newest file to the oldest, until a line of one
    `is_settled`: then there is none to be dropped in the files before."""
    for file in reversed(files_of(path)):
        drops = settled = False
        for line in lines_of(file):
            drops = drops or is_dropped(line)
            settled = settled or is_settled(line)
        if drops:
            _write_whole(file, (line.text for line in lines_of(file) if not is_dropped(line)))
        if settled:
            return


def move_log(path: Path, target: Path) -> None:
    """Gives all files of a log the name of another, of which there is none, or only what an earlier call that was cut
    off has given it."""
    for file in files_of(path):
        file.rename(file.with_name(target.stem + file.name.removeprefix(path.stem)))


def _write_whole(target: Path, lines: Iterable[bytes]) -> None:
    """Writes beside the target and renames, so that nobody ever sees half of it."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as raw:
            if target.suffix == ".gz":
                with gzip.open(raw, "wb", compresslevel=_LEVEL) as packed:
                    packed.writelines(lines)
            else:
                raw.writelines(lines)
            raw.flush()
            os.fsync(raw.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
