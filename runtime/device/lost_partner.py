"""What a collective raises on a rank whose partner has ended: no fault of the rank, nor of what it reads or writes."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

_GLOO = "gloo/"
"""In the message of each of its errors stands the file of its source; they have no class of their own."""


def lost_partner(error: BaseException) -> Exception | None:
    """The error that says so: this one, or one of those of all ranks that it gathers; None where none does."""
    if isinstance(error, CheckpointException):
        return next(filter(None, (lost_partner(failure) for failure, _ in error.failures.values())), None)
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO in str(error)):
        return error
    return None
