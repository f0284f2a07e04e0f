"""Times and peak memory of a shard from a measured table: exact at its points, piecewise linear between them, and
marked as extrapolated beyond them.

Measurements at two depths give the amount of a layer (their slope) and of embedding and head (the remainder). Depths
that were not measured repeat the measured layer and count as interpolated; so do the times of a table built from
imported operators. Measured peak memory replaces computed activations and logits of forward and training passes;
everything else is still computed, and so is all memory under full recomputation, streaming, sequence and context
parallelism.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshwright.cost_models.compute import PassSeconds, Shard
from meshwright.cost_models.cost import Cost, Memory, Source, Term, least_trusted
from meshwright.cost_models.params import micro_batches_in_flight
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.elementwise import FloatArray
from meshwright.profiles.layout import layers_per_stage
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Recompute
from meshwright.profiles.table import Measurement, Shape, Table, TimedPass, shape_of
from meshwright.profiles.workload import Workload


class Curve:
    """Seconds as a function of one size; a single point scales in proportion to the size."""

    def __init__(self, points: Mapping[float, float]) -> None:
        self._sizes = sorted(points)
        self._seconds = [points[size] for size in self._sizes]

    def at(self, size: float) -> tuple[float, Source]:
        """Return the seconds at a size, and their source."""
        return _line(self._sizes, self._seconds, size)

    def at_each(self, sizes: FloatArray) -> tuple[FloatArray, Source]:
        """Return the seconds at several sizes, [sizes], and the least trusted of their sources."""
        points = [self.at(size) for size in sizes.tolist()]
        return np.array([seconds for seconds, _ in points]), least_trusted(source for _, source in points)


class Surface:
    """Seconds as a function of rows and a length: a curve over rows for each measured length, interpolated linearly."""

    def __init__(self, points: Mapping[tuple[float, float], float]) -> None:
        self._lengths = sorted({length for _, length in points})
        self._curves = [
            Curve({rows: seconds for (rows, other), seconds in points.items() if other == length})
            for length in self._lengths
        ]

    def at(self, rows: float, length: float) -> tuple[float, Source]:
        """Return the seconds at a number of rows and a length, and their source."""
        values = [curve.at(rows) for curve in self._curves]
        seconds, source = _line(self._lengths, [value for value, _ in values], length)
        if source is Source.MEASURED:
            return values[self._lengths.index(length)]
        return seconds, least_trusted([source, *(source_of_curve for _, source_of_curve in values)])


def _line(sizes: Sequence[float], seconds: Sequence[float], size: float) -> tuple[float, Source]:
    index = bisect_left(sizes, size)
    if index < len(sizes) and sizes[index] == size:
        return seconds[index], Source.MEASURED
    if len(sizes) == 1:
        return seconds[0] * size / sizes[0], Source.EXTRAPOLATED
    left = min(max(index - 1, 0), len(sizes) - 2)
    slope = (seconds[left + 1] - seconds[left]) / (sizes[left + 1] - sizes[left])
    value = max(0.0, seconds[left] + slope * (size - sizes[left]))
    return value, Source.INTERPOLATED if 0 < index < len(sizes) else Source.EXTRAPOLATED


class MeasuredShard(Shard):
    """Times of one of `tp` shards of `model`, for the kinds of passes that the table covers."""

    def __init__(self, table: Table, model: ModelSpec, tp: int) -> None:
        self._surfaces = {
            timed_pass: surfaces(parts)
            for timed_pass, parts in split_by_depth(table, shape_of(model, tp), _seconds).items()
        }
        is_own = table.provenance.origin is None
        self._full_depth = {
            m.point.timed_pass for m in table.measurements if is_own and m.point.num_layers == model.num_layers
        }
        """Kinds of passes that were measured at the model's own depth."""
        self._known: dict[tuple[TimedPass, float, float, float], PassSeconds[float]] = {}

    def covers(self, timed_pass: TimedPass) -> bool:
        """Return True if the table has this kind of pass for this shape at two depths."""
        return timed_pass in self._surfaces

    def time(self, timed_pass: TimedPass, rows: float, tokens: float, context: float = 0) -> PassSeconds[float]:
        key = (timed_pass, rows, tokens, context)
        if key not in self._known:
            self._known[key] = self._time(timed_pass, rows, context if timed_pass is TimedPass.DECODE else tokens)
        return self._known[key]

    def _time(self, timed_pass: TimedPass, rows: float, length: float) -> PassSeconds[float]:
        layers, ends = self._surfaces[timed_pass]
        layer, source = layers.at(rows, length)
        best_source = Source.MEASURED if timed_pass in self._full_depth else Source.INTERPOLATED
        return PassSeconds(layer, ends.at(rows, length)[0], least_trusted([source, best_source]))


