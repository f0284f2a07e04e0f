"""Reading a file of lines while another process appends to it."""

from __future__ import annotations

import os
import sys
from collections import deque
from pathlib import Path
from typing import BinaryIO

from meshwright.profiles.errors import BadInput
from meshwright.profiles.segments import MAX_LINE_BYTES, numbered_lines
from meshwright.profiles.values import require_file

_CHUNK_BYTES = 2**16
"""Bytes read at a time when a file is searched from its end."""


class Tail:
    """Returns the complete lines that are new since the last call, at most the last `most`.

    A file that was replaced, by a resume or because the log started a new segment, is read from its beginning.
    """

    def __init__(self, path: Path, max_lines: int = 100_000) -> None:
        self._max_lines = max_lines
        self._path, self._offset, self._file = path, 0, 0

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
        """Return True if the file was replaced; then its lines are skipped, as the caller reads them in another way."""
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
        is_known, self._file = status.st_ino == self._file, status.st_ino
        return not is_known or status.st_size < self._offset


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
