"""Measured where the table covers the shape, analytic elsewhere; each term's source says which.

A table's corrections hold for both.
"""

from __future__ import annotations

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.compute import AnalyticShard, Passes, Shard, Time
from meshwright.cost_models.cost import Memory
from meshwright.cost_models.measured import MeasuredShard, TableModel, corrected
from meshwright.cost_models.mixed import MixedModel
from meshwright.cost_models.once import Once
from meshwright.cost_models.peaks import Peaks, with_peaks
from meshwright.cost_models.question import Call, CostModel
from meshwright.profiles.cluster import AnyCluster, Cluster, MixedCluster
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import Body, Table, shape_of
from meshwright.profiles.workload import Workload


class BlendedModel(TableModel):
    """The table first, equations for the bodies and groups that it does not have."""

    memory_grows = False

    def __init__(self, table: Table, cluster: Cluster, workload: Workload, precision: str) -> None:
        def shard_of(model: ModelSpec, tp: int, analytic: AnalyticShard) -> Shard:
            blended = _BlendedShard(MeasuredShard(table, model, tp), analytic)
            return corrected(blended, table, shape_of(model, tp))

        super().__init__(table, cluster, workload, precision, shard_of)
        self._measured_memories: Once[Call, Memory] = Once()
        self._peaks: dict[tuple[ModelSpec, int], Peaks] = {}

    def memory(self, call: Call) -> Memory:
        return self._measured_memories.of(call, lambda: self._memory(call))

    def _memory(self, call: Call) -> Memory:
        key = (call.model, call.layout.tp)
        if key not in self._peaks:
            self._peaks[key] = Peaks(self._table, *key)
        return with_peaks(super().memory(call), call, self._workload, self._peaks[key])


class _BlendedShard(Shard):
    def __init__(self, measured: MeasuredShard, analytic: AnalyticShard) -> None:
        self._measured, self._analytic = measured, analytic

    def time(self, body: Body, rows: float, tokens: float, context: float = 0) -> Time:
        return self._of(body).time(body, rows, tokens, context)

    def total(self, body: Body, passes: Passes) -> Time:
        return self._of(body).total(body, passes)

    def _of(self, body: Body) -> Shard:
        return self._measured if self._measured.covers(body) else self._analytic


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
