"""Reports of every rank to rank 0 after each period, which no rank waits for."""

from __future__ import annotations

from collections import deque

from meshwright.runtime.messages.transport import Transport, pack, unpack
from meshwright.runtime.records.outcome import PeriodResult


class Reports:
    """Sends outcomes to rank 0, which takes them period by period."""

    def __init__(self, transport: Transport, *, num_ranks: int) -> None:
        """`transport` carries nothing else."""
        self._transport, self._num_ranks = transport, num_ranks
        self._local: deque[PeriodResult] = deque()

    def send(self, outcome: PeriodResult) -> None:
        """Sends the outcome of a period to rank 0, or stores it on rank 0. Does not wait."""
        if self._transport.rank == 0:
            self._local.append(outcome)
        else:
            self._transport.send(pack(outcome), 0, 0)

    def take(self, *, behind: int = 0) -> tuple[PeriodResult, ...]:
        """All ranks' outcomes of the oldest period not yet taken, on rank 0; empty unless more than `behind` are left.

        Waits for the other ranks' outcomes of that period.
        """
        if len(self._local) <= behind:
            return ()
        others = (unpack(self._transport.receive(rank, 0)) for rank in range(1, self._num_ranks))
        return (self._local.popleft(), *others)

    def flush(self) -> None:
        """Waits until all sent outcomes have arrived."""
        self._transport.flush()
