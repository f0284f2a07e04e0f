"""Measured where the table covers the shape, analytic elsewhere; each term's source says which.

A table's corrections hold for both, and for what passes between ranks. What a correction has changed is no longer
measured: it counts as interpolated at best.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.collectives import Group, Law, Network
from meshwright.cost_models.compute import AnalyticShard, Passes, Shard, Time
from meshwright.cost_models.cost import Cost, Memory, Source, Term, least_trusted
from meshwright.cost_models.measurements.measured import MeasuredShard
from meshwright.cost_models.measurements.peaks import Peaks, with_peaks
from meshwright.cost_models.mixed import MixedModel
from meshwright.cost_models.question import Call, CostModel, LayoutCosts, Move, Once, Summed
from meshwright.profiles.cluster import AnyCluster, Cluster, MixedCluster
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import Body, Shape, Table, Traffic, shape_of
from meshwright.profiles.workload import Workload


class BlendedModel(AnalyticModel):
    """The table first, equations for the bodies and groups that it does not have.

    Raises BadInput when the table is of another device or precision.
    """

    memory_grows = False
    seconds_grow = False

    def __init__(self, table: Table, cluster: Cluster, workload: Workload, precision: str) -> None:
        def shard_of(model: ModelSpec, tp: int, analytic: AnalyticShard) -> Shard:
            blended = _BlendedShard(MeasuredShard(table, model, tp), analytic)
            return _corrected(blended, table, shape_of(model, tp))

        table.require(cluster, precision)
        super().__init__(cluster, workload, precision, table=table, shard_of=shard_of)
        self._table = table
        self._measured_memories: Once[Call, Memory] = Once()
        self._peaks: dict[tuple[ModelSpec, int], Peaks] = {}
        if table.corrects(Traffic.COLLECTIVE):
            peers = self._framework.peer_reductions
            self._network = _CorrectedNetwork(cluster, self._efficiency, table, peer_reductions=peers)

    def memory(self, call: Call) -> Memory:
        return self._measured_memories.of(call, lambda: self._memory(call))

    def on_layout(self, call: Call) -> LayoutCosts:
        return Summed(self, call)

    def move_seconds(self, move: Move) -> Cost:
        return _corrected_cost(super().move_seconds(move), self._table, Traffic.REFIT)

    def handover_seconds(self, num_bytes: float) -> Cost:
        return _corrected_cost(super().handover_seconds(num_bytes), self._table, Traffic.HANDOVER)

    def _memory(self, call: Call) -> Memory:
        key = (call.model, call.layout.tp)
        if key not in self._peaks:
            self._peaks[key] = Peaks(self._table, *key)
        return with_peaks(super().memory(call), call, self._workload, self._peaks[key])


def cost_model(cluster: AnyCluster, workload: Workload, precision: str, table: Table | None = None) -> CostModel:
    """The best model that the facts allow: blended with a table, analytic without.

    On nodes of several kinds the table is for the parts that have its device. Raises BadInput when the table is of
    another device or precision.
    """
    if isinstance(cluster, MixedCluster):
        known = table.provenance.device if table else None
        is_of_none = all(part.device.name != known for part in cluster.parts)  # it is then given to all, and refused
        tables = [table if is_of_none or part.device.name == known else None for part in cluster.parts]
        models = [cost_model(part, workload, precision, mine) for part, mine in zip(cluster.parts, tables, strict=True)]
        return MixedModel(cluster, models, precision)
    if table is None:
        return AnalyticModel(cluster, workload, precision)
    return BlendedModel(table, cluster, workload, precision)


class _BlendedShard(Shard):
    def __init__(self, measured: MeasuredShard, analytic: AnalyticShard) -> None:
        self._measured, self._analytic = measured, analytic

    def time(self, body: Body, rows: float, tokens: float, context: float = 0) -> Time:
        return self._of(body).time(body, rows, tokens, context)

    def total(self, body: Body, passes: Passes) -> Time:
        return self._of(body).total(body, passes)

    def _of(self, body: Body) -> Shard:
        return self._measured if self._measured.covers(body) else self._analytic


def _corrected(shard: Shard, table: Table, shape: Shape) -> Shard:
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
