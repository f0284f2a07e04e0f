"""What this device copies and multiplies at best: the limits that bodies are held to beside the datasheet's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.accelerator.world import World
from meshwright.planner.job.sections import ClusterSpec
from meshwright.profiles.hardware import Device
from meshwright.profiles.harness import measure
from meshwright.runtime.device import host
from meshwright.runtime.device.instruments import instruments

_REPEATS, _SECONDS = 20, 20.0
_ROWS, _HEADS, _HEAD_DIM = 4, 32, 128
"""Of the attention."""
_FILE = "ceilings.json"


class Ceilings(NamedTuple):
    """Bytes or operations a second, the median of some runs each."""

    copy: float
    """Bytes read and written."""
    product: float
    """Of a large square matrix product."""
    attention: float
    """Of causal attention forward, half of all pairs."""
    attention_both_ways: float


def device_of(world: World) -> Device:
    """Its datasheet, or what this machine's processor is taken to reach, with one rank on it."""
    return ClusterSpec(device=world.in_jobs, ranks_per_node=1).resolve().device


def report(world: World) -> str:
    """As a table of Markdown; keeps the ceilings for `measured`."""
    found, device = _measured(world), device_of(world)
    (world.out / _FILE).write_text(json.dumps(found._asdict()))
    peak = device.flops_per_second[world.precision]
    rows = (
        ("copy, GB/s", found.copy / 1e9, device.memory_bytes_per_second / 1e9),
        (f"matrix product, {world.precision}, TFLOP/s", found.product / 1e12, peak / 1e12),
        (f"causal attention, {world.precision}, TFLOP/s", found.attention / 1e12, peak / 1e12),
        ("causal attention and its gradients, TFLOP/s", found.attention_both_ways / 1e12, peak / 1e12),
    )
    lines = ("| what | measured | datasheet | share |", "|---|---|---|---|")
    return "\n".join((*lines, *(f"| {what} | {one:.3g} | {most:.3g} | {one / most:.0%} |" for what, one, most in rows)))


def measured(world: World) -> Device | None:
    """The device with measured limits in place of its datasheet's; None before they were measured."""
    path = world.out / _FILE
    if not path.exists():
        return None
    found, device = Ceilings(**json.loads(path.read_text())), device_of(world)
    peak = {**device.flops_per_second, world.precision: found.product}
    return device.model_copy(update={"memory_bytes_per_second": found.copy, "flops_per_second": peak})


def _measured(world: World) -> Ceilings:
    host.choose(world.kind)
    num_bytes, width, tokens = (2**22, 256, 128) if world.tiny else (2**32, 8192, 4096)
    forward, both_ways = _attention(tokens, world.dtype)
    return Ceilings(_copy(num_bytes), _product(width, world.dtype), forward, both_ways)


def _copy(num_bytes: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=host.device())
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source))


def _product(width: int, dtype: torch.dtype) -> float:
    left, right = (torch.randn(width, width, dtype=dtype, device=host.device()) for _ in range(2))
    return 2 * width**3 / _seconds(lambda: left @ right)


def _attention(tokens: int, dtype: torch.dtype) -> tuple[float, float]:
    """Forward, and both ways: forward two products for each of half of the pairs of tokens, backward five."""
    shape = _ROWS, _HEADS, tokens, _HEAD_DIM
    inputs = [torch.randn(shape, dtype=dtype, device=host.device(), requires_grad=True) for _ in range(3)]

    def attend() -> Tensor:
        return functional.scaled_dot_product_attention(*inputs, is_causal=True)

    forward = _seconds(torch.no_grad()(attend))
    both_ways = _seconds(lambda: torch.autograd.grad(attend().sum(), inputs))
    flops_of_product = _ROWS * _HEADS * tokens**2 * _HEAD_DIM
    return 2 * flops_of_product / forward, 7 * flops_of_product / both_ways


def _seconds(body: Callable[[], object]) -> float:
    timer = instruments().timer
    return measure(
        body, timer=timer, clock=time.perf_counter, warmup=3, repeats=_REPEATS, budget_seconds=_SECONDS
    ).median_seconds
