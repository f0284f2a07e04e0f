"""A table built from the operators that NVIDIA's aiconfigurator-core has measured: forward, prefill and decode passes
of shards, summed kernel by kernel.

GEMMs and attention take the seconds of the equations in `kernels` times the ratio of measured to predicted seconds,
interpolated in the logarithms of the sizes; beyond the measured sizes the outermost ratio is used. Element-wise work
and launches are by equation. The operators include no training, so a blended model uses equations for it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.kernels import PRECISIONS, DecodeSeconds, Heads, Kernels, SecondsByCount
from meshwright.profiles.aiconfigurator import PACKAGE, Attention, Gemm, HeadCounts, Message, Operators
from meshwright.profiles.efficiency import Efficiency, efficiency_of
from meshwright.profiles.elementwise import N, sum_of, where
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import GRAPH, engine_named
from meshwright.profiles.hardware import Cluster, Device
from meshwright.profiles.harness import TimingResult, points, record, record_collective
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role, StageGraph
from meshwright.profiles.table import Collective, Exchange, Measurement, Point, Provenance, Shape, Table, TimedPass
from meshwright.profiles.workload import Workload


class MeasuredKernels(Kernels):
    """Kernel times from measured operators, on their device and in their precision."""

    def __init__(self, operators: Operators, device: Device, efficiency: Efficiency) -> None:
        number_format, flops = PRECISIONS[operators.precision], device.flops_per_second[operators.precision]
        super().__init__(
            device, efficiency, flops_per_second=flops, weight_bytes=number_format.weight_bytes, size=number_format.size
        )
        self._cache_bytes = number_format.cache_bytes
        self._gemms = _Ratios(operators.gemms, lambda key: Kernels.gemm(self, *key))
        self._prefill = {
            heads: self._prefill_ratios(heads, measured) for heads, measured in operators.prefill_attention.items()
        }
        self._decode = {
            heads: self._decode_ratios(heads, measured) for heads, measured in operators.decode_attention.items()
        }

    def gemm(self, rows: Any, inner: Any, outer: Any) -> Any:
        """Return the seconds of [rows, inner] x [inner, outer]."""
        return super().gemm(rows, inner, outer) * self._gemms.at_each(rows, inner, outer)

    def products(self, shapes: Sequence[tuple[float, float]]) -> SecondsByCount:
        """Return a function of rows: the sum of `gemm` over shapes (inner, outer)."""

        def seconds(rows: N) -> N:
            each: list[N] = [self.gemm(rows, inner, outer) for inner, outer in shapes]
            return sum_of(each)

        return seconds

    def attention(self, rows: N, tokens: N, context: N, heads: Heads, *, cache_bytes: float) -> N:
        """Return the seconds of `Kernels.attention`, scaled by the ratios of the most similar measured heads."""
        ratio: N = _nearest(self._prefill, heads).at_each(rows, tokens)
        blocks: N = ratio * super()._block_attention(rows, tokens, context, heads)
        is_decoding = (tokens == 1) & (context > 0)
        if not np.any(is_decoding):
            return blocks
        return where(is_decoding, self.decoding(heads, cache_bytes)(rows, context), blocks)

    def decoding(self, heads: Heads, cache_bytes: float) -> DecodeSeconds:
        """Return the function of `Kernels.decoding`, scaled by the ratios of the most similar measured heads."""
        predict, ratios = super().decoding(heads, cache_bytes), _nearest(self._decode, heads)

        def seconds(rows: N, context: N) -> N:
            ratio: N = ratios.at_each(rows, context)
            return ratio * predict(rows, context)

        return seconds

    def _prefill_ratios(self, heads: HeadCounts, measured: Mapping[Attention, float]) -> _Ratios:
        shard_heads, cache_bytes = Heads(*heads), self._cache_bytes
        return _Ratios(
            measured, lambda key: Kernels.attention(self, key[0], key[1], 0, shard_heads, cache_bytes=cache_bytes)
        )

    def _decode_ratios(self, heads: HeadCounts, measured: Mapping[Attention, float]) -> _Ratios:
        predict = super().decoding(Heads(*heads), self._cache_bytes)
        return _Ratios(measured, lambda key: predict(key[0], key[1]))


class _Ratios:
    """Ratios of measured to predicted seconds on a grid of sizes, of which some may be missing."""

    def __init__(
        self,
        measured: Mapping[Gemm, float] | Mapping[Attention, float],
        predict: Callable[[Sequence[float]], float],
    ) -> None:
        self._measured: Mapping[tuple[float, ...], float] = {tuple(key): seconds for key, seconds in measured.items()}
        self._axes = [sorted(set(sizes)) for sizes in zip(*self._measured, strict=True)]
        self._predict = predict

    def at_each(self, *sizes: Any) -> Any:
        """Return the ratio at these sizes; where some of them are arrays, at each of their elements."""
        if any(isinstance(size, np.ndarray) for size in sizes):
            return np.array([self.at(each) for each in np.broadcast(*sizes)])
        return self.at(sizes)

    def at(self, sizes: Sequence[float]) -> float:
        """Return the ratio at these sizes: the mean of the grid's corners around them, weighted by proximity."""
        total = weights = 0.0
        for corner, weight in _corners(self._axes, sizes):
            if corner in self._measured:
                total += weight * self._measured[corner] / self._predict(corner)
                weights += weight
        if weights:
            return total / weights
        nearest = min(self._measured, key=partial(_distance, sizes))
        return self._measured[nearest] / self._predict(nearest)


