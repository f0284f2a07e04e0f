"""Standard output and error of a run, which goes on when nobody reads them any more."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from meshwright.profiles.printable import printable

_NOBODY_READS = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Errors of a pipe or a terminal whose reader has gone, and of a descriptor that is closed."""


class _LastingStream:
    """A stream whose reader may go: what is written from then on is dropped. Where it is `escaped`, what a judge or a
    function has answered commands no terminal."""

    def __init__(self, stream: TextIO, *, escaped: bool) -> None:
        self._stream, self._escaped = stream, escaped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes it, or drops it where nobody reads."""
        try:
            return self._stream.write(printable(text) if self._escaped else text)
        except (OSError, ValueError) as error:  # the latter of a stream that was closed
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        """Has the reader take what was written, if there is one."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def _drop(self, error: OSError | ValueError) -> None:
        """From now on where nobody reads any more; else this text alone, as on a full disk."""
        is_closed = isinstance(error, ValueError) and self._stream.closed
        if not is_closed and getattr(error, "errno", None) not in _NOBODY_READS:
            return
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def open_standard_streams() -> None:
    """Opens standard input, output and error to nowhere where this process was started without one: a file that is
    opened later would take its number, and what is printed would go into that file."""
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
    """Within it, a reader that goes ends nothing: neither the pipe of `| head`, nor a terminal that is closed."""
    open_standard_streams()
    before = sys.stdout, sys.stderr
    # Progress on standard output moves the cursor itself.
    sys.stdout = cast(TextIO, _LastingStream(sys.stdout, escaped=False))
    sys.stderr = cast(TextIO, _LastingStream(sys.stderr, escaped=True))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before
