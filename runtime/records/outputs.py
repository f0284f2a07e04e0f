"""Checks of the files that a command will write, before any work begins.

An output path must be new, an empty file, or a file of the same kind, which is replaced. It must not be an input of the
command, a device or a directory.
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
"""Bytes read from an existing file, enough to recognise its kind."""

_PAGE_SUFFIXES = (".html", ".htm")


class OutputKind(Enum):
    """A kind of output file: its name in messages, and a pattern that the beginning of its text matches."""

    PLAN = "plan", r'\{\s*"digests"\s*:'
    TABLE = "table", r'\{\s*"(calls|collectives)"\s*:'
    PROOF = "proof of a plan", r'\{\s*"bound_seconds"\s*:'
    TIMELINE = "timeline", r'\{\s*"traceEvents"\s*:'
    SWEEP = "sweep", r'\{\s*"points"\s*:'
    PAGE = "Meshwright HTML page", r'<!doctype html>\n<html lang="en">\s*<head>\s*<meta charset="utf-8"/>'

    @property
    def label(self) -> str:
        """The name of the kind in messages."""
        return self.value[0]

    def begins(self, text: str) -> bool:
        """Return True if a text begins like a file of this kind."""
        return re.match(self.value[1], text) is not None


@dataclass(frozen=True)
class Output:
    """An output file that a command-line option names."""

    option: str
    path: Path
    kind: OutputKind

    @property
    def label(self) -> str:
        """The option and the path, as in messages."""
        return f"{self.option} {self.path}"


def require_outputs(*outputs: Output | None, inputs: Iterable[Path | None] = ()) -> None:
    """Raises BadInput for the first output that cannot be written, or that would destroy another file.

    Outputs that are None are skipped. A missing directory is created when the file is written.
    """
    requested = [output for output in outputs if output is not None]
    read = [path for path in inputs if path is not None]
    for index, output in enumerate(requested):
        _require_file(output)
        _require_no_input(output, read)
        _require_kind(output)
        for other in requested[:index]:
            if _are_same(output.path, other.path):
                raise BadInput(f"{other.label} and {output.label} are the same file; name two.")
        _require_suffix(output)
        _require_writable(output.label, output.path)


def require_directory(option: str, path: Path) -> None:
    """Raises BadInput for a directory that cannot be written to, or cannot be created."""
    if path.exists() and not path.is_dir():
        raise BadInput(f"{option} {path} is not a directory; name a directory.")
    _require_writable(f"{option} {path}", path / "any")


def _require_file(output: Output) -> None:
    try:
        mode = output.path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not output.path.name:
            raise BadInput(f"{output.label} is a directory; name a file.") from None
        return
    except OSError as error:
        raise BadInput(f"{output.label} cannot be written: {error.strerror}; name another file.") from None
    if stat.S_ISDIR(mode):
        raise BadInput(f"{output.label} cannot be written: it is a directory; name a file in it.")
    if not stat.S_ISREG(mode):
        raise BadInput(f"{output.label} is a device or a pipe; name a regular file.")


def _require_no_input(output: Output, inputs: Sequence[Path]) -> None:
    for path in inputs:
        if _are_same(output.path, path):
            raise BadInput(f"{output.label} is also read by this command, as {path}; name another file.")


def _require_kind(output: Output) -> None:
    if not output.path.exists():
        return
    with output.path.open("rb") as file:
        head = file.read(_HEAD_BYTES).decode("utf-8", errors="replace")
    if head and not output.kind.begins(head):
        raise BadInput(
            f"{output.label} exists and is not a {output.kind.label}, so it is not replaced; name another file."
        )


def _require_suffix(output: Output) -> None:
    if output.kind is OutputKind.PAGE and output.path.suffix not in _PAGE_SUFFIXES:
        raise BadInput(f"{output.label} is not an HTML file; name one that ends in .html.")


def _require_writable(label: str, path: Path) -> None:
    """Raise BadInput unless a temporary file can be created in the closest existing directory.

    Permission bits alone do not tell whether that is possible.
    """
    try:
        parent = next(parent for parent in path.resolve().parents if parent.exists())
        tempfile.TemporaryFile(dir=parent).close()
    except (OSError, RuntimeError):  # RuntimeError for circular links
        raise BadInput(f"{label} cannot be written; name a file in a directory that you may write to.") from None


def _are_same(one: Path, other: Path) -> bool:
    """Return True if two paths lead to the same file, possibly through links."""
    try:
        return one.samefile(other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)
