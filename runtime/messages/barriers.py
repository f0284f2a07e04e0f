"""Where ranks wait for each other before they do something together, in threads and in processes."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch.distributed as dist

from meshwright.runtime.device.patience import patience

_PATIENCE_SECONDS = 900.0
"""A meeting that waits longer than this has lost a rank."""


class Barriers:
    """Barriers of fixed sets of ranks, `ranks_per_process` of which live in each process, as threads."""

    def __init__(self, sets: Iterable[tuple[int, ...]], ranks_per_process: int) -> None:
        """Collective over the processes, which name the same sets in the same order; one object for all threads."""
        here = dist.get_rank()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._threads: dict[tuple[int, ...], threading.Barrier] = {}
        for ranks in dict.fromkeys(sets):
            processes = sorted({rank // ranks_per_process for rank in ranks})
            group = dist.new_group(processes, backend="gloo", timeout=patience()) if len(processes) > 1 else None
            self._groups[ranks] = group if here in processes else None
            housed = sum(rank // ranks_per_process == here for rank in ranks)
            if housed:
                self._threads[ranks] = threading.Barrier(housed, timeout=_PATIENCE_SECONDS)

    def wait(self, ranks: tuple[int, ...]) -> None:
        """Returns when all ranks of the set have come: first those of this process, then the processes."""
        first_here = self._threads[ranks].wait() == 0
        group = self._groups[ranks]
        if group is None:
            return
        if first_here:
            dist.barrier(group=group)
        self._threads[ranks].wait()

    def close(self) -> None:
        """Gives the connections back, when no rank will meet again."""
        for group in self._groups.values():
            if group is not None:
                dist.destroy_process_group(group)