def surfaces(parts: dict[tuple[float, float], tuple[float, float]]) -> tuple[Surface, Surface]:
    """Return the surface of a layer, and that of embedding and head."""
    return Surface({at: layer for at, (layer, _) in parts.items()}), Surface({at: e for at, (_, e) in parts.items()})


def split_by_depth(
    table: Table, shape: Shape, amount: Callable[[Measurement], float | None]
) -> dict[TimedPass, dict[tuple[float, float], tuple[float, float]]]:
    """Return (amount of a layer, amount of embedding and head) by kind of pass and (rows, length).

    Only points that were measured at two depths are included. The length is the context of a decode step, else the
    number of tokens.
    """
    by_depth: dict[tuple[TimedPass, float, float], dict[int, float]] = {}
    for measurement in table.measurements:
        point, measured = measurement.point, amount(measurement)
        if point.shape == shape and measured is not None:
            num_tokens = point.context if point.timed_pass is TimedPass.DECODE else point.tokens
            by_depth.setdefault((point.timed_pass, point.rows, num_tokens), {})[point.num_layers] = measured
    parts_by_pass: dict[TimedPass, dict[tuple[float, float], tuple[float, float]]] = {}
    for (timed_pass, rows, length), by_layers in by_depth.items():
        if len(by_layers) > 1:
            parts_by_pass.setdefault(timed_pass, {})[rows, length] = _split(by_layers)
    return parts_by_pass


def _seconds(measurement: Measurement) -> float | None:
    return measurement.seconds


def _split(amounts: dict[int, float]) -> tuple[float, float]:
    """Return the amounts of a layer, and of embedding and head, from the shallowest and the deepest model; neither is
    negative."""
    shallow, deep = min(amounts), max(amounts)
    layer = max(0.0, (amounts[deep] - amounts[shallow]) / (deep - shallow))
    layer = min(layer, amounts[deep] / deep)
    return layer, amounts[deep] - deep * layer


_COUNTED = ("activations", "unfused operators", "working set", "backward working set", "logits")
"""Terms of computed memory that a measured peak replaces."""

_EXCHANGED = ("refit buffer", "gathered weights")
"""Terms that are replaced too, unless they exceed the measured peak; then no term is replaced."""

MEASURED = "working memory"
"""Name of the term of a measured peak."""


class Peaks:
    """Bytes that a pass of one shard of `model` allocates at its peak, by kind of pass, rows and tokens."""

    def __init__(self, table: Table, model: ModelSpec, tp: int) -> None:
        parts_by_pass = split_by_depth(table, shape_of(model, tp), lambda measurement: measurement.peak_bytes)
        self._surfaces = {timed_pass: surfaces(parts) for timed_pass, parts in parts_by_pass.items()}

    def at(self, timed_pass: TimedPass, rows: float, tokens: float, num_layers: float) -> tuple[float, Source] | None:
        """Return the peak bytes of `num_layers` layers with embedding and head; None if they were not measured."""
        if timed_pass not in self._surfaces:
            return None
        layers, ends = self._surfaces[timed_pass]
        layer, source = layers.at(rows, tokens)
        return num_layers * layer + ends.at(rows, tokens)[0], source


def with_peaks(counted: Memory, query: StageQuery, workload: Workload, peaks: Peaks) -> Memory:
    """Return the memory of a stage with its measured working memory; unchanged if there is none."""
    stage, schedule, layout = query.stage, query.schedule, query.layout
    if stage.generates or schedule.chunk_tokens or schedule.recompute is Recompute.FULL or layout.sp or layout.cp > 1:
        return counted
    longest = workload.max_tokens
    max_rows = schedule.max_tokens(longest) / longest
    num_batches = math.ceil(_rows(query, workload) / max_rows)
    in_flight = micro_batches_in_flight(layout, layout.pp, num_batches) if stage.trains else 1
    timed_pass = TimedPass.TRAIN if stage.trains else TimedPass.FORWARD
    num_layers = in_flight * max(layers_per_stage(query.model, layout.pp))
    measured = peaks.at(timed_pass, max_rows, longest, num_layers)
    terms = counted.transient.terms
    if measured is None or not measured[0]:
        return counted
    if counted.transient.amount(*_EXCHANGED) > measured[0]:
        return counted
    other_terms = tuple(term for term in terms if term.name not in (*_COUNTED, *_EXCHANGED))
    return replace(counted, transient=Cost((*other_terms, Term(MEASURED, *measured))))


def _rows(query: StageQuery, workload: Workload) -> int:
    """Return the rows of one replica in one update."""
    return -(-workload.batch_size // (workload.num_minibatches * query.layout.dp))
