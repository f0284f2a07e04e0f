"""Barriers between ranks that are threads of one process or of several."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch.distributed as dist

from meshwright.runtime.device.patience import collective_timeout

_BARRIER_TIMEOUT_SECONDS = 900.0
"""A barrier that takes longer than this has lost a rank."""


class Barriers:
    """Barriers of fixed sets of ranks, which are threads, `ranks_per_process` of them in each process."""

    def __init__(self, sets: Iterable[tuple[int, ...]], ranks_per_process: int) -> None:
        """Collective over the processes, which pass the same sets in the same order; one object for all threads."""
        process = dist.get_rank()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._threads: dict[tuple[int, ...], threading.Barrier] = {}
        for ranks in dict.fromkeys(sets):
            processes = sorted({rank // ranks_per_process for rank in ranks})
            group = (
                dist.new_group(processes, backend="gloo", timeout=collective_timeout()) if len(processes) > 1 else None
            )
            self._groups[ranks] = group if process in processes else None
            num_local = sum(rank // ranks_per_process == process for rank in ranks)
            if num_local:
                self._threads[ranks] = threading.Barrier(num_local, timeout=_BARRIER_TIMEOUT_SECONDS)

    def wait(self, ranks: tuple[int, ...]) -> None:
        """Waits until all ranks of the set call it: first the threads of this process, then the processes."""
        is_leader = self._threads[ranks].wait() == 0
        group = self._groups[ranks]
        if group is None:
            return
        if is_leader:
            dist.barrier(group=group)
        self._threads[ranks].wait()

    def close(self) -> None:
        """Destroys the process groups, once no rank will wait again."""
        for group in self._groups.values():
            if group is not None:
                dist.destroy_process_group(group)
