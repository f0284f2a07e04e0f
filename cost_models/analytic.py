"""The cost model that needs no measurement: datasheets and efficiencies, put into equations.

It combines the times of a shard, the collectives and the schedule into the cost of a stage. What the costs of several
choices have in common (length strata, rounds of generation, times of a shard) is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from meshwright.cost_models import communication
from meshwright.cost_models.communication import Groups, Network, groups_of
from meshwright.cost_models.compute import AnalyticShard, Pass, PassColumns, Shard
from meshwright.cost_models.cost import Cost, Memory, Source, Tally, TermSums, cost_of, least_trusted
from meshwright.cost_models.generation_cost import ENGINE_SLEEP, ENGINE_WAKE, Generation, Work, generation_work
from meshwright.cost_models.image_costs import IMAGE_ENCODER
from meshwright.cost_models.kernels import element_bytes
from meshwright.cost_models.lower_bounds import (
    RoundKinds,
    generation_lower_bound,
    rank_seconds_lower_bound,
    round_kinds,
)
from meshwright.cost_models.memory_cost import LayoutMemory, Operators, bytes_of_choices
from meshwright.cost_models.micro_batches import (
    ChunkFunction,
    ChunkShard,
    ContextShard,
    MicroBatchCache,
    MicroBatches,
    StreamingCache,
    all_chunks,
    context_parallel_batches,
    last_chunks,
)
from meshwright.cost_models.params import ShardedModel, sharded, sharded_by_each
from meshwright.cost_models.pipeline import BatchCompute, Pipeline, PipelineCosts, RankCompute, Updates, step_addends
from meshwright.cost_models.protocol import (
    Bytes,
    BytesColumns,
    LayoutCosts,
    Memo,
    QueriedLayoutCosts,
    QueryLoop,
    RefitQuery,
    RefitTable,
    SecondsColumns,
    StageQuery,
    queries_of,
)
from meshwright.cost_models.rollout_cost import Replica, RolloutCosts
from meshwright.cost_models.rounds import replica_responses
from meshwright.cost_models.steady_state import Overlap, SteadyState
from meshwright.profiles.choice_table import ChoiceTable, LayoutColumns, PassSettings, ScheduleTable
from meshwright.profiles.efficiency import Efficiency, efficiency_of
from meshwright.profiles.elementwise import BoolArray, FloatArray, IntArray, N, sum_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import EAGER, Engine, EngineSleep, Framework, engine_named, own_framework
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.packing import rows_per_prompt
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.speculation import DraftRound
from meshwright.profiles.stages import Stage
from meshwright.profiles.table import Table, TimedPass
from meshwright.profiles.workload import Workload

_MAX_CACHED_WORKLOADS = 8
"""Number of workloads whose batch splits are cached."""

ShardFactory: TypeAlias = Callable[[ModelSpec, int, AnalyticShard, bool], Shard]
"""A function that returns the times of one tensor-parallel shard of a model.

