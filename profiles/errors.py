"""The tree of exceptions, all of it.

MeshwrightError
├── BadInput      what the user gave breaks a rule            exit code 2
├── Infeasible    no plan fits; carries the binding limits    exit code 3
└── RunFailed     a run, or what it writes, was not finished  exit code 4

Each message is one sentence that names the thing, the value, the rule and the way out.
"""

# ruff: noqa: N818 - the names say what happened; a suffix would not.
from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable


class MeshwrightError(Exception):
    """An error that is told to the user in one sentence, never as a traceback."""

    exit_code = 1


class BadInput(MeshwrightError):
    """A document, a flag or a file breaks a rule that the message states."""

    exit_code = 2


class Infeasible(MeshwrightError):
    """No plan satisfies the limits; the message lists the ones that bind."""

    exit_code = 3


class RunFailed(MeshwrightError):
    """A run began and could not be completed, or a disk takes no more of what is written."""

    exit_code = 4


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""A disk that takes no more, or has failed: not what the user has given."""


def is_full(error: OSError) -> bool:
    """Whether it is the disk that could not take what was written, which another try may find with room."""
    return error.errno in _FULL


def require_none(violations: Iterable[str], of: str = "") -> None:
    """Raises BadInput with the first of the violations, beginning with what they are of; none is asked for after it."""
    for sentence in violations:
        raise BadInput(f"{of}: {sentence}" if of else sentence)


def suggestion(unknown: str, known: Iterable[str]) -> str:
    """The clause "did you mean X?" for the known names that it begins or is nearest to, or the list of known names."""
    names = sorted(known)
    completions = [name for name in names if unknown and name.startswith(unknown)]
    nearest = completions or difflib.get_close_matches(unknown, names, n=1)
    if nearest:
        return f"did you mean {' or '.join(map(repr, nearest))}?"
    return f"known: {', '.join(names)}."


def nearest(value: int, legal: Iterable[int]) -> int:
    """The legal value that is nearest to a value that is not; of two as near the smaller."""
    return min(legal, key=lambda other: (abs(other - value), other))
