"""Costs of a judge that generates: its verdicts are a generation of their own, on sequences that are already sampled.

A judge decodes as many sequences at a time as its micro-batch has. Their cache is freed after each run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.cost_models.cost import Cost, Memory
from meshwright.cost_models.protocol import (
    BytesColumns,
    CostModel,
    DelegatingCostModel,
    LayoutCosts,
    QueriedLayoutCosts,
    QueryLoop,
    SecondsColumns,
    StageQuery,
)
from meshwright.profiles.choice_table import ChoiceTable
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Mode, Stage


@dataclass(frozen=True)
class JudgeModel(DelegatingCostModel):
    """The cost model of a step with a judge: that of its `verdicts` for the judge, that of the batch for other
    stages."""

    verdicts: CostModel

    def lower_bound_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        if not stage.judges:
            return super().lower_bound_seconds(stage, model, num_ranks, part)
        return self.verdicts.lower_bound_seconds(_generating(stage), model, num_ranks, part)

    def with_row_split(self, query: StageQuery) -> Schedule:
        if not query.stage.judges:
            return super().with_row_split(query)
        split = self.verdicts.with_row_split(_generation(query))
        return replace(query.schedule, rows=split.rows)

    def seconds(self, query: StageQuery) -> Cost:
        return self.verdicts.seconds(_generation(query)) if query.stage.judges else super().seconds(query)

    def tail_seconds(self, query: StageQuery) -> float:
        return self.seconds(query).total if query.stage.judges else super().tail_seconds(query)

    def memory(self, query: StageQuery) -> Memory:
        return self.verdicts.memory(_generation(query)) if query.stage.judges else super().memory(query)

    def on_layout(self, query: StageQuery) -> LayoutCosts:
        return QueriedLayoutCosts(self, query) if query.stage.judges else super().on_layout(query)

    def seconds_of_choices(self, query: StageQuery, choices: ChoiceTable) -> SecondsColumns:
        if query.stage.judges:
            return QueryLoop.seconds_of_choices(self, query, choices)
        return super().seconds_of_choices(query, choices)

    def bytes_of_choices(self, query: StageQuery, choices: ChoiceTable) -> BytesColumns:
        if query.stage.judges:
            return QueryLoop.bytes_of_choices(self, query, choices)
        return super().bytes_of_choices(query, choices)


def _generating(stage: Stage) -> Stage:
    return replace(stage, modes=(Mode.PREFILL, Mode.DECODE))


def _generation(query: StageQuery) -> StageQuery:
    """The judge's query as that of a generation with a slot for each sequence of a micro-batch."""
    schedule = Schedule(
        generation_slots=query.schedule.micro_batch_size, offload=query.schedule.offload, rows=query.schedule.rows
    )
    return replace(query, stage=_generating(query.stage), schedule=schedule)
