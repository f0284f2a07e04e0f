"""What all ranks do behind a turn because any of them wishes it: a checkpoint, or an end.

Wishes are reduced over the world once a turn. Where stages work ahead ranks do not meet, so the answer to a turn's
wishes is looked at some turns later, when it has come: nobody waits, and all act behind the same turn.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Wish(NamedTuple):
    """To save a checkpoint behind a turn, to stop there, and to stop there so as to go on under another plan."""

    save: bool = False
    stop: bool = False
    replan: bool = False

    @property
    def ends(self) -> bool:
        """Whether no turn follows, of these processes."""
        return self.stop or self.replan


class Agreement:
    """One rank's part. All ranks of the group call `behind_turn` equally often."""

    def __init__(self, group: dist.ProcessGroup, *, most_ahead: int) -> None:
        """`most_ahead` is the most steps by which a stage of the plan works ahead."""
        self._group = group
        self._delay = most_ahead + 1 if most_ahead else 0
        self._asked: deque[tuple[dist.Work, Tensor]] = deque()

    def behind_turn(self, mine: Wish) -> Wish:
        """What all ranks do now. In a synchronous plan it returns when all ranks have come."""
        wishes = torch.tensor(mine, dtype=torch.int32)
        work = dist.all_reduce(wishes, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._asked.append((work, wishes))
        return self._answer() if len(self._asked) > self._delay else Wish()

    def flush(self) -> None:
        """Waits for the answers that nobody asks for any more."""
        while self._asked:
            self._answer()

    def _answer(self) -> Wish:
        work, wishes = self._asked.popleft()
        work.wait()
        return Wish(*map(bool, wishes.tolist()))
