"""Times of a shard read from a measured table: exact at its points, interpolated between, extrapolated beyond.

Two depths at one point give the time of a layer (their slope) and of embedding and head (what is left). Depths that
were not measured repeat the measured layer, and count as interpolated. So do times that a calibration has changed, and
those of a table whose bodies were put together from imported operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshwright.cost_models.collectives import Group, Law, Network
from meshwright.cost_models.compute import AnalyticShard, Shard, Time
from meshwright.cost_models.cost import Cost, Source, Term, least_trusted
from meshwright.cost_models.interpolation import Surface
from meshwright.cost_models.question import Move
from meshwright.cost_models.stage_cost import StageModel
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import Body, Measurement, Shape, Table, Traffic, shape_of
from meshwright.profiles.workload import Workload


class TableModel(StageModel):
    """A cost model with a table: its collectives, and its corrections of what passes between ranks."""

    seconds_grow = False

    def __init__(
        self,
        table: Table,
        cluster: Cluster,
        workload: Workload,
        precision: str,
        shard_of: Callable[[ModelSpec, int, AnalyticShard], Shard],
    ) -> None:
        table.require(cluster, precision)
        super().__init__(cluster, workload, precision, table=table, shard_of=shard_of)
        self._table = table
        if table.corrects(Traffic.COLLECTIVE):
            peers = self._framework.peer_reductions
            self._network = _CorrectedNetwork(cluster, self._efficiency, table, peer_reductions=peers)

    def move_seconds(self, move: Move) -> Cost:
        return _corrected_cost(super().move_seconds(move), self._table, Traffic.REFIT)

    def handover_seconds(self, num_bytes: float) -> Cost:
        return _corrected_cost(super().handover_seconds(num_bytes), self._table, Traffic.HANDOVER)


class MeasuredModel(TableModel):
    """Compute only from the table: a shape or a body that it lacks is refused in one sentence.

    Collectives come from the table where it has the group, and are analytic elsewhere.
    """

    def __init__(self, table: Table, cluster: Cluster, workload: Workload, precision: str) -> None:
        def shard_of(model: ModelSpec, tp: int, _analytic: AnalyticShard) -> Shard:
            return corrected(MeasuredShard(table, model, tp), table, shape_of(model, tp))

        super().__init__(table, cluster, workload, precision, shard_of)


class MeasuredShard(Shard):
    """Times of one shard of `model`, from the table."""

    def __init__(self, table: Table, model: ModelSpec, tp: int) -> None:
        self._model, self._tp = model, tp
        self._surfaces = {body: surfaces(parts) for body, parts in splits(table, shape_of(model, tp), _seconds).items()}
        depths = {m.point.num_layers for m in table.measurements}
        whole = model.num_layers in depths and table.provenance.origin is None
        self._best = Source.MEASURED if whole else Source.INTERPOLATED
        self._known: dict[tuple[Body, float, float, float], Time] = {}

    def covers(self, body: Body) -> bool:
        """Whether the table has this body for this shape at two depths."""
        return body in self._surfaces

    def time(self, body: Body, rows: float, tokens: float, context: float = 0) -> Time:
        key = (body, rows, tokens, context)
        if key not in self._known:
            self._known[key] = self._time(body, rows, context if body is Body.DECODE else tokens)
        return self._known[key]

    def _time(self, body: Body, rows: float, length: float) -> Time:
        if body not in self._surfaces:
            raise BadInput(
                f"the table has no {body} for the shape of {self._model.name} at tp={self._tp}; "
                "profile this job, or let the blended model fill the gap."
            )
        layers, ends = self._surfaces[body]
        layer, source = layers.at(rows, length)
        return Time(layer, ends.at(rows, length)[0], least_trusted([source, self._best]))


def corrected(shard: Shard, table: Table, shape: Shape) -> Shard:
    """The shard with the table's corrections of its shape; the same shard where they change nothing."""
    factors = {body: factor for body, factor in table.factors(shape).items() if factor != 1}
    return _CorrectedShard(shard, factors) if factors else shard


class _CorrectedShard(Shard):
    """Times of a shard multiplied by a factor for each body, which makes them none that were measured."""

    def __init__(self, shard: Shard, factors: Mapping[Body, float]) -> None:
        self._shard, self._factors = shard, factors

    def time(self, body: Body, rows: float, tokens: float, context: float = 0) -> Time:
        time = self._shard.time(body, rows, tokens, context)
        if body not in self._factors:
            return time
        factor = self._factors[body]
        return Time(time.layer * factor, time.ends * factor, least_trusted([time.source, Source.INTERPOLATED]))


class _CorrectedNetwork(Network):
    """Collectives as the table's runs correct them."""

    def __init__(self, cluster: Cluster, efficiency: Efficiency, table: Table, *, peer_reductions: bool) -> None:
        super().__init__(cluster, efficiency, table.collectives, peer_reductions=peer_reductions)
        self._table = table

    def _law(self, operation: str, group: Group) -> Law:
        law = super()._law(operation, group)

        def corrected(num_bytes: float) -> tuple[float, Source]:
            seconds, source = law(num_bytes)
            if not seconds:
                return seconds, source
            return self._table.corrected(Traffic.COLLECTIVE, seconds), least_trusted([source, Source.INTERPOLATED])

        return corrected


def _corrected_cost(cost: Cost, table: Table, traffic: Traffic) -> Cost:
    """The cost after the table's corrections; the same cost where they change nothing."""
    if not table.corrects(traffic):
        return cost
    beyond = table.corrected(traffic, 0.0)
    factor = table.corrected(traffic, 1.0) - beyond
    terms = tuple(Term(t.name, t.amount * factor, least_trusted([t.source, Source.INTERPOLATED])) for t in cost.terms)
    return Cost((*terms, Term("beyond what was predicted", beyond, Source.INTERPOLATED)) if beyond else terms)


def surfaces(parts: dict[tuple[float, float], tuple[float, float]]) -> tuple[Surface, Surface]:
    """What a layer takes, and what the ends take."""
    return Surface({at: layer for at, (layer, _) in parts.items()}), Surface({at: e for at, (_, e) in parts.items()})


def splits(
    table: Table, shape: Shape, amount: Callable[[Measurement], float | None]
) -> dict[Body, dict[tuple[float, float], tuple[float, float]]]:
    """(amount of a layer, amount of the ends) by body and (rows, length), where it was measured at two depths."""
    by_depth: dict[tuple[Body, float, float], dict[int, float]] = {}
    for measurement in table.measurements:
        point, measured = measurement.point, amount(measurement)
        if point.shape == shape and measured is not None:
            length = point.context if point.body is Body.DECODE else point.tokens
            by_depth.setdefault((point.body, point.rows, length), {})[point.num_layers] = measured
    found: dict[Body, dict[tuple[float, float], tuple[float, float]]] = {}
    for (body, rows, reach), by_layers in by_depth.items():
        if len(by_layers) > 1:
            found.setdefault(body, {})[rows, reach] = _split(by_layers)
    return found


def _seconds(measurement: Measurement) -> float | None:
    return measurement.seconds


def _split(amounts: dict[int, float]) -> tuple[float, float]:
    """What a layer and the ends take, from the shallowest and the deepest model; noise makes neither negative."""
    shallow, deep = min(amounts), max(amounts)
    layer = max(0.0, (amounts[deep] - amounts[shallow]) / (deep - shallow))
    layer = min(layer, amounts[deep] / deep)
    return layer, amounts[deep] - deep * layer
