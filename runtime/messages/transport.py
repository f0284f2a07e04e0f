"""Bytes from rank to rank over gloo, whatever the devices compute with. Sends do not wait.

A message's first part is of one size, so that room for it can be made before the message is asked for: gloo sends
nothing before its receiver has made room, and both ends are slow to notice while they compute.

A process may hold several ranks, each in a thread of its own: messages within a process do not leave it, and messages
between processes carry both ranks in their tag.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections import defaultdict, deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def packed(value: object) -> Tensor:
    """A message [N] uint8 of anything that can be pickled."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def unpacked(message: Tensor) -> Any:
    """What was packed in a message [N] uint8."""
    return pickle.loads(message.numpy().tobytes())


_FIRST_BYTES = 2**15
"""Of a message's first part: its length in bytes, then as much of it as there is room for."""

_LENGTH_BYTES = 8
"""Of the length itself, an int64."""

_PATIENCE_SECONDS = 900.0
"""A message within a process that is longer on its way was never sent."""


class ProcessRanks:
    """The ranks of one process, `size` to a process, and the messages between them."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._boxes: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)

    def box(self, source: int, target: int, channel: int) -> queue.SimpleQueue[Tensor]:
        """The messages [N] uint8 of a channel from one rank of the process to another."""
        with self._lock:
            return self._boxes[source, target, channel]


class Transport:
    """One rank's messages. Messages of one channel between two ranks arrive in the order in which they were sent."""

    def __init__(
        self, group: dist.ProcessGroup, *, rank: int | None = None, process: ProcessRanks | None = None
    ) -> None:
        """`group` is a gloo group over all processes; without a `process` each process is one rank."""
        self.rank = dist.get_rank() if rank is None else rank
        self._group, self._process_ranks = group, process or ProcessRanks()
        self._leaving = _Leaving()
        self._coming: dict[tuple[int, int], deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        """By source and channel: first parts that there is room for, in the order in which they come."""

    def send(self, message: Tensor, target: int, channel: int) -> None:
        """Sends bytes [N] uint8 to another rank."""
        if self._is_here(target):
            self._process_ranks.box(self.rank, target, channel).put(message)
            return
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        begun = message[: _FIRST_BYTES - _LENGTH_BYTES]
        first[:_LENGTH_BYTES] = torch.tensor([len(message)]).view(torch.uint8)
        first[_LENGTH_BYTES : _LENGTH_BYTES + len(begun)] = begun
        for half, part in enumerate((first, message[len(begun) :])):
            if len(part):
                tag = self._tag(self.rank, target, 2 * channel + half)
                work = dist.isend(part, target // self._process_ranks.size, group=self._group, tag=tag)
                assert work is not None
                self._leaving.add(work, part)

    def expect(self, source: int, channel: int) -> None:
        """Makes room for a message that will be asked for, so that it can arrive while this rank computes."""
        if not self._is_here(source):
            first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
            tag = self._tag(source, self.rank, 2 * channel)
            work = dist.irecv(first, source // self._process_ranks.size, group=self._group, tag=tag)
            assert work is not None
            self._coming[source, channel].append((work, first))

    def receive(self, source: int, channel: int) -> Tensor:
        """Waits for the bytes [N] uint8 that another rank sends."""
        if self._is_here(source):
            return self._process_ranks.box(source, self.rank, channel).get(timeout=_PATIENCE_SECONDS)
        coming = self._coming[source, channel]
        if not coming:
            self.expect(source, channel)
        work, first = coming.popleft()
        work.wait()
        length, begun = int(first[:_LENGTH_BYTES].view(torch.int64)), first[_LENGTH_BYTES:]
        if length <= len(begun):
            return begun[:length]
        message = torch.empty(length, dtype=torch.uint8)
        message[: len(begun)] = begun
        tag = self._tag(source, self.rank, 2 * channel + 1)
        dist.recv(message[len(begun) :], source // self._process_ranks.size, group=self._group, tag=tag)
        return message

    def flush(self) -> None:
        """Waits until everything sent has arrived."""
        self._leaving.join()

    def _is_here(self, rank: int) -> bool:
        return rank // self._process_ranks.size == self.rank // self._process_ranks.size

    def _tag(self, source: int, target: int, channel: int) -> int:
        """Channel, then the places of both ranks in their processes."""
        size = self._process_ranks.size
        return (channel * size + source % size) * size + target % size


class _Leaving:
    """Messages on their way, each kept until its receiver has it, and no longer.

    A gloo send does not know that it is done before it is waited for, so a thread waits for one after another.
    """

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[tuple[dist.Work, Tensor] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def add(self, work: dist.Work, part: Tensor) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._see_off, name="transport", daemon=True)
            self._thread.start()
        self._messages.put((work, part))

    def join(self) -> None:
        """Returns when none is on its way; raises what went wrong with any."""
        if self._thread is not None:
            self._messages.put(None)
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _see_off(self) -> None:
        while (leaving := self._messages.get()) is not None:
            try:
                leaving[0].wait()
            except RuntimeError as error:
                self._error = error
            del leaving
