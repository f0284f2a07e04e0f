"""Recognition of the errors that a collective raises because another rank has died."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

_GLOO = "gloo/"
"""Part of every gloo error message, which names a source file; gloo errors have no class of their own."""


def lost_rank_error(error: BaseException) -> Exception | None:
    """Return the error caused by a lost rank: this one, or one of the ranks' errors that it holds; None otherwise."""
    if isinstance(error, CheckpointException):
        return next(filter(None, (lost_rank_error(failure) for failure, _ in error.failures.values())), None)
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO in str(error)):
        return error
    return None
