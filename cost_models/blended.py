"""The cost model with a measured table: measured times where the table covers the shape, analytic ones otherwise.

The source of each term tells which one it is. The table's corrections apply to both, and to collectives, refits and
transfers; a corrected number counts as interpolated at best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.communication import Group, Network, SecondsByBytes
from meshwright.cost_models.compute import AnalyticShard, PassColumns, Passes, PassSeconds, Shard
from meshwright.cost_models.cost import Cost, Memory, Source, Term, least_trusted
from meshwright.cost_models.generation_cost import ENGINE_LOAD, Generation
from meshwright.cost_models.measured import MeasuredShard, Peaks, with_peaks
from meshwright.cost_models.mixed import MixedModel, PairModel, homogeneous_cluster
from meshwright.cost_models.protocol import (
    BytesColumns,
    CostModel,
    LayoutCosts,
    Memo,
    QueriedLayoutCosts,
    QueryLoop,
    RefitQuery,
    RefitTable,
    StageQuery,
)
from meshwright.profiles.choice_table import ChoiceTable
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.elementwise import FloatArray
from meshwright.profiles.frameworks import OWN_ENGINES, EngineName, EngineSleep, engine_named
from meshwright.profiles.hardware import AnyCluster, Cluster, MixedCluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import Shape, Table, TimedPass, Traffic, shape_of
from meshwright.profiles.workload import Workload


class BlendedModel(AnalyticModel):
    """A cost model that uses the table first, and equations for what the table lacks.

    Generation by another engine than those that were timed is analytic too. Corrections apply to the engines of this
    project, and to an engine in its own process if they are from runs with it. Raises BadInput if the table is of
    another device or precision.
    """

    seconds_are_monotone = False

    def __init__(
        self, table: Table, cluster: Cluster, workload: Workload, precision: str, engine: EngineName | None = None
    ) -> None:
        engine_is_timed = engine in (None, table.provenance.engine)
        self._timings = table.timings_of(engine)
        timed = table.model_copy(update={"measurements": self._timings.measurements}) if self._timings else None

        def shard_of(model: ModelSpec, tp: int, analytic: AnalyticShard, apart: bool) -> Shard:
            if apart and engine not in OWN_ENGINES:
                separate = _BlendedShard(MeasuredShard(timed, model, tp), analytic) if timed else analytic
                return _corrected(separate, table, shape_of(model, tp), engine)
            uses_table = not apart or (engine_is_timed and not analytic.is_quantised)
            shard = analytic if not uses_table else _BlendedShard(MeasuredShard(table, model, tp), analytic)
            return _corrected(shard, table, shape_of(model, tp))

        table.require(cluster, precision)
        engine_facts = engine_named(engine) if engine else None
        super().__init__(cluster, workload, precision, table=table, make_shard=shard_of, engine=engine_facts)
        self._has_own_engine = not engine_is_timed
        if self._timings and self._timings.process_bytes and self._operators.process_bytes:
            self._operators = self._operators._replace(process_bytes=self._timings.process_bytes)
        self._table = table
        self._measured_memories: Memo[StageQuery, Memory] = Memo()
        self._peaks: dict[tuple[ModelSpec, int], Peaks] = {}

    def memory(self, query: StageQuery) -> Memory:
        return self._measured_memories.memoize(query, lambda: self._memory(query))

    def on_layout(self, query: StageQuery) -> LayoutCosts:
        return QueriedLayoutCosts(self, query)

    def bytes_of_choices(self, query: StageQuery, choices: ChoiceTable) -> BytesColumns:
        return QueryLoop.bytes_of_choices(self, query, choices)

    def refit_seconds(self, move: RefitQuery) -> Cost:
        """Return the seconds of a refit. For an engine that was timed it is one of the rank's own copy; the load from
        there is a part of generation."""
        is_loaded = move.generates and self._load_seconds(move.model, move.target) is not None
        cost = super().refit_seconds(replace(move, generates=False) if is_loaded else move)
        return _corrected_cost(cost, self._table, Traffic.REFIT)

    def seconds_of_refits(self, refits: RefitTable) -> FloatArray:
        seconds = super().seconds_of_refits(refits)
        if refits.generates and self._timings:
            in_place = super().seconds_of_refits(replace(refits, generates=False))
            is_loaded = [self._load_seconds(refits.model, target.layout) is not None for target in refits.targets]
            seconds = np.where(np.array(is_loaded)[refits.target_index], in_place, seconds)
        return self._table.corrected(Traffic.REFIT, seconds)

    def transfer_seconds(self, num_bytes: float) -> Cost:
        return _corrected_cost(super().transfer_seconds(num_bytes), self._table, Traffic.TRANSFER)

    def has_mixed_batches(self, query: StageQuery) -> bool:
        """Return True if the rounds of an engine in its own process were timed for this shard of the model."""
        return self._timings is not None and self._timings.has_rounds_of(shape_of(query.model, query.layout.tp))

    def _load_seconds(self, model: ModelSpec, target: Layout) -> float | None:
        """Return the measured seconds in which the engine takes all weights; None if not measured."""
        if not self._timings or target.pp > 1:
            return None
        return self._timings.load_seconds(shape_of(model, target.tp), model.num_layers)

    def _new_generation(self, query: StageQuery) -> Generation:
        generation = super()._new_generation(query)
        if not self.has_mixed_batches(query):
            return generation
        return replace(  # timed rounds have in them what the engine's host and collectives add
            generation,
            groups=replace(generation.groups, tensor=Group(1, 1)),
            framework=generation.framework.model_copy(update={"round_seconds": 0.0, "row_seconds": 0.0}),
            has_mixed_batches=True,
        )

    def _generation_seconds(self, query: StageQuery) -> Cost:
        cost, load = super()._generation_seconds(query), self._load_seconds(query.model, query.layout)
        return cost if load is None else cost + Cost((Term(ENGINE_LOAD, load, Source.MEASURED),))

    def _sleep_rates(self) -> tuple[EngineSleep | None, Source]:
        if self._timings and self._timings.sleep:
            return self._timings.sleep, Source.MEASURED
        return super()._sleep_rates()

    def _make_network(self, peer_reductions: bool) -> Network:
        if self._table.has_correction(Traffic.COLLECTIVE):
            return _CorrectedNetwork(self._cluster, self._efficiency, self._table, peer_reductions=peer_reductions)
        return super()._make_network(peer_reductions)

    def _memory(self, query: StageQuery) -> Memory:
        key = (query.model, query.layout.tp)
        if key not in self._peaks:
            self._peaks[key] = Peaks(self._table, *key)
        return with_peaks(super().memory(query), query, self._workload, self._peaks[key])


def cost_model(
    cluster: AnyCluster,
    workload: Workload,
    precision: str,
    table: Table | None = None,
    engine: EngineName | None = None,
) -> CostModel:
    """Return the best cost model for the facts: blended with a table, analytic without.

    Without `engine`, generation uses the engine that the table timed, or this project's eager engine. On a mixed
    cluster the table applies to the parts with its device. Raises BadInput if the table is of another device or
    precision.
    """
    engine_facts = engine_named(engine) if engine else None
    if isinstance(cluster, MixedCluster):
        table_device = table.provenance.device if table else None
        fits_no_part = all(
            part.device.name != table_device for part in cluster.parts
        )  # then every part gets the table, and refuses it
        tables = [table if fits_no_part or part.device.name == table_device else None for part in cluster.parts]

        def model_on(part: Cluster, part_table: Table | None) -> CostModel:
            return cost_model(part, workload, precision, part_table, engine)

        pairs = [
            PairModel(
                (
                    model_on(homogeneous_cluster(one, other, cluster.between), one_table),
                    model_on(homogeneous_cluster(other, one, cluster.between), other_table),
                ),
                (one.num_ranks, other.num_ranks),
                workload,
            )
            for (one, one_table), (other, other_table) in pairwise(zip(cluster.parts, tables, strict=True))
        ]
        models = [model_on(*one) for one in zip(cluster.parts, tables, strict=True)]
        return MixedModel(cluster, models, pairs, precision, engine_facts)
    if table is None:
        return AnalyticModel(cluster, workload, precision, engine=engine_facts)
    return BlendedModel(table, cluster, workload, precision, engine)


class _BlendedShard(Shard):
    def __init__(self, measured: MeasuredShard, analytic: AnalyticShard) -> None:
        self._measured, self._analytic = measured, analytic

    def time(self, timed_pass: TimedPass, rows: float, tokens: float, context: float = 0) -> PassSeconds[float]:
        return self._shard_for(timed_pass).time(timed_pass, rows, tokens, context)

    def each(self, timed_pass: TimedPass, passes: PassColumns) -> PassSeconds[FloatArray]:
        return self._shard_for(timed_pass).each(timed_pass, passes)

    def total(self, timed_pass: TimedPass, passes: Passes) -> PassSeconds[float]:
        return self._shard_for(timed_pass).total(timed_pass, passes)

    def _shard_for(self, timed_pass: TimedPass) -> Shard:
        return self._measured if self._measured.covers(timed_pass) else self._analytic


def _corrected(shard: Shard, table: Table, shape: Shape, engine: EngineName | None = None) -> Shard:
    """Return the shard with the table's corrections for its shape; the same shard if they change nothing.

    `engine` is the engine in its own process that runs it, if one does.
    """
    factors = {timed_pass: factor for timed_pass, factor in table.factors(shape, engine).items() if factor != 1}
    return _CorrectedShard(shard, factors) if factors else shard


class _CorrectedShard(Shard):
    """Times of a shard multiplied by a factor for each kind of pass; they no longer count as measured."""

    def __init__(self, shard: Shard, factors: Mapping[TimedPass, float]) -> None:
        self._shard, self._factors = shard, factors

    def time(self, timed_pass: TimedPass, rows: float, tokens: float, context: float = 0) -> PassSeconds[float]:
        time = self._shard.time(timed_pass, rows, tokens, context)
        if timed_pass not in self._factors:
            return time
        factor = self._factors[timed_pass]
        return PassSeconds(time.layer * factor, time.ends * factor, least_trusted([time.source, Source.INTERPOLATED]))

    def each(self, timed_pass: TimedPass, passes: PassColumns) -> PassSeconds[FloatArray]:
        times = self._shard.each(timed_pass, passes)
        if timed_pass not in self._factors:
            return times
        factor = self._factors[timed_pass]
        return PassSeconds(
            times.layer * factor, times.ends * factor, least_trusted([times.source, Source.INTERPOLATED])
        )


class _CorrectedNetwork(Network):
    """Collective times with the table's corrections."""

    def __init__(self, cluster: Cluster, efficiency: Efficiency, table: Table, *, peer_reductions: bool) -> None:
        super().__init__(cluster, efficiency, table.collectives, peer_reductions=peer_reductions)
        self._table = table

    def _time_function(self, operation: str, group: Group[float]) -> SecondsByBytes:
        seconds_by_bytes = super()._time_function(operation, group)

        def corrected(num_bytes: float) -> tuple[float, Source]:
            seconds, source = seconds_by_bytes(num_bytes)
            if not seconds:
                return seconds, source
            return self._table.corrected(Traffic.COLLECTIVE, seconds), least_trusted([source, Source.INTERPOLATED])

        return corrected

    def _columns(self, operation: str, group: Group[FloatArray], num_bytes: FloatArray) -> tuple[FloatArray, Source]:
        seconds, source = super()._columns(operation, group, num_bytes)
        corrected = self._table.corrected(Traffic.COLLECTIVE, seconds)
        return np.where(seconds > 0, corrected, 0.0), least_trusted([source, Source.INTERPOLATED])


def _corrected_cost(cost: Cost, table: Table, traffic: Traffic) -> Cost:
    """Return the cost with the table's corrections; the same cost if they change nothing."""
    if not table.has_correction(traffic):
        return cost
    beyond = table.corrected(traffic, 0.0)
    factor = table.corrected(traffic, 1.0) - beyond
    terms = tuple(Term(t.name, t.amount * factor, least_trusted([t.source, Source.INTERPOLATED])) for t in cost.terms)
    return Cost((*terms, Term("unpredicted transfer time", beyond, Source.INTERPOLATED)) if beyond else terms)
