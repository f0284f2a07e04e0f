"""Consensus of all ranks on what to do after a period: checkpoint, stop, or continue under another plan.

One rank's request is enough: requests are reduced over the world once a period. Where stages run ahead, ranks do not
synchronise, so the result is read some periods later, when it has arrived: no rank waits, and all act after the same
period.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class RankRequest(NamedTuple):
    """A request to checkpoint after a period, to stop there, or to stop there and continue under another plan."""

    save: bool = False
    stop: bool = False
    replan: bool = False

    @property
    def ends(self) -> bool:
        """True if these processes run no further period."""
        return self.stop or self.replan


class Consensus:
    """One rank's side of the consensus. All ranks of the group call `after_period` equally often."""

    def __init__(self, group: dist.ProcessGroup, *, max_steps_ahead: int) -> None:
        """`max_steps_ahead` is the largest number of steps that a stage of the plan runs ahead."""
        self._group = group
        self._delay = max_steps_ahead + 1 if max_steps_ahead else 0
        self._pending: deque[tuple[dist.Work, Tensor]] = deque()

    def after_period(self, mine: RankRequest) -> RankRequest:
        """Return what all ranks do now. In a synchronous plan it waits for all ranks."""
        requests = torch.tensor(mine, dtype=torch.int32)
        work = dist.all_reduce(requests, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending.append((work, requests))
        return self._next_result() if len(self._pending) > self._delay else RankRequest()

    def flush(self) -> None:
        """Wait for the results that are still pending, and drop them."""
        while self._pending:
            self._next_result()

    def _next_result(self) -> RankRequest:
        work, requests = self._pending.popleft()
        work.wait()
        return RankRequest(*map(bool, requests.tolist()))
