"""Failure records: a rank that cannot continue leaves its error for the process that launched it.

A rank that torchrun launched has no reader for such a record; it prints the error instead.
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
from meshwright.profiles.untrusted_text import printable

_record_paths: list[Path] = []


def set_record_path(path: Path) -> None:
    """Set the path at which this process leaves its failure record."""
    _record_paths[:] = [path]


def write_record(error: BaseException) -> None:
    """Write the failure record of an error that ends this rank."""
    is_for_user = isinstance(error, MeshwrightError)
    _write(str(error) if is_for_user else f"{type(error).__name__}: {error}", traceback.format_exc(), error)


def end_process(sentence: str, silent: Iterable[int] = ()) -> NoReturn:
    """End this process at once, whatever its other threads wait for; `sentence` is the error of the whole run.

    `silent` are unresponsive processes of the run on this machine, which are killed.
    """
    if _record_paths:
        _write(sentence, "", None)
    else:
        sys.stderr.write(f"error: {printable(sentence)}\n")
        sys.stderr.flush()
    for process in silent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os._exit(RunFailed.exit_code)


def _write(sentence: str, trace: str, error: BaseException | None) -> None:
    for path in _record_paths:
        content = {
            "at_ns": time.time_ns(),
            "sentence": sentence,
            "is_bad_input": isinstance(error, BadInput),
            "is_of_all": error is None,  # the error of the whole run, not of this rank
            "traceback": trace,
        }
        partial = path.with_suffix(".partial")  # this rank may be killed while it writes
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(path)
