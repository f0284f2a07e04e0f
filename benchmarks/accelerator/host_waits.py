"""Where the device waits for its host: how long bodies take, and how much of it the device computes.

The device's share is the union of all its kernels' times, as torch's profiler has them. What is left it waits for the
next launch. The longest kernels of a body say what a faster one would have to change.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.accelerator.jobs import config_of
from benchmarks.accelerator.world import World
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec, model_from_config
from meshwright.profiles.table import Point, TimedPass, shape_of
from meshwright.runtime.device import host
from meshwright.runtime.device.capabilities import device_capabilities
from meshwright.runtime.device.instruments import instruments
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.model.kernel_choice import choose_kernels
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.profiling.bench import Bench

MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b")
SIZES: dict[TimedPass, tuple[tuple[int, int], ...]] = {
    TimedPass.TRAIN: ((4, 2048), (32, 540), (4, 540)),
    TimedPass.FORWARD: ((4, 2048), (32, 540)),
    TimedPass.PREFILL: ((128, 32), (4, 1024)),
    TimedPass.DECODE: ((64, 1000), (128, 300)),
}
"""Rows, and tokens of each: cached ones of a decode step."""

_REPEATS, _TOP = 5, 14
_SHORT = 70
_ROUNDS = 8
"""Of decode steps in a body."""


class Found(NamedTuple):
    """Of one call of a body."""

    point: Point
    seconds: float
    busy_seconds: float
    num_kernels: float
    kernels: tuple[tuple[str, int, float], ...]
    """The longest: name, how often, and seconds of all of them."""


def report(world: World) -> str:
    """As tables of Markdown."""
    lines = ["| model | body | ms | device computes, ms | share | kernels |", "|---|---|---|---|---|---|"]
    told = []
    for name in MODELS[:1] if world.tiny else MODELS:
        spec = model_from_config(config_of(world, name), name=name)
        found = launch(_of_model, spec, world, num_ranks=1, setup=ProcessSetup(world.kind))[0]
        lines += [f"| {name} | {_row(one)} |" for one in found]
        seen = {TimedPass.TRAIN: None, TimedPass.DECODE: None} | {one.point.timed_pass: one for one in reversed(found)}
        told += [_longest(name, one) for one in (seen[TimedPass.TRAIN], seen[TimedPass.DECODE]) if one]
    return "\n".join((*lines, *told))


def _of_model(spec: ModelSpec, world: World) -> list[Found]:
    """On the one rank."""
    points = [_point(spec, body, *((2, 16) if world.tiny else size)) for body, sizes in SIZES.items() for size in sizes]
    longest = max(2 * point.context + point.tokens for point in points) + _ROUNDS
    kernels = choose_kernels(device_capabilities(host.device().type), world.precision, [spec]).without_overlap
    bench = Bench(
        build_mesh(Layout(), 0), instruments(), precision=world.precision, max_positions=longest, kernels=kernels
    )
    found = []
    for point in points:
        found.append(_watched(point, bench.prepare(point), _ROUNDS if point.timed_pass is TimedPass.DECODE else 1))
        print(_row(found[-1]), file=sys.stderr, flush=True)
    return found


def _point(spec: ModelSpec, body: TimedPass, rows: int, tokens: int) -> Point:
    decodes = body is TimedPass.DECODE
    return Point(
        timed_pass=body,
        shape=shape_of(spec, 1),
        num_layers=spec.num_layers,
        rows=rows,
        tokens=1 if decodes else tokens,
        context=tokens if decodes else 0,
    )


def _watched(point: Point, body: Callable[[], object], rounds: int) -> Found:
    """`rounds` are in one call of the body, of which figures are of one, where the device is a GPU."""
    on_cuda, timer = host.on_cuda(), instruments().timer
    rounds = rounds if on_cuda else 1
    body()
    seconds = sorted(timer(body) for _ in range(_REPEATS))[_REPEATS // 2] / rounds
    activity = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as watched:
        body()
        host.synchronise()
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    events = [event for event in watched.events() if event.device_type == kind]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    counts, sums = Counter(event.name for event in events), Counter[str]()
    for event, (start, end) in zip(events, spans, strict=True):
        sums[event.name] += end - start
    longest = tuple((name, counts[name], total / 1e6 / rounds) for name, total in sums.most_common(_TOP))
    return Found(point, seconds, covered(spans) / 1e6 / rounds, len(events) / rounds, longest)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _row(found: Found) -> str:
    point = found.point
    tokens = f"{point.context} cached tokens" if point.timed_pass is TimedPass.DECODE else f"{point.tokens} tokens"
    figures = f"{1e3 * found.seconds:.2f} | {1e3 * found.busy_seconds:.2f} | {found.busy_seconds / found.seconds:.0%}"
    return f"{point.timed_pass.value}, {point.rows} rows of {tokens} | {figures} | {found.num_kernels:.0f}"


def _longest(name: str, found: Found) -> str:
    lines: Sequence[str] = [
        f"\n{name}, {_row(found).split(' |')[0]}: the longest kernels\n",
        "| kernel | times | ms |",
        "|---|---|---|",
        *(f"| {_short(kernel)} | {count} | {1e3 * seconds:.2f} |" for kernel, count, seconds in found.kernels),
    ]
    return "\n".join(lines)


def _short(kernel: str) -> str:
    """A kernel's name without what would break the table."""
    plain = kernel.replace("|", "/").replace("void ", "")
    return plain if len(plain) <= _SHORT else f"{plain[: _SHORT - 1]}…"
