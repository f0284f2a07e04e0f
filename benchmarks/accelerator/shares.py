"""Bodies of a whole model on one device, beside what the device could do at best."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.accelerator.limits import decode_seconds, train_seconds
from meshwright.planner.plan.job import Facts
from meshwright.profiles.cluster import of_one_kind
from meshwright.profiles.layout import Layout
from meshwright.profiles.stages import Role
from meshwright.profiles.table import Body, Measurement, Point, shape_of
from meshwright.runtime.device.instruments import instruments
from meshwright.runtime.launch.launch import Preparation, launch
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.profiling.bench import Bench

_DECODE_ROWS = 64
_REPEATS = 20
_SECONDS = 30.0  # of one body at most


class Share(NamedTuple):
    """A body beside the least seconds that the device can need for it."""

    body: str
    limit_seconds: float
    measured: Measurement


def shares(facts: Facts) -> list[Share]:
    """A decode step and a training micro-batch of the whole actor."""
    spec, device = facts.models.spec(Role.ACTOR), of_one_kind(facts.cluster, "measure").device
    on_gpu = device.kind == "cuda"
    context, rows, tokens = (2000, 4, 2048) if on_gpu else (100, 4, 64)
    shape = shape_of(spec, 1)
    points = (
        Point(shape=shape, num_layers=spec.num_layers, body=Body.DECODE, rows=_DECODE_ROWS, tokens=1, context=context),
        Point(shape=shape, num_layers=spec.num_layers, body=Body.TRAIN, rows=rows, tokens=tokens, context=0),
    )
    decoded, trained = launch(_measured, points, facts.precision, num_ranks=1, preparation=Preparation(device.kind))[0]
    decode = decode_seconds(spec, device, facts.precision, rows=_DECODE_ROWS, context=context)
    train = train_seconds(spec, device, facts.precision, rows=rows, tokens=tokens)
    return [
        Share(f"decode, {_DECODE_ROWS} rows of {context} tokens, of the memory bandwidth", decode, decoded),
        Share(f"train, {rows} rows of {tokens} tokens, of the arithmetic", train, trained),
    ]


def _measured(points: tuple[Point, ...], precision: str) -> list[Measurement]:
    """On the one rank."""
    longest = max(point.context + point.tokens for point in points) + 1
    bench = Bench(build_mesh(Layout(), 0), instruments(), precision=precision, max_positions=longest)
    return [bench.measure_point(point, repeats=_REPEATS, budget_seconds=_SECONDS) for point in points]