def _corners(axes: Sequence[Sequence[float]], sizes: Sequence[float]) -> Iterator[tuple[tuple[float, ...], float]]:
    """Yield the corners of the cell around the sizes, each with its weight; sizes are clamped to the grid."""
    if not axes:
        yield (), 1.0
        return
    axis, size = axes[0], min(max(sizes[0], axes[0][0]), axes[0][-1])
    upper = min(bisect_right(axis, size), len(axis) - 1)
    low, high = axis[max(0, upper - 1)], axis[upper]
    share = math.log(size / low) / math.log(high / low) if high > low else 0.0
    for end, part in ((low, 1 - share), (high, share)):
        if part > 0:
            for corner, weight in _corners(axes[1:], sizes[1:]):
                yield (end, *corner), part * weight


def _nearest(ratios: Mapping[HeadCounts, _Ratios], heads: Heads) -> _Ratios:
    return ratios[min(ratios, key=partial(_distance, heads[:3]))]


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the distance of two tuples of sizes: the sum of the absolute logarithms of their ratios."""
    return sum(abs(math.log(a / b)) for a, b in zip(one, other, strict=True))


BODIES = (TimedPass.FORWARD, TimedPass.PREFILL, TimedPass.DECODE)
"""The kinds of passes that the operators cover."""

_UNKNOWN = "unknown"


def imported_points(
    graph: StageGraph, models: Iterable[Mapping[Role, ModelSpec]], workloads: Iterable[Workload], cluster: Cluster
) -> tuple[Point, ...]:
    """Return the distinct points that a table for these jobs needs."""
    all_workloads = tuple(workloads)
    candidates = (
        point for specs in models for workload in all_workloads for point in points(graph, specs, workload, cluster)
    )
    return tuple(dict.fromkeys(point for point in candidates if point.timed_pass in BODIES))


def imported_table(
    operators: Operators, table_points: Iterable[Point], cluster: Cluster, precision: str, date: str
) -> Table:
    """Return the table of these points. Raises BadInput if the job's precision is not that of the operators."""
    if precision != operators.precision:
        measured = operators.precision
        raise BadInput(f"the operators of {PACKAGE} are in {measured} and the job runs in {precision}; profile it.")
    efficiency = efficiency_of(cluster.device.kind, cluster.device.name)
    kernels = MeasuredKernels(operators, cluster.device, efficiency)
    framework = engine_named(GRAPH).framework_on(cluster.device.kind)
    shards: dict[Shape, AnalyticShard] = {}
    rows = []
    for point in table_points:
        if point.shape not in shards:
            model = point.shape.model(num_layers=1, max_positions=1)
            shards[point.shape] = AnalyticShard(
                model, cluster.device, precision, efficiency, 1.0, framework=framework, kernels=kernels
            )
        rows.append(_measurement(shards[point.shape], point))
    provenance = imported_provenance(operators, precision, date)
    return Table(provenance=provenance, measurements=tuple(rows), collectives=imported_collectives(operators))


def imported_collectives(operators: Operators) -> tuple[Collective, ...]:
    """Return the measured collectives as rows of a table."""
    return tuple(_collective(message, seconds) for message, seconds in operators.collectives.items())


def imported_provenance(operators: Operators, precision: str, date: str) -> Provenance:
    """Return the provenance of a table built from these operators on `date`."""
    package, engine, network = (f"{name} {version}" for name, version in operators.versions.items())
    return Provenance.model_validate(
        {
            "device": operators.device,
            "kind": "cuda",
            "precision": precision,
            "driver": _UNKNOWN,
            "libraries": dict(operators.versions),
            "commit": _UNKNOWN,
            "date": date,
            "threads_per_rank": 1,
            "num_ranks": 1,
            "repeats": 1,
            "origin": f"NVIDIA {package} (Apache-2.0), system {operators.system}: GEMM and attention of {engine}, "
            f"collectives of {network}; element-wise work and launches by equation",
        }
    )


def _measurement(shard: AnalyticShard, point: Point) -> Measurement:
    time = shard.time(point.timed_pass, point.rows, point.tokens, point.context)
    return record(point, _sample(point.num_layers * time.layer + time.ends))


def _collective(message: Message, seconds: float) -> Collective:
    return record_collective(Exchange.model_validate(message._asdict()), _sample(seconds))


def _sample(seconds: float) -> TimingResult:
    return TimingResult(median_seconds=seconds, spread_seconds=0.0, repeats=1)
