"""How long collectives of this process wait for their ranks.

torch gives each new group a default of its own library, ten minutes for NCCL, whatever the world was given; a turn of a
large plan takes longer.
"""

from __future__ import annotations

from datetime import timedelta

_patience = timedelta(minutes=15)


def patience() -> timedelta:
    """What every group of this process is made with."""
    return _patience


def have_patience(seconds: float) -> None:
    """Of groups that are made from now on."""
    global _patience  # noqa: PLW0603 - it is of the process, as the groups are
    _patience = timedelta(seconds=seconds)
