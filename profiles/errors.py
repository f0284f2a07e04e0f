"""The complete exception hierarchy, and the exit codes of errors.

MeshwrightError
├── BadInput      what the user gave breaks a rule            exit code 2
├── Infeasible    no plan fits; carries the binding limits    exit code 3
└── RunFailed     a run, or what it writes, was not finished  exit code 4

Each message is one sentence that names the thing, the value, the rule and what to change. For the codes that shells use
after signals see `runtime.cli.main` and `runtime.launch.interruption`.
"""

# ruff: noqa: N818 - the names say what happened; the suffix Error would add nothing.
from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable


class MeshwrightError(Exception):
    """An error that is shown to the user as one sentence, never as a traceback."""

    exit_code = 1


class BadInput(MeshwrightError):
    """A document, a flag or a file breaks a rule that the message states."""

    exit_code = 2


class Infeasible(MeshwrightError):
    """No plan satisfies the limits; the message lists the binding ones."""

    exit_code = 3


class RunFailed(MeshwrightError):
    """A run started and could not be completed, or the disk is full."""

    exit_code = 4


STOPPED = 75
"""Exit code of a run or a search that stopped on request, which is no error: EX_TEMPFAIL of sysexits(3)."""

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a full or failed disk, which are not mistakes in the input."""


def is_disk_failure(error: OSError) -> bool:
    """True if a write failed because the disk is full or has failed, so that a retry may succeed."""
    return error.errno in _DISK_ERRORS


def require_none(violations: Iterable[str], of: str = "") -> None:
    """Raises BadInput with the first violation, prefixed with `of`; later violations are not computed."""
    for sentence in violations:
        raise BadInput(f"{of}: {sentence}" if of else sentence)


def suggestion(unknown: str, known: Iterable[str]) -> str:
    """Return "did you mean X?" for known names that start with or resemble the unknown one, or have it as a part
    between hyphens or underscores; else all known names."""
    names = sorted(known)
    completions = [name for name in names if unknown and name.startswith(unknown)]
    matches = completions or difflib.get_close_matches(unknown, names, n=1)
    matches = matches or [name for name in names if unknown in name.replace("_", "-").split("-")]
    if matches:
        return f"did you mean {one_of(map(repr, matches))}?"
    return f"known: {', '.join(names)}."


def one_of(values: Iterable[object]) -> str:
    """Return the values as in "1, 2 or 4"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def nearest(value: int, legal: Iterable[int]) -> int:
    """Return the legal value nearest to `value`; the smaller one on a tie."""
    return min(legal, key=lambda other: (abs(other - value), other))
