"""Times one collective among the first ranks of the world, each coming to it from computing, as in a stage.

Ranks that did nothing but exchange would meet at once and find everything they need at hand.
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
from meshwright.runtime.device.patience import patience

_WARMUP = 1
"""Calls that are not timed: the first of a group makes its connections."""

_TOGETHER = 8
"""Calls in each time: a layer alone makes several."""

_EDGE = 256
"""Of the matrices multiplied before each collective: about what a layer of a small model computes."""


def measure_exchange(exchange: Exchange, timer: Timer, *, repeats: int) -> list[Collective]:
    """The collective's time on this rank; ranks outside the group wait and have nothing.

    That a message has arrived its sender only knows by an answer: it takes half of the way there and back.
    """
    group = _first_ranks(exchange.num_ranks)
    ways = 2 if exchange.operation == "send_receive" else 1
    sample = None
    if dist.get_rank() < exchange.num_ranks:
        # Every rank must call equally often, so no budget may cut the repeats short.
        sample = measure(
            _body(exchange, group),
            timer=lambda body: timer(body) / ways,
            clock=time.perf_counter,
            warmup=_WARMUP,
            repeats=repeats,
            budget_seconds=float("inf"),
            before=_computing(),
            together=_TOGETHER,
        )
    dist.barrier()
    return [record_collective(exchange, sample)] if sample else []


@cache
def _first_ranks(number: int) -> dist.ProcessGroup | None:
    """Every rank of the world asks for the same groups in the same order."""
    return dist.new_group(list(range(number)), timeout=patience())


def _computing() -> Callable[[], object]:
    """A matrix product of some tenths of a millisecond."""
    square = torch.ones(_EDGE, _EDGE, device=host.device())
    return lambda: square @ square


def _body(exchange: Exchange, group: dist.ProcessGroup | None) -> Callable[[], object]:
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
            return lambda: _there_and_back(whole)


def _there_and_back(message: Tensor) -> None:
    """One message from rank 0 to rank 1, and one like it back."""
    if dist.get_rank() == 0:
        dist.send(message, 1)
        dist.recv(message, 1)
    else:
        dist.recv(message, 0)
        dist.send(message, 0)
