"""A file of lines that another process appends to, read as it grows."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.profiles.values import require_file

_MOST_BYTES = 2**32
"""Of a trace of a long run."""


class Tail:
    """Gives the lines that are new since it was asked last.

    A line counts when it is whole. A file that was replaced, as a resume does, begins again.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._file = path, 0, 0

    def read(self) -> tuple[bool, list[str]]:
        """(whether the file begins again, new lines); nothing of a file that does not exist."""
        if not self._path.exists():
            return False, []
        require_file(self._path, "the record of a run", _MOST_BYTES)
        file = self._path.open("rb")
        with file:
            begins = self._is_another(file.fileno())
            if begins:
                self._offset = 0
            file.seek(self._offset)
            read = file.read()
        whole = read[: read.rfind(b"\n") + 1]
        self._offset += len(whole)
        return begins, whole.decode("utf-8", errors="replace").splitlines()

    def _is_another(self, descriptor: int) -> bool:
        found = os.fstat(descriptor)
        is_known, self._file = found.st_ino == self._file, found.st_ino
        return not is_known or found.st_size < self._offset
