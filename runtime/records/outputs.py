"""Files that a command will write: what is wrong with one is told before any work begins, and no file is lost.

A file is new, empty, or replaces one of its own kind; it is no input of the command, no device and no directory.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from meshwright.profiles.errors import BadInput

_HEAD_BYTES = 4096
"""Of a file that exists: enough to tell its kind by how it begins."""


class OutputKind(Enum):
    """What is written: how it is called, and how its text begins."""

    PLAN = "plan", r'\{\s*"digests"\s*:'
    TABLE = "table", r'\{\s*"collectives"\s*:'
    PROOF = "proof of a plan", r'\{\s*"bound_seconds"\s*:'
    TIMELINE = "timeline", r'\{\s*"traceEvents"\s*:'
    PAGE = "page of this program", r'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'

    @property
    def told(self) -> str:
        """What it is called in a sentence."""
        return self.value[0]

    def begins(self, text: str) -> bool:
        """Whether a text begins as one that is written of this kind."""
        return re.match(self.value[1], text) is not None


@dataclass(frozen=True)
class Output:
    """A file that an option names."""

    option: str
    path: Path
    kind: OutputKind

    @property
    def told(self) -> str:
        """The option and the path, as a sentence names them."""
        return f"{self.option} {self.path}"


def require_outputs(*outputs: Output | None, inputs: Iterable[Path | None] = ()) -> None:
    """Raises BadInput for the first output that cannot be written, or that would destroy what is there.

    Those that are None are left out. A directory that does not exist is made when the file is written.
    """
    asked = [output for output in outputs if output is not None]
    read = [path for path in inputs if path is not None]
    for place, output in enumerate(asked):
        _require_file(output)
        _require_no_input(output, read)
        _require_kind(output)
        for other in asked[:place]:
            if _are_same(output.path, other.path):
                raise BadInput(f"{other.told} and {output.told} are one file; name two.")
        _require_writable(output.told, output.path)


def require_directory(option: str, path: Path) -> None:
    """Raises BadInput for a directory that could not be written into, or not be made."""
    if path.exists() and not path.is_dir():
        raise BadInput(f"{option} {path} is no directory; name a directory.")
    _require_writable(f"{option} {path}", path / "any")


def _require_file(output: Output) -> None:
    try:
        mode = output.path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not output.path.name:
            raise BadInput(f"{output.told} is a directory; name a file.") from None
        return
    except OSError as error:
        raise BadInput(f"{output.told} cannot be written: {error.strerror}; name another file.") from None
    if stat.S_ISDIR(mode):
        raise BadInput(f"{output.told} cannot be written; name a file in a directory, for this is a directory itself.")
    if not stat.S_ISREG(mode):
        raise BadInput(f"{output.told} is a device or a pipe, which is not replaced; name a file.")


def _require_no_input(output: Output, inputs: Sequence[Path]) -> None:
    for path in inputs:
        if _are_same(output.path, path):
            raise BadInput(f"{output.told} is also read by this command, as {path}; name another file.")


def _require_kind(output: Output) -> None:
    if not output.path.exists():
        return
    with output.path.open("rb") as file:
        head = file.read(_HEAD_BYTES).decode("utf-8", errors="replace")
    if head and not output.kind.begins(head):
        raise BadInput(
            f"{output.told} exists and is no {output.kind.told}; only that is replaced, so name another file."
        )


def _require_writable(told: str, path: Path) -> None:
    """Makes a file for a moment in the nearest directory that there is: permissions alone do not tell."""
    try:
        parent = next(parent for parent in path.resolve().parents if parent.exists())
        tempfile.TemporaryFile(dir=parent).close()
    except (OSError, RuntimeError):  # the latter of links in a circle
        raise BadInput(f"{told} cannot be written; name a file in a directory that you may write to.") from None


def _are_same(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, through links as well."""
    try:
        return one.samefile(other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)
