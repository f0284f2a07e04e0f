"""Standard output and error of a run that survive the loss of their reader, such as a closed terminal."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from meshwright.profiles.untrusted_text import printable

_READER_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Errors of a pipe or a terminal without a reader, and of a closed descriptor."""


class _LastingStream:
    """A stream that drops text once its reader is gone.

    With `escaped`, control sequences in the text are made printable, so that an answer of a judge or a function cannot
    control the terminal.
    """

    def __init__(self, stream: TextIO, *, escaped: bool) -> None:
        self._stream, self._escaped = stream, escaped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, or drop it if the reader is gone."""
        try:
            return self._stream.write(printable(text) if self._escaped else text)
        except (OSError, ValueError) as error:  # the latter for a closed stream
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        """Flush the stream, unless the reader is gone."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def _drop(self, error: OSError | ValueError) -> None:
        """Redirect the stream to /dev/null if its reader is gone; after other errors only this text is lost."""
        is_closed = isinstance(error, ValueError) and self._stream.closed
        if not is_closed and getattr(error, "errno", None) not in _READER_GONE:
            return
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


def open_standard_streams() -> None:
    """Open /dev/null for each of standard input, output and error that this process was started without.

    Otherwise a file opened later would get its descriptor, and printed text would go into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.set_inheritable(opened, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - it stays open
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


@contextmanager
def lasting_output() -> Iterator[None]:
    """Context in which a lost reader, such as `| head` or a closed terminal, does not end the process."""
    open_standard_streams()
    before = sys.stdout, sys.stderr
    # The progress bar on standard output needs its control sequences.
    sys.stdout = cast(TextIO, _LastingStream(sys.stdout, escaped=False))
    sys.stderr = cast(TextIO, _LastingStream(sys.stderr, escaped=True))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before
