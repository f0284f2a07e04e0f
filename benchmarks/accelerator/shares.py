"""Bodies of a whole model on one device, beside what the device could do at best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.accelerator.ceilings import device_of, measured
from benchmarks.accelerator.jobs import config_of
from benchmarks.accelerator.limits import decode_seconds, train_seconds
from benchmarks.accelerator.world import World
from meshwright.profiles.hardware import Device
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec, model_from_config
from meshwright.profiles.table import Measurement, Point, TimedPass, shape_of
from meshwright.runtime.device import host
from meshwright.runtime.device.capabilities import device_capabilities
from meshwright.runtime.device.instruments import instruments
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.model.kernel_choice import choose_kernels
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.profiling.bench import Bench

TRAINED_LAYERS = {"qwen2.5-0.5b": 24, "qwen2.5-1.5b": 28, "llama-3.1-8b": 8}
"""Of each model: of the largest so many as one GPU trains, with fp32 weights and moments beside them. Decode steps have
all layers."""

_DECODE_ROWS = 64
_TRAIN_ROWS = 4
_REPEATS = 20
_SECONDS = 20.0  # of one pass at most


class Share(NamedTuple):
    """A pass beside the least seconds that the device can need for it, by its datasheet and by what was measured of
    it, if it was."""

    model: str
    timed_pass: str
    limit_seconds: float
    measured_limit_seconds: float | None
    measured: Measurement


def report(world: World) -> str:
    """As a table of Markdown."""
    specs = [model_from_config(config_of(world, name), name=name) for name in TRAINED_LAYERS]
    lines = (
        "| model | pass | limit ms | measured ms | share of the datasheet | of what was measured | tokens/s |",
        "|---|---|---|---|---|---|---|",
    )
    return "\n".join((*lines, *(f"| {share.model} | {_row(share)} |" for share in shares(world, specs))))


def shares(world: World, specs: Sequence[ModelSpec]) -> Iterator[Share]:
    """A decode step and a training micro-batch of each model."""
    context, tokens = (60, 32) if world.tiny else (1000, 2048)
    trained = [
        replace(spec, num_layers=min(spec.num_layers, TRAINED_LAYERS.get(spec.name, spec.num_layers))) for spec in specs
    ]
    points = [point for both in zip(specs, trained, strict=True) for point in _points(*both, context, tokens)]
    found = launch(_measured, points, world.precision, num_ranks=1, setup=ProcessSetup(world.kind))[0]
    device, best = device_of(world), measured(world)

    def limit(timed_pass: TimedPass, spec: ModelSpec, device: Device) -> float:
        if timed_pass is TimedPass.DECODE:
            return decode_seconds(spec, device, world.precision, rows=_DECODE_ROWS, context=context)
        return train_seconds(spec, device, world.precision, rows=_TRAIN_ROWS, tokens=tokens)

    told = {
        TimedPass.DECODE: f"decode, {_DECODE_ROWS} rows of {context} tokens, of the bandwidth",
        TimedPass.TRAIN: f"train, {_TRAIN_ROWS} rows of {tokens} tokens, of the arithmetic",
    }
    sides = (spec for both in zip(specs, trained, strict=True) for spec in both)
    for spec, measurement in zip(sides, found, strict=True):
        timed_pass, name = measurement.point.timed_pass, f"{spec.name}, {spec.num_layers} layers"
        of_best = limit(timed_pass, spec, best) if best else None
        yield Share(name, told[timed_pass], limit(timed_pass, spec, device), of_best, measurement)


def _points(spec: ModelSpec, trained: ModelSpec, context: int, tokens: int) -> tuple[Point, Point]:
    decode = {"timed_pass": TimedPass.DECODE, "rows": _DECODE_ROWS, "tokens": 1, "context": context}
    train = {"timed_pass": TimedPass.TRAIN, "rows": _TRAIN_ROWS, "tokens": tokens, "context": 0}
    return (
        Point(shape=shape_of(spec, 1), num_layers=spec.num_layers, **decode),
        Point(shape=shape_of(trained, 1), num_layers=trained.num_layers, **train),
    )


def _row(share: Share) -> str:
    seconds, point = share.measured.seconds, share.measured.point
    if seconds is None:
        return f"{share.timed_pass} | {share.limit_seconds * 1e3:.3g} | {share.measured.reason} | | |"
    best = f"{share.measured_limit_seconds / seconds:.0%}" if share.measured_limit_seconds else "not measured yet"
    return (
        f"{share.timed_pass} | {share.limit_seconds * 1e3:.3g} | {seconds * 1e3:.3g} | "
        f"{share.limit_seconds / seconds:.0%} | {best} | {point.rows * point.tokens / seconds:.0f}"
    )


def _measured(points: Sequence[Point], precision: str) -> list[Measurement]:
    """On the one rank."""
    longest = max(point.context + point.tokens for point in points) + 1
    specs = [point.shape.model(num_layers=1, max_positions=longest) for point in points]
    kernels = choose_kernels(device_capabilities(host.device().type), precision, specs).without_overlap
    bench = Bench(build_mesh(Layout(), 0), instruments(), precision=precision, max_positions=longest, kernels=kernels)
    return [bench.measure_point(point, repeats=_REPEATS, budget_seconds=_SECONDS) for point in points]
