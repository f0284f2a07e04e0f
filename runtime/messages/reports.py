"""What every rank tells rank 0 after a turn, without waiting for it."""

from __future__ import annotations

from collections import deque

from meshwright.runtime.messages.transport import Transport, packed, unpacked
from meshwright.runtime.records.outcome import Outcome


class Reports:
    """Outcomes on their way to rank 0, which takes them turn by turn."""

    def __init__(self, transport: Transport, *, num_ranks: int) -> None:
        """`transport` carries nothing else."""
        self._transport, self._num_ranks = transport, num_ranks
        self._mine: deque[Outcome] = deque()

    def send(self, outcome: Outcome) -> None:
        """Tells rank 0 of a turn; on rank 0 it is kept. Does not wait."""
        if self._transport.rank == 0:
            self._mine.append(outcome)
        else:
            self._transport.send(packed(outcome), 0, 0)

    def take(self, *, behind: int = 0) -> tuple[Outcome, ...]:
        """On rank 0 all outcomes of the oldest turn not taken yet, if more than `behind` are; else nothing."""
        if len(self._mine) <= behind:
            return ()
        others = (unpacked(self._transport.receive(rank, 0)) for rank in range(1, self._num_ranks))
        return (self._mine.popleft(), *others)

    def flush(self) -> None:
        """Waits until everything sent has arrived."""
        self._transport.flush()
