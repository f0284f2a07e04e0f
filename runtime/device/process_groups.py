"""The timeout of this process's collectives, and recognition of the errors that they raise when another rank has died.

torch gives each new group the default of its backend, ten minutes for NCCL, whatever the world group's timeout is; a
period of a large plan takes longer.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

_timeout = timedelta(minutes=15)


def collective_timeout() -> timedelta:
    """Return the timeout with which every process group of this process is created."""
    return _timeout


def set_collective_timeout(seconds: float) -> None:
    """Set the timeout of groups that are created from now on."""
    global _timeout  # noqa: PLW0603 - process groups are global too
    _timeout = timedelta(seconds=seconds)


_GLOO = "gloo/"
"""Part of every gloo error message, which names a source file; gloo errors have no class of their own."""


def lost_rank_error(error: BaseException) -> Exception | None:
    """Return the error caused by a lost rank: this one, or one of the ranks' errors that it holds; None otherwise."""
    if isinstance(error, CheckpointException):
        return next(filter(None, (lost_rank_error(failure) for failure, _ in error.failures.values())), None)
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO in str(error)):
        return error
    return None
