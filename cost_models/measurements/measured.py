"""Times of a shard from a measured table: exact at its points, interpolated between, extrapolated beyond.

Measurements at two depths give the time of a layer (their slope) and of embedding and head (the remainder). Depths that
were not measured repeat the measured layer and count as interpolated. So do the times of a table built from imported
operators.
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.cost_models.compute import PassSeconds, Shard
from meshwright.cost_models.cost import Source, least_trusted
from meshwright.cost_models.measurements.interpolation import Surface
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import Measurement, Shape, Table, TimedPass, shape_of


class MeasuredShard(Shard):
    """Times of one of `tp` shards of `model`, for the kinds of passes that the table covers."""

    def __init__(self, table: Table, model: ModelSpec, tp: int) -> None:
        self._surfaces = {
            body: surfaces(parts) for body, parts in split_by_depth(table, shape_of(model, tp), _seconds).items()
        }
        is_own = table.provenance.origin is None
        self._full_depth = {
            m.point.body for m in table.measurements if is_own and m.point.num_layers == model.num_layers
        }
        """Kinds of passes that were measured at the model's own depth."""
        self._known: dict[tuple[TimedPass, float, float, float], PassSeconds] = {}

    def covers(self, body: TimedPass) -> bool:
        """Return True if the table has this kind of pass for this shape at two depths."""
        return body in self._surfaces

    def time(self, body: TimedPass, rows: float, tokens: float, context: float = 0) -> PassSeconds:
        key = (body, rows, tokens, context)
        if key not in self._known:
            self._known[key] = self._time(body, rows, context if body is TimedPass.DECODE else tokens)
        return self._known[key]

    def _time(self, body: TimedPass, rows: float, length: float) -> PassSeconds:
        layers, ends = self._surfaces[body]
        layer, source = layers.at(rows, length)
        best_source = Source.MEASURED if body in self._full_depth else Source.INTERPOLATED
        return PassSeconds(layer, ends.at(rows, length)[0], least_trusted([source, best_source]))


def surfaces(parts: dict[tuple[float, float], tuple[float, float]]) -> tuple[Surface, Surface]:
    """Return the surface of a layer, and that of embedding and head."""
    return Surface({at: layer for at, (layer, _) in parts.items()}), Surface({at: e for at, (_, e) in parts.items()})


def split_by_depth(
    table: Table, shape: Shape, amount: Callable[[Measurement], float | None]
) -> dict[TimedPass, dict[tuple[float, float], tuple[float, float]]]:
    """Return (amount of a layer, amount of the ends) by body and (rows, length), if measured at two depths."""
    by_depth: dict[tuple[TimedPass, float, float], dict[int, float]] = {}
    for measurement in table.measurements:
        point, measured = measurement.point, amount(measurement)
        if point.shape == shape and measured is not None:
            length = point.context if point.body is TimedPass.DECODE else point.tokens
            by_depth.setdefault((point.body, point.rows, length), {})[point.num_layers] = measured
    parts_by_body: dict[TimedPass, dict[tuple[float, float], tuple[float, float]]] = {}
    for (body, rows, reach), by_layers in by_depth.items():
        if len(by_layers) > 1:
            parts_by_body.setdefault(body, {})[rows, reach] = _split(by_layers)
    return parts_by_body


def _seconds(measurement: Measurement) -> float | None:
    return measurement.seconds


def _split(amounts: dict[int, float]) -> tuple[float, float]:
    """Return the amounts of a layer and the ends, from the shallowest and the deepest model; neither is negative."""
    shallow, deep = min(amounts), max(amounts)
    layer = max(0.0, (amounts[deep] - amounts[shallow]) / (deep - shallow))
    layer = min(layer, amounts[deep] / deep)
    return layer, amounts[deep] - deep * layer
