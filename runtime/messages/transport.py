"""Messages between ranks over gloo, on any device: point-to-point bytes, reports to rank 0, and barriers. Sends do not
wait.

A message's first part has a fixed size, so that its receive can be posted before the message is needed: gloo transfers
nothing before the receive is posted, and both sides react slowly while they compute. A process may hold several ranks,
one per thread: messages within a process stay in it, and messages between processes have both ranks in their tag.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.device.process_groups import collective_timeout
from meshwright.runtime.records.results import PeriodResult


def pack(value: object) -> Tensor:
    """A message [N] uint8 from any value that can be pickled."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def unpack(message: Tensor) -> Any:
    """The value that was packed in a message [N] uint8."""
    return pickle.loads(message.numpy().tobytes())


_FIRST_BYTES = 2**15
"""Size of a message's first part: the length of the message in bytes, then as much of it as fits."""

_LENGTH_BYTES = 8
"""Size of the length itself, an int64."""

_TIMEOUT_SECONDS = 900.0
"""A message within a process that takes longer was never sent."""


class ProcessRanks:
    """The `size` ranks of one process, which are threads, and the queues of messages between them."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)

    def message_queue(self, source: int, target: int, channel: int) -> queue.SimpleQueue[Tensor]:
        """The queue of messages [N] uint8 of a channel from one rank of the process to another."""
        with self._lock:
            return self._queues[source, target, channel]


class Transport:
    """Sends and receives one rank's messages; those of one channel between two ranks arrive in order."""

    def __init__(
        self, group: dist.ProcessGroup, *, rank: int | None = None, process: ProcessRanks | None = None
    ) -> None:
        """`group` is a gloo group over all processes; without a `process` each process is one rank."""
        self.rank = dist.get_rank() if rank is None else rank
        self._group, self._process_ranks = group, process or ProcessRanks()
        self._sends = _PendingSends()
        self._posted: dict[tuple[int, int], deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        """Posted receives of first parts, in order, by source and channel."""

    def send(self, message: Tensor, target: int, channel: int) -> None:
        """Sends bytes [N] uint8 to another rank."""
        if self._is_here(target):
            self._process_ranks.message_queue(self.rank, target, channel).put(message)
            return
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        head = message[: _FIRST_BYTES - _LENGTH_BYTES]
        first[:_LENGTH_BYTES] = torch.tensor([len(message)]).view(torch.uint8)
        first[_LENGTH_BYTES : _LENGTH_BYTES + len(head)] = head
        for index, part in enumerate((first, message[len(head) :])):
            if len(part):
                tag = self._tag(self.rank, target, 2 * channel + index)
                work = dist.isend(part, target // self._process_ranks.size, group=self._group, tag=tag)
                assert work is not None
                self._sends.add(work, part)

    def post_receive(self, source: int, channel: int) -> None:
        """Posts the receive of a later message, so that it can arrive while this rank computes."""
        if not self._is_here(source):
            first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
            tag = self._tag(source, self.rank, 2 * channel)
            work = dist.irecv(first, source // self._process_ranks.size, group=self._group, tag=tag)
            assert work is not None
            self._posted[source, channel].append((work, first))

    def receive(self, source: int, channel: int) -> Tensor:
        """Waits for the next message [N] uint8 of a channel from another rank."""
        if self._is_here(source):
            return self._process_ranks.message_queue(source, self.rank, channel).get(timeout=_TIMEOUT_SECONDS)
        posted = self._posted[source, channel]
        if not posted:
            self.post_receive(source, channel)
        work, first = posted.popleft()
        work.wait()
        length, head = int(first[:_LENGTH_BYTES].view(torch.int64)), first[_LENGTH_BYTES:]
        if length <= len(head):
            return head[:length]
        message = torch.empty(length, dtype=torch.uint8)
        message[: len(head)] = head
        tag = self._tag(source, self.rank, 2 * channel + 1)
        dist.recv(message[len(head) :], source // self._process_ranks.size, group=self._group, tag=tag)
        return message

    def flush(self) -> None:
        """Waits until all sent messages have arrived."""
        self._sends.join()

    def _is_here(self, rank: int) -> bool:
        return rank // self._process_ranks.size == self.rank // self._process_ranks.size

    def _tag(self, source: int, target: int, channel: int) -> int:
        """A tag made of the channel and the positions of both ranks in their processes."""
        size = self._process_ranks.size
        return (channel * size + source % size) * size + target % size


class _PendingSends:
    """Messages being sent, each kept in memory until its receiver has it.

    A gloo send completes only once it is waited for, so a thread waits for one after another.
    """

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[tuple[dist.Work, Tensor] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def add(self, work: dist.Work, part: Tensor) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_sends, name="transport", daemon=True)
            self._thread.start()
        self._messages.put((work, part))

    def join(self) -> None:
        """Waits until no message is being sent; raises the error of a failed send."""
        if self._thread is not None:
            self._messages.put(None)
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _wait_for_sends(self) -> None:
        while (send := self._messages.get()) is not None:
            try:
                send[0].wait()
            except RuntimeError as error:
                self._error = error
            del send


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


class Reports:
    """Sends the results of periods to rank 0, which takes them period by period."""

    def __init__(self, transport: Transport, *, num_ranks: int) -> None:
        """`transport` must not be used for other messages."""
        self._transport, self._num_ranks = transport, num_ranks
        self._local: deque[PeriodResult] = deque()

    def send(self, outcome: PeriodResult) -> None:
        """Sends the outcome of a period to rank 0, or stores it on rank 0. Does not wait."""
        if self._transport.rank == 0:
            self._local.append(outcome)
        else:
            self._transport.send(pack(outcome), 0, 0)

    def take(self, *, leave: int = 0) -> tuple[PeriodResult, ...]:
        """All ranks' outcomes of the oldest period not yet taken, on rank 0; empty unless more than `leave` are left.

        Waits for the other ranks' outcomes of that period.
        """
        if len(self._local) <= leave:
            return ()
        others = (unpack(self._transport.receive(rank, 0)) for rank in range(1, self._num_ranks))
        return (self._local.popleft(), *others)

    def flush(self) -> None:
        """Waits until all sent outcomes have arrived."""
        self._transport.flush()