Arguments: the model, tp, the analytic times of the shard, and whether a separate generation engine runs it.
"""


_TableKey: TypeAlias = tuple[RankCompute, bool, int, ScheduleTable, ChunkFunction]
"""All that the compute of a table of schedules depends on: what a rank computes, whether it trains, the rows of a
replica, the table, and which chunks are read."""


class TablePasses(NamedTuple):
    """The passes of every way in which a table's schedules split a batch, one way after another.

    `columns` are the fields of `PassColumns`, [4, passes]; `sizes` are the numbers of passes of each way, and
    `is_streamed` is true where chunks are read, both [ways].
    """

    columns: FloatArray
    sizes: IntArray
    is_streamed: BoolArray


class WorkloadSplits(NamedTuple):
    """The split of one workload's rows, independent of the model: micro-batches, streamed chunks, periods of
    generation, and multi-turn rollouts if the workload has turns.

    `generation_works` is keyed by rows, slots, overlap, pipeline stages, rows of a prompt, the maximum tokens of a
    prefill, the tokens of a draft, and whether they are verified together; `tables` by the table, the rows of a
    replica, cp, and which chunks are read.
    """

    batches: MicroBatchCache
    streams: StreamingCache
    periods: SteadyState
    generation_works: Memo[tuple[int, int, Overlap, int, float, int | None, int, bool], Work]
    tables: Memo[tuple[ScheduleTable, int, int, ChunkFunction], TablePasses]
    rollouts: RolloutCosts | None

    @classmethod
    @lru_cache(maxsize=_MAX_CACHED_WORKLOADS)
    def for_workload(cls, workload: Workload) -> WorkloadSplits:
        """Return the split, which all cost models of a workload share; nothing is computed until it is used."""
        rollouts = RolloutCosts(workload) if workload.turns else None
        return cls(
            MicroBatchCache(workload.sequence_lengths),
            StreamingCache(workload),
            SteadyState(workload),
            Memo(),
            Memo(),
            rollouts,
        )

    def passes_of_table(self, table: ScheduleTable, num_rows: int, cp: int, chunks_of: ChunkFunction) -> TablePasses:
        """Return the passes of a table's ways to split `num_rows` rows, on one of `cp` context-parallel ranks.

        For a schedule that streams, `chunks_of` selects all chunks or only the last ones.
        """

        def make() -> TablePasses:
            each = [np.array(self._passes(split, num_rows, cp, chunks_of)) for split in table.batch_splits]
            return TablePasses(
                np.concatenate(each).T,
                np.array([len(passes) for passes in each]),
                np.array([split.chunk_tokens > 0 for split in table.batch_splits]),
            )

        return self.tables.memoize((table, num_rows, cp, chunks_of), make)

    def _passes(self, split: Schedule, num_rows: int, cp: int, chunks_of: ChunkFunction) -> list[Pass]:
        """Return the passes of one way to split a batch."""
        size, width = split.micro_batch_size, split.chunk_tokens
        if width:
            batches, contexts = self.streams.passes(chunks_of, num_rows, size, width)
            return [(*batch, contexts[batch.tokens]) for batch in batches]
        batches = context_parallel_batches(self.batches.micro_batches(num_rows, size, split.micro_batch_tokens), cp)
        return [(*batch, 0.0) for batch in batches]


class AnalyticModel(QueryLoop):
    """A cost model for one cluster, workload and precision; of this project's runtime unless a `framework` is given.

    `make_shard` may replace the analytic times of a shard, `efficiency` the constants of the device's family. Without
    an `engine` the framework itself generates, or meshwright-eager where neither is named. `linear_format` is the
    number format of the linears of layers in training, if it differs from `precision`.
    """

    seconds_are_monotone = True

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        precision: str,
        *,
        table: Table | None = None,
        make_shard: ShardFactory | None = None,
        framework: Framework | None = None,
        engine: Engine | None = None,
        efficiency: Efficiency | None = None,
        linear_format: str | None = None,
    ) -> None:
        self._cluster, self._workload, self._precision = cluster, workload, precision
        self._linear_format = linear_format
        self._size = element_bytes(precision)
        self._efficiency = efficiency or efficiency_of(cluster.device.kind, cluster.device.name)
        self._make_shard, self._framework = make_shard, framework or own_framework(cluster.device.kind)
        trainer = self._framework
        self._operators = Operators(
            cluster.device.kind == "cuda",
            not trainer.flash_attention,
            trainer.logit_bytes,
            frees_windows=engine is not None and engine.frees_windows,
            latent_copies=(engine or engine_named(EAGER)).latent_copies,
            process_bytes=engine.process_bytes if engine and cluster.device.kind == "cpu" else 0.0,
            delta_by_torch=framework is None,
        )
        self._engine = engine
        self._verifies_together = engine is not None and engine.verifies_together
        generates = engine or (None if framework else engine_named(EAGER))
        self._generation_framework = generates.framework_on(cluster.device.kind) if generates else self._framework
        self._has_own_engine = self._generation_framework is not self._framework
        self._collectives = table.collectives if table else ()
        self._networks: Memo[bool, Network] = Memo()
        self._splits = WorkloadSplits.for_workload(workload)
        self._costs: Memo[StageQuery, Cost] = Memo()
        self._memories: Memo[StageQuery, Memory] = Memo()
        self._layout_memories: Memo[tuple[str, ModelSpec, Layout], LayoutMemory] = Memo()
        self._layout_costs: Memo[tuple[str, ModelSpec, Layout, int], PipelineCosts] = Memo()
        self._generations: Memo[tuple[ModelSpec, Layout], Generation] = Memo()
        self._generation_bounds: Memo[tuple[ModelSpec, Layout, float, int, int, DraftRound], float] = Memo()
        self._round_kinds: Memo[tuple[Shard, float], RoundKinds] = Memo()
        self._decoded_tokens: Memo[tuple[int, bool], tuple[float, int]] = Memo()
        self._table_computes: dict[_TableKey, FloatArray] = {}
        self._rank_computes: Memo[tuple[ModelSpec, int, bool, int, int, int], RankCompute] = Memo()
        self._batch_computes: Memo[
            tuple[RankCompute, ChunkFunction | Recompute, bool, int, int, int], BatchCompute[float]
        ] = Memo()
        self._layout_groups: Memo[Layout, Groups[float]] = Memo()
        self._shard_pairs: Memo[tuple[ModelSpec, int, bool, int, int, bool, bool], tuple[Shard, AnalyticShard]] = Memo()
        self._image_times: Memo[tuple[ModelSpec, bool, bool], float] = Memo()
        self._distribution_times: Memo[tuple[ModelSpec, bool], float] = Memo()
        self._batches: Memo[tuple[int, int, int, int], tuple[MicroBatches, ...]] = Memo()

    def lower_bound_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        """A bound from arithmetic alone; 0 if times are measured.

        Some devices exceed their datasheet's peak, and the bound is lowered by that factor.
        """
        del part  # all nodes are of one kind
        if not self.seconds_are_monotone:
            return 0.0
        rank_seconds = rank_seconds_lower_bound(stage, model, self._cluster, self._workload, self._precision)
        return rank_seconds / num_ranks / max(1.0, self._efficiency.gemm.flops)

    def generation_lower_bound(self, query: StageQuery) -> float:
        """A bound from the fewest possible rounds; 0 if times are measured."""
        if not self.seconds_are_monotone:
            return 0.0
        replica, overlap = self._replica(query)
        generation, num_rows, num_slots = self._generation(query), replica.num_rows, replica.num_slots
        if self._splits.rollouts:
            rollouts = self._splits.rollouts.with_batches_in_flight(overlap.batches_in_flight)
            return rollouts.lower_bound_seconds(generation, replica, kinds_of=self._kinds_of_rounds)
        decoded, longest = self._decoded(num_rows, overlap.in_flight(num_rows) > num_rows)
        draft_round = self._workload.draft_round(query.schedule.draft_tokens)
        return self._generation_bounds.memoize(
            (query.model, query.layout, decoded, num_slots, longest, draft_round),
            lambda: generation_lower_bound(
                generation,
                decoded,
                num_slots,
                num_slots,
                longest,
                kinds_of=self._kinds_of_rounds,
                draft_round=draft_round,
            ),
        )

    def _kinds_of_rounds(self, shard: Shard, max_rows: float) -> RoundKinds:
        return self._round_kinds.memoize((shard, max_rows), lambda: round_kinds(shard, max_rows))

    def _decoded(self, num_rows: int, crosses_periods: bool) -> tuple[float, int]:
        """Return the fewest tokens that a replica of `num_rows` rows decodes in a period, and the fewest rounds.

        A period need not last as long as its longest response if a sequence may cross periods.
        """

        def make() -> tuple[float, int]:
            responses = replica_responses(self._workload.response_lengths, self._workload.batch_size, num_rows)
            num_tokens, longest = float(responses.sum()), int(responses[-1]) - 1
            if crosses_periods:
                num_tokens, longest = min(num_tokens, num_rows * self._workload.response_lengths.mean), 0
            return num_tokens - num_rows, longest

        return self._decoded_tokens.memoize((num_rows, crosses_periods), make)

    def with_row_split(self, query: StageQuery) -> Schedule:
        """Return the schedule unchanged: all nodes are of one kind."""
        return query.schedule

    def seconds(self, query: StageQuery) -> Cost:
        """Return the seconds of one step. Raises BadInput for a layout that does not divide the model."""
        return self._costs.memoize(query, lambda: self._seconds(query))

    def tail_seconds(self, query: StageQuery) -> float:
        if not query.schedule.chunk_tokens:
            return self.seconds(query).total
        return self._pipeline_costs(query).tail_seconds(query.schedule)

    def memory(self, query: StageQuery) -> Memory:
        return self._memories.memoize(query, lambda: self._layout_memory(query).memory(query.schedule))

    def last_stage_memory(self, query: StageQuery) -> Memory:
        """Return the memory of the last pipeline stage, which is not always the fullest."""
        return self._layout_memory(query).of_stages(query.schedule)[-1]

    def _layout_memory(self, query: StageQuery) -> LayoutMemory:
        """Return the memory model, which every schedule of a layout shares."""
        return self._layout_memories.memoize(
            (query.stage.name, query.model, query.layout),
            lambda: LayoutMemory(
                query.stage,
                query.model,
                query.layout,
                self._workload,
                element_bytes=self._size,
                operators=self._operators,
            ),
        )

    def seconds_of_choices(self, query: StageQuery, choices: ChoiceTable) -> SecondsColumns:
        if query.stage.generates:
            return super().seconds_of_choices(query, choices)
        shards, groups = sharded_by_each(query.model, choices.layout), groups_of(choices.layout, self._cluster)
        pipeline = self._pipeline(query, shards, groups, choices)
        layouts = [replace(query, layout=layout) for layout in choices.layouts]
        compute = BatchCompute(
            *choices.gather_by_schedule(self._compute_of_tables(layouts, choices.tables, all_chunks))
        )
        num_rows = choices.layout.expand_to_choices([[self._rows(one)] for one in layouts])[0]
        addends = step_addends(pipeline, compute, self._updates_of_each(query, choices.layout, layouts), num_rows)
        seconds = sum_of([amount for _, amount, _ in addends])
        for offload in choices.offloads:
            extra = self._offload_seconds(query.stage, shards, offload)
            seconds = seconds + np.where(choices.has_offload(offload), extra.total, 0.0)
        is_streamed = choices.chunk_tokens > 0
        if not is_streamed.any():
            return SecondsColumns(seconds, seconds)
        last = BatchCompute(*choices.gather_by_schedule(self._compute_of_tables(layouts, choices.tables, last_chunks)))
        tail_seconds = sum_of([amount for _, amount, _ in pipeline.addends(last)])
        return SecondsColumns(seconds, np.where(is_streamed, np.minimum(tail_seconds, seconds), seconds))

    def bytes_of_choices(self, query: StageQuery, choices: ChoiceTable) -> BytesColumns:
        if query.stage.generates:
            rows = [self._layout_memory(one).bytes(one.schedule) for one in queries_of(query, choices)]
            return BytesColumns(*np.array(rows, dtype=np.float64).reshape(-1, len(Bytes._fields)).T)
        shards = sharded_by_each(query.model, choices.layout)
        return bytes_of_choices(
            query.stage, shards, choices, self._workload, element_bytes=self._size, operators=self._operators
        )

    def _compute_of_tables(
        self, layouts: Sequence[StageQuery], tables: Sequence[ScheduleTable], chunks_of: ChunkFunction
    ) -> list[FloatArray]:
        """Return the amounts of `BatchCompute` on each layout for each schedule of its table, [amounts, schedules].

        For a schedule that streams, `chunks_of` selects all chunks or only the last ones. Layouts whose ranks compute
        the same on equally many rows are costed once; layouts that are not cached yet are costed together if they have
        the same shard.
        """
        keys = [
            (self._rank_compute(layout), layout.stage.trains, self._rows(layout), table, chunks_of)
            for layout, table in zip(layouts, tables, strict=True)
        ]
        new_keys: dict[RankCompute, dict[_TableKey, StageQuery]] = {}
        for key, layout in zip(keys, layouts, strict=True):
            if key not in self._table_computes:
                new_keys.setdefault(key[0], {})[key] = layout
        for rank_compute, layouts_by_key in new_keys.items():
            self._table_computes.update(self._new_tables(rank_compute, layouts_by_key))
        return [self._table_computes[key] for key in keys]

    def _new_tables(
        self, rank_compute: RankCompute, layouts: Mapping[_TableKey, StageQuery]
    ) -> Iterator[tuple[_TableKey, FloatArray]]:
        """Yield the key and the amounts, [amounts, schedules], of each table that is not cached yet.

        The ranks of all these layouts compute the same.
        """
        all_passes = [
            self._splits.passes_of_table(table, rows, layout.layout.cp, chunks_of)
            for (_, _, rows, table, chunks_of), layout in layouts.items()
        ]
        trains = next(iter(layouts))[1]
        passes = PassColumns(*np.concatenate([of_table.columns for of_table in all_passes], axis=1))
        sizes = np.concatenate([of_table.sizes for of_table in all_passes])
        is_streamed = np.concatenate([of_table.is_streamed for of_table in all_passes])
        chunked = RankCompute(ChunkShard(rank_compute.shard, rank_compute.analytic, {}), rank_compute.analytic)
        amounts, streams = np.zeros((6, len(sizes))), np.repeat(is_streamed, sizes)
        for is_chosen, is_chosen_pass, compute in (
            (~is_streamed, ~streams, rank_compute),
            (is_streamed, streams, chunked),
        ):
            if is_chosen.any():
                chosen = PassColumns(*(column[is_chosen_pass] for column in passes))
                amounts[:, is_chosen] = compute.compute_of_each(chosen, sizes[is_chosen], trains=trains)
        first = 0
        for key in layouts:
            table = key[3]
            of_schedules = amounts[:, first + table.batch_split_index]
            first += len(table.batch_splits)
            whole, attention = table.columns.is_recomputed, table.columns.is_attention_recomputed
            # rows 4 and 5 of `compute_of_each`: recomputing whole layers, and core attention alone
            recompute = whole * of_schedules[4] + attention * of_schedules[5]
            yield key, np.concatenate([of_schedules[:4], recompute[np.newaxis]])

    def _updates_of_each(
        self, query: StageQuery, layout: LayoutColumns, layouts: Sequence[StageQuery]
    ) -> Updates[FloatArray]:
        """Return the updates of a stage on each choice's layout."""
        each = [self._updates(one) for one in layouts]
        layer, ends = layout.expand_to_choices([(updates.layer, updates.ends) for updates in each])
        return Updates(self._num_updates(query.stage), layer, ends, least_trusted(one.source for one in each))

    def on_layout(self, query: StageQuery) -> LayoutCosts:
        if query.stage.generates:
            return QueriedLayoutCosts(self, query)
        return self._pipeline_costs(query)

    def refit_seconds(self, move: RefitQuery) -> Cost:
        return communication.refit_seconds(
            move, self._cluster, self._efficiency, self._size, trainer=self._framework, engine=self._engine
        )

    def seconds_of_refits(self, refits: RefitTable) -> FloatArray:
        return communication.seconds_of_refits(
            refits, self._cluster, self._efficiency, self._size, trainer=self._framework, engine=self._engine
        )

    def transfer_seconds(self, num_bytes: float) -> Cost:
        return communication.experience_seconds(num_bytes, self._cluster, self._efficiency)

    def _seconds(self, query: StageQuery) -> Cost:
        if not query.stage.generates:
            return cost_of(self._pipeline_costs(query).addends(query.schedule))
        if query.schedule.offload is not Offload.NONE:
            without_offload = replace(query, schedule=replace(query.schedule, offload=Offload.NONE))
            shards = sharded(query.model, query.layout)
            offload = self._offload_seconds(query.stage, shards, query.schedule.offload)
            return self.seconds(without_offload) + cost_of(offload.addends)
        return self._generation_seconds(query)

    def _pipeline_costs(self, query: StageQuery) -> PipelineCosts:
        key = query.stage.name, query.model, query.layout, query.replica_rows
        return self._layout_costs.memoize(key, lambda: self._make_pipeline_costs(query))

    def _make_pipeline_costs(self, query: StageQuery) -> PipelineCosts:
        rank_compute, rows = self._rank_compute(query), self._rows(query)
        shards, groups = sharded(query.model, query.layout), self._groups(query.layout)
        return PipelineCosts(
            num_rows=rows,
            updates=self._updates(query),
            pipeline_of=lambda schedule: self._pipeline(query, shards, groups, schedule),
            compute_of=lambda schedule: self._compute_of(query, rank_compute, rows, schedule),
            tail_of=lambda schedule: self._streamed(query.stage, rank_compute, rows, schedule, last_chunks),
            offload_addends=lambda offload: self._offload_seconds(query.stage, shards, offload).addends,
            memory=self._layout_memory(query),
        )

    def _compute_of(
        self, query: StageQuery, rank_compute: RankCompute, rows: int, schedule: Schedule
    ) -> BatchCompute[float]:
        """Return the compute of one pass over `rows` rows."""
        if schedule.chunk_tokens:
            return self._streamed(query.stage, rank_compute, rows, schedule, all_chunks)
        recompute, at_a_time = schedule.recompute, (schedule.micro_batch_size, schedule.micro_batch_tokens)
        trains = query.stage.trains
        return self._batch_computes.memoize(
            (rank_compute, recompute, trains, rows, *at_a_time),
            lambda: rank_compute.batch_compute(
                self._micro_batches(rows, schedule, query.layout.cp), recompute, trains=trains
            ),
        )

    def _updates(self, query: StageQuery) -> Updates[float]:
        """Return the optimizer updates of the query's stage in one step."""
        time = self._rank_compute(query).shard.time(TimedPass.OPTIMIZER, 0, 0)
        return Updates(self._num_updates(query.stage), time.layer, time.ends, time.source)

    def _num_updates(self, stage: Stage) -> int:
        return self._workload.num_minibatches * self._workload.num_epochs if stage.trains else 0

    def _rows(self, query: StageQuery) -> int:
        """Return the rows of one replica: of a batch, or of a minibatch if the stage trains."""
        workload = self._workload
        parts = query.layout.dp * (workload.num_minibatches if query.stage.trains else 1)
        return query.replica_rows or -(-workload.batch_size // parts)

    def _offload_seconds(self, stage: Stage, shards: ShardedModel[N], offload: Offload) -> TermSums[N]:
        return communication.offload_seconds(
            stage, shards, offload, cluster=self._cluster, efficiency=self._efficiency, element_bytes=self._size
        )

    def _sleep_seconds(self, query: StageQuery) -> Cost:
        """Return the seconds in which an engine in its own process takes its cache and frees it: bytes / rate."""
        (rates, source), tally = self._sleep_rates(), Tally()
        if rates and self._operators.process_bytes:
            num_bytes = self._layout_memory(query).kv_cache_bytes(query.schedule)
            tally.add(ENGINE_WAKE, num_bytes / rates.taken_bytes_per_second, source)
            tally.add(ENGINE_SLEEP, num_bytes / rates.freed_bytes_per_second, source)
        return tally.cost()

    def _sleep_rates(self) -> tuple[EngineSleep | None, Source]:
        """Return the rates at which the engine frees its cache and takes it again, with their source."""
        return self._engine.sleep if self._engine else None, Source.ANALYTIC

    def _generation_seconds(self, query: StageQuery) -> Cost:
        replica, overlap = self._replica(query)
        num_rows, num_slots, pp, same_prompt, _ = replica
        max_prefill_tokens, draft_tokens = self._generation_framework.max_tokens, query.schedule.draft_tokens

        def work() -> Work:
            rounds = self._splits.periods.rounds(num_rows, num_slots, overlap)
            draft_round = self._workload.draft_round(draft_tokens)
            return generation_work(
                rounds,
                num_slots,
                pp,
                same_prompt,
                max_tokens=max_prefill_tokens,
                draft_round=draft_round,
                verifies_together=self._verifies_together,
            )

        generation = self._generation(query)
        if self._splits.rollouts:
            rollouts = self._splits.rollouts.with_batches_in_flight(overlap.batches_in_flight)
            cost = rollouts.seconds(generation, replica)
        else:
            key = (
                num_rows,
                num_slots,
                overlap,
                pp,
                same_prompt,
                max_prefill_tokens,
                draft_tokens,
                self._verifies_together,
            )
            cost = generation.seconds(self._splits.generation_works.memoize(key, work))
        need = self._workload.cache_need(query.schedule, query.layout.dp)
        if need.preemptions:
            mean_prompt = self._workload.prompt_lengths.mean
            cost += generation.preemption(need.preemptions, need.preempted_tokens, mean_prompt)
        cost += self._sleep_seconds(query) + self._encoding_seconds(query, replica)
        num_in_flight = 0 if self._splits.rollouts else min(overlap.in_flight(num_rows) - num_rows, num_slots)
        if not (query.recomputes_cache and num_in_flight):
            return cost
        return cost + generation.recomputation(num_in_flight, self._tokens_in_flight(), min(pp, num_slots))

    def _encoding_seconds(self, query: StageQuery, replica: Replica) -> Cost:
        """Return the seconds of encoding the images of a replica's prompts, once for all rows of a prompt."""
        tally = Tally()
        tally.add(IMAGE_ENCODER, replica.num_rows / replica.rows_per_prompt * self._image_seconds(query))
        return tally.cost()

    def _replica(self, query: StageQuery) -> tuple[Replica, Overlap]:
        """Return the fullest replica and how its batches overlap. Raises BadInput if there are no slots."""
        layout, schedule, batch_size = query.layout, query.schedule, self._workload.batch_size
        num_rows, slots = -(-batch_size // layout.dp), schedule.generation_slots
        if slots < 1:
            raise BadInput(f"{query.stage.name}: generation_slots=0 generates nothing; use 1 or more.")
        overlap = self._overlap(query, num_rows)
        num_slots = min(slots, overlap.in_flight(num_rows))
        same_prompt = rows_per_prompt(batch_size, self._workload.group_size, layout.dp)
        return Replica(num_rows, num_slots, layout.pp, same_prompt, schedule.while_waiting), overlap

    def _tokens_in_flight(self) -> float:
        """Return the mean number of tokens of a sequence in flight."""
        return self._workload.prompt_lengths.mean + self._workload.response_lengths.mean_tokens_in_flight

    def _generation(self, query: StageQuery) -> Generation:
        """Return the generation model, which every schedule of a layout shares."""

        return self._generations.memoize((query.model, query.layout), lambda: self._new_generation(query))

    def _new_generation(self, query: StageQuery) -> Generation:
        return Generation(
            query=query,
            shard=self._shards(query)[0],
            groups=self._groups(query.layout),
            network=self._network(self._generation_framework),
            element_bytes=self._size,
            framework=self._generation_framework,
        )

    def _overlap(self, query: StageQuery, num_rows: int) -> Overlap:
        """Return how one replica's batches overlap. Raises BadInput for an overcommit without deferral, or above
        the batch size."""
        schedule, batch_size = query.schedule, self._workload.batch_size
        if schedule.overcommit and query.max_deferral < 1:
            raise BadInput(
                f"{query.stage.name}: overcommit={schedule.overcommit} with max_deferral={query.max_deferral} defers "
                "nothing; allow a staleness of 1 or more beyond the steps that the stage works ahead."
            )
        if schedule.overcommit > batch_size:
            raise BadInput(
                f"{query.stage.name}: overcommit={schedule.overcommit} is more than the {batch_size} sequences of a "
                "batch, so that not all could be delivered when due; use the batch size at most."
            )
        return Overlap.of(schedule, query.layout.dp, num_rows, query.max_deferral)

    def _streamed(
        self, stage: Stage, rank_compute: RankCompute, num_rows: int, schedule: Schedule, chunks_of: ChunkFunction
    ) -> BatchCompute[float]:
        """Return the compute of the prompts and all chunks, or of the last chunks alone.

        Raises BadInput for a stage that cannot stream.
        """
        size, width = schedule.micro_batch_size, schedule.chunk_tokens
        if not stage.may_stream:
            raise BadInput(f"{stage.name}: chunk_tokens={width}, and it does not read what is being generated; use 0.")

        def make() -> BatchCompute[float]:
            batches, contexts = self._splits.streams.passes(chunks_of, num_rows, size, width)
            chunk_shard = ChunkShard(rank_compute.shard, rank_compute.analytic, contexts)
            return RankCompute(chunk_shard, rank_compute.analytic).batch_compute(
                batches, schedule.recompute, trains=stage.trains
            )

        return self._batch_computes.memoize((rank_compute, chunks_of, stage.trains, num_rows, size, width), make)

    def _pipeline(
        self, query: StageQuery, shards: ShardedModel[N], groups: Groups[N], settings: PassSettings[N]
    ) -> Pipeline[N]:
        return Pipeline(
            stage=query.stage,
            shards=shards,
            settings=settings,
            groups=groups,
            network=self._network(self._framework),
            element_bytes=self._size,
            framework=self._framework,
            image_seconds=self._image_seconds(query),
            distribution_seconds=self._distribution_seconds(query),
        )

    def _image_seconds(self, query: StageQuery) -> float:
        """Return the mean seconds of encoding the images of a prompt, which neither layout nor schedule changes."""
        images = self._workload.images
        if not images:
            return 0.0
        key = query.model, query.stage.generates, query.stage.is_quantised
        return self._image_times.memoize(key, lambda: self._shards(query)[1].image_seconds(images))

    def _distribution_seconds(self, query: StageQuery) -> float:
        """Return the mean seconds of the distributions over a row's response, on a rank with the whole vocabulary."""
        stage = query.stage
        if not stage.top_tokens:
            return 0.0

        def of_prediction() -> float:
            whole = self._shards(replace(query, layout=Layout()))[1]
            return whole.distribution_seconds(trains=stage.trains)

        per_token = self._distribution_times.memoize((query.model, stage.trains), of_prediction)
        return stage.num_distributions * self._workload.response_lengths.mean * per_token

    def _network(self, framework: Framework) -> Network:
        """Return the collective times between ranks that run this framework."""
        peer_reductions = framework.peer_reductions
        return self._networks.memoize(peer_reductions, lambda: self._make_network(peer_reductions))

    def _make_network(self, peer_reductions: bool) -> Network:
        return Network(self._cluster, self._efficiency, self._collectives, peer_reductions=peer_reductions)

    def _groups(self, layout: Layout) -> Groups[float]:
        return self._layout_groups.memoize(layout, lambda: groups_of(layout, self._cluster))

    def _shards(self, query: StageQuery) -> tuple[Shard, AnalyticShard]:
        layout, quantised = query.layout, query.stage.is_quantised
        own_engine = query.stage.generates and (self._has_own_engine or quantised)
        return self._shard_pairs.memoize(
            (query.model, layout.tp, layout.sp, layout.ep, layout.etp, own_engine, quantised),
            lambda: self._make_shards(query.model, layout, own_engine, quantised),
        )

    def _rank_compute(self, query: StageQuery) -> RankCompute:
        """Return what one rank computes. Under context parallelism, measured times of whole sequences are adjusted."""
        layout = query.layout

        def make() -> RankCompute:
            shard, analytic = self._shards(query)
            is_whole = layout.cp == 1 or shard is analytic
            return RankCompute(shard if is_whole else ContextShard(shard, analytic, layout.cp), analytic)

        return self._rank_computes.memoize((query.model, layout.tp, layout.sp, layout.ep, layout.etp, layout.cp), make)

    def _make_shards(
        self, model: ModelSpec, layout: Layout, own_engine: bool, quantised: bool
    ) -> tuple[Shard, AnalyticShard]:
        tp = layout.tp
        analytic = AnalyticShard(
            model.shard(tp),
            self._cluster.device,
            self._precision,
            self._efficiency,
            1 / tp if layout.sp else 1.0,
            spread=layout.expert_replicas,
            folded=layout.fold_size,
            framework=self._generation_framework if own_engine else self._framework,
            is_quantised=quantised,
            linear_format=None if own_engine else self._linear_format,
        )
        return (self._make_shard(model, tp, analytic, own_engine) if self._make_shard else analytic), analytic

    def _micro_batches(self, num_rows: int, schedule: Schedule, cp: int) -> tuple[MicroBatches, ...]:
        key = num_rows, schedule.micro_batch_size, schedule.micro_batch_tokens
        whole = self._splits.batches.micro_batches(*key)
        return whole if cp == 1 else self._batches.memoize((*key, cp), lambda: context_parallel_batches(whole, cp))
