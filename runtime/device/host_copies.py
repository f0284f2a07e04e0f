"""Copies of tensors in host memory, made by all the cores that a rank has to itself while nothing else runs."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.runtime.device import host

_PIECE = 16 * 2**20
"""Bytes that a thread copies at a time."""
_MOST_THREADS = 8
_ALIGNED = 64
"""Bytes: a copy begins at a multiple of them."""


class _Piece(NamedTuple):
    source: Tensor
    copy: Tensor


def copied_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors [..., N] or [], each with a storage of its own, in memory that goes back to the host
    with the last.

    That memory is new, and on huge pages where the host has them: common ones take longer to get than to fill.
    """
    sources = [tensor.detach().contiguous() for tensor in tensors]
    copies = _room_for(sources)
    pieces = [piece for pair in zip(sources, copies, strict=True) for piece in _pieces(*pair)]
    if host.on_cuda():
        _copy_from_device(pieces)
    else:
        _copy(pieces)
    return copies


def _room_for(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors on the host of the same shapes and types."""
    begins, end = [], 0
    for tensor in tensors:
        begins.append(end)
        end += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel may have none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return [
        torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin).view(tensor.shape)
        if tensor.numel()
        else torch.empty_like(tensor, device="cpu")
        for tensor, begin in zip(tensors, begins, strict=True)
    ]


def _pieces(source: Tensor, copy: Tensor) -> Iterator[_Piece]:
    size = _PIECE // source.element_size()
    yield from map(_Piece, source.view(-1).split(size), copy.view(-1).split(size))


def _copy(pieces: Sequence[_Piece]) -> None:
    with _threads(_num_threads()) as threads:
        for _ in threads.map(lambda piece: piece.copy.copy_(piece.source), pieces):
            pass


def _copy_from_device(pieces: Sequence[_Piece]) -> None:
    """Each thread takes a piece to pinned memory, which is as fast as the device's link, and on to where it stays: so
    both ways are busy, and no more is pinned than threads have in hand."""
    host.synchronise()  # streams of their own do not wait for what computes the tensors
    number = _num_threads()
    free: queue.SimpleQueue[tuple[Tensor, torch.cuda.Stream]] = queue.SimpleQueue()
    for _ in range(number):
        free.put((torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True), torch.cuda.Stream(host.device())))

    def copy(piece: _Piece) -> None:
        staging, stream = free.get()
        try:
            staged = staging[: piece.source.nbytes].view(piece.source.dtype)
            with torch.cuda.stream(stream):
                staged.copy_(piece.source, non_blocking=True)
            stream.synchronize()
            piece.copy.copy_(staged)
        finally:
            free.put((staging, stream))

    with _threads(number) as threads:
        for _ in threads.map(copy, pieces):
            pass


def _threads(number: int) -> ThreadPoolExecutor:
    """Each of which computes on one core."""
    return ThreadPoolExecutor(number, "host copies", initializer=torch.set_num_threads, initargs=(1,))


def _num_threads() -> int:
    """What this rank has of the cores of its machine when ranks share them evenly."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // num_ranks))
