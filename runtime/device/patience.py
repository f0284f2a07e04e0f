"""The timeout of this process's collectives.

torch gives each new group the default of its backend, ten minutes for NCCL, whatever the world group's timeout is; a
period of a large plan takes longer.
"""

from __future__ import annotations

from datetime import timedelta

_timeout = timedelta(minutes=15)


def collective_timeout() -> timedelta:
    """Return the timeout with which every process group of this process is created."""
    return _timeout


def set_collective_timeout(seconds: float) -> None:
    """Set the timeout of groups that are created from now on."""
    global _timeout  # noqa: PLW0603 - process groups are global too
    _timeout = timedelta(seconds=seconds)
