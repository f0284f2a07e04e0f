"""Copies tensors to host memory with several threads, while nothing else uses the cores of the rank."""

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

_PIECE_BYTES = 16 * 2**20
"""Bytes that a thread copies at a time."""
_MAX_THREADS = 8
_ALIGNMENT = 64
"""Bytes; each copy begins at a multiple of it."""


class _Piece(NamedTuple):
    source: Tensor
    copy: Tensor


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors [..., N] or [] on the host, each with a storage of its own.

    The memory is newly mapped and is freed with the last copy. It is on huge pages if the host has them, since normal
    pages take longer to map than to fill.
    """
    sources = [tensor.detach().contiguous() for tensor in tensors]
    copies = _empty_on_host(sources)
    pieces = [piece for pair in zip(sources, copies, strict=True) for piece in _pieces(*pair)]
    if host.on_cuda():
        _copy_from_device(pieces)
    else:
        _copy(pieces)
    return copies


def _empty_on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return uninitialised tensors on the host of the same shapes and types."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel may have no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return [
        torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
        if tensor.numel()
        else torch.empty_like(tensor, device="cpu")
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]


def _pieces(source: Tensor, copy: Tensor) -> Iterator[_Piece]:
    size = _PIECE_BYTES // source.element_size()
    yield from map(_Piece, source.view(-1).split(size), copy.view(-1).split(size))


def _copy(pieces: Sequence[_Piece]) -> None:
    with _threads(_num_threads()) as threads:
        for _ in threads.map(lambda piece: piece.copy.copy_(piece.source), pieces):
            pass


def _copy_from_device(pieces: Sequence[_Piece]) -> None:
    """Copy the pieces through pinned staging buffers, one for each thread.

    A copy to pinned memory runs at the speed of the device's link. Several threads keep the link and the host memory
    busy at once, and little memory is pinned.
    """
    host.synchronise()  # the copy streams do not wait for the streams that compute the tensors
    number = _num_threads()
    free: queue.SimpleQueue[tuple[Tensor, torch.cuda.Stream]] = queue.SimpleQueue()
    for _ in range(number):
        free.put((torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Stream(host.device())))

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
    """Return a pool of threads, each of which uses one core."""
    return ThreadPoolExecutor(number, "host copies", initializer=torch.set_num_threads, initargs=(1,))


def _num_threads() -> int:
    """Return this rank's even share of the machine's cores, at most `_MAX_THREADS`."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // num_ranks))
