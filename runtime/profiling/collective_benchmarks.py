"""Timing of one collective among the first ranks of the world.

Each rank computes something before the collective, as in a stage: ranks that did nothing but communicate would arrive
together and have warm caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.profiles.harness import Timer, measure, record_collective
from meshwright.profiles.table import Collective, Exchange
from meshwright.runtime.device import host
from meshwright.runtime.device.process_groups import collective_timeout

_WARMUP = 1
"""Calls before timing: the first of a group sets up its connections."""

_CALLS_PER_TIMING = 8
"""Number of calls that are timed together, since even one layer makes several in a row."""

_MATRIX_SIZE = 256
"""Rows of the square matrices multiplied before each collective; the product is about the work of a small layer."""


def measure_exchange(exchange: Exchange, timer: Timer, *, repeats: int) -> list[Collective]:
    """Measure a collective on this rank; ranks outside its group wait and return an empty list.

    A send and receive is timed as half a round trip, as only an answer tells the sender that its message has arrived.
    """
    group = _first_ranks(exchange.num_ranks)
    num_messages = 2 if exchange.operation == "send_receive" else 1
    sample = None
    if dist.get_rank() < exchange.num_ranks:
        # Every rank must call equally often, so a time budget must not reduce the repeats.
        sample = measure(
            _call(exchange, group),
            timer=lambda body: timer(body) / num_messages,
            clock=time.perf_counter,
            warmup=_WARMUP,
            repeats=repeats,
            budget_seconds=float("inf"),
            before=_matrix_product(),
            calls_per_sample=_CALLS_PER_TIMING,
        )
    dist.barrier()
    return [record_collective(exchange, sample)] if sample else []


@cache
def _first_ranks(number: int) -> dist.ProcessGroup | None:
    """Return the group of the first `number` ranks; all ranks of the world create the groups in the same order."""
    return dist.new_group(list(range(number)), timeout=collective_timeout())


def _matrix_product() -> Callable[[], object]:
    """Return a matrix product that takes some tenths of a millisecond."""
    square = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, device=host.device())
    return lambda: square @ square


def _call(exchange: Exchange, group: dist.ProcessGroup | None) -> Callable[[], object]:
    size = max(exchange.num_ranks, exchange.num_bytes // 4)
    whole = torch.ones(size - size % exchange.num_ranks, device=host.device())
    part = torch.ones(len(whole) // exchange.num_ranks, device=host.device())
    match exchange.operation:
        case "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        case "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part, group=group)
        case "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
        case "send_receive":
            return lambda: _round_trip(whole)


def _round_trip(message: Tensor) -> None:
    """Send a message [N] from rank 0 to rank 1 and back."""
    if dist.get_rank() == 0:
        dist.send(message, 1)
        dist.recv(message, 1)
    else:
        dist.recv(message, 0)
        dist.send(message, 0)
