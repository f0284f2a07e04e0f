"""How a rank that cannot go on says why, to the process that started it or to whoever reads its standard error.

Whoever launched the rank reads its record; where torchrun did, there is nobody to, and the sentence is printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from meshwright.profiles.errors import BadInput, MeshwrightError, RunFailed
from meshwright.profiles.printable import printable

_records: list[Path] = []


def keep_record(path: Path) -> None:
    """Where this process is to leave its record."""
    _records[:] = [path]


def record(error: BaseException) -> None:
    """Leaves it, for an error that ends this rank."""
    is_told = isinstance(error, MeshwrightError)
    _write(str(error) if is_told else f"{type(error).__name__}: {error}", traceback.format_exc(), error)


def end(sentence: str, silent: Iterable[int] = ()) -> NoReturn:
    """Ends this process at once, whatever its other threads wait for; the sentence says all, of other ranks too.

    `silent` are processes of the run on this machine that would answer no gentler signal.
    """
    if _records:
        _write(sentence, "", None)
    else:
        sys.stderr.write(f"error: {printable(sentence)}\n")
        sys.stderr.flush()
    for process in silent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os._exit(RunFailed.exit_code)


def _write(sentence: str, trace: str, error: BaseException | None) -> None:
    for path in _records:
        told = {
            "at_ns": time.time_ns(),
            "sentence": sentence,
            "is_bad_input": isinstance(error, BadInput),
            "is_of_all": error is None,
            "traceback": trace,
        }
        partial = path.with_suffix(".partial")  # whoever ends this rank may do so while it writes
        partial.write_text(json.dumps(told), encoding="utf-8")
        partial.replace(path)
