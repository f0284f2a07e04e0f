"""A file of lines that another process appends to, read as it grows."""

from __future__ import annotations

import os
import sys
from collections import deque
from pathlib import Path
from typing import BinaryIO

from meshwright.profiles.errors import BadInput
from meshwright.profiles.segments import MOST_LINE_BYTES, numbered_lines
from meshwright.profiles.values import require_file

_BLOCK_BYTES = 2**16
"""Read at once where a file is gone through from its end."""


class Tail:
    """Gives the lines that are new since it was asked last, of many the last `most`.

    A line counts when it is whole. A file that was replaced, as a resume does and a log that has become a segment,
    begins again.
    """

    def __init__(self, path: Path, most: int = 100_000) -> None:
        self._most = most
        self._path, self._offset, self._file = path, 0, 0

    def read(self) -> tuple[bool, list[str]]:
        """(whether the file begins again, new lines); nothing of a file that does not exist."""
        if not self._path.exists():
            return False, []
        require_file(self._path, "the record of a run", sys.maxsize)
        file = self._path.open("rb")
        with file:
            begins = self._is_another(file.fileno())
            if begins:
                self._offset = 0
            file.seek(self._offset)
            found: deque[bytes] = deque(maxlen=self._most)
            for _, line in numbered_lines(self._path, file):
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    found.append(line[:-1])
        return begins, [line.decode("utf-8", errors="replace") for line in found]

    def skip(self) -> bool:
        """Whether the file begins again; if so, its lines are passed over, so that another reader may take the last of
        them."""
        if not self._path.exists():
            return False
        require_file(self._path, "the record of a run", sys.maxsize)
        with self._path.open("rb") as file:
            begins = self._is_another(file.fileno())
            if begins:
                self._offset = _end_of_lines(self._path, file)
        return begins

    def _is_another(self, descriptor: int) -> bool:
        found = os.fstat(descriptor)
        is_known, self._file = found.st_ino == self._file, found.st_ino
        return not is_known or found.st_size < self._offset


def _end_of_lines(path: Path, file: BinaryIO) -> int:
    """Where the last whole line ends. Raises BadInput where none does for longer than a line may be."""
    end = size = file.seek(0, os.SEEK_END)
    while end > 0:
        if size - end >= MOST_LINE_BYTES:
            raise BadInput(f"{path}: its last line is longer than {MOST_LINE_BYTES} bytes; no run writes one.")
        begin = max(0, end - _BLOCK_BYTES)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
