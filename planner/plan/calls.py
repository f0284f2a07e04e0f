"""The queries that a plan's choices make to a cost model, and the cost model of a job's facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.question import Call, CostModel
from meshwright.cost_models.waves import WavesModel, slowest_seconds
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Stage
from meshwright.profiles.table import Table

CostModelBuilder: TypeAlias = Callable[[Facts], CostModel]
"""A function that builds the cost model of other facts, for what-if questions."""


def cost_model_of(facts: Facts, table: Table | None = None) -> CostModel:
    """Return the cost model of these facts; it uses measured times where a table is given."""
    batch = cost_model(facts.cluster, facts.workload, facts.precision, table, facts.engine)
    if not facts.workload.selects_samples:
        return batch
    workload, sampling = facts.workload.wave, facts.workload.dynamic_sampling
    latencies = [reward.latency_seconds.resolve() for reward in facts.rewards]
    return WavesModel(
        batch,
        wave=cost_model(facts.cluster, workload, facts.precision, table, facts.engine),
        num_waves=sampling.expected_waves(facts.workload.num_prompts) if sampling else 1.0,
        reward_seconds=slowest_seconds(latencies, workload.batch_size) if latencies else 0.0,
    )


@dataclass(frozen=True)
class Choice:
    """A layout and a schedule of a stage, on a pool of `layout.num_ranks` ranks."""

    layout: Layout
    schedule: Schedule


def query_for_placement(plan: Plan, placement: Placement) -> Call:
    """The query to a cost model for a placement of a plan."""
    choice = Choice(placement.layout, placement.schedule)
    deferral, part = plan.facts.staleness - placement.steps_ahead, plan.part_of(placement.stage)
    return query_for_choice(plan.facts, plan.stage(placement.stage), choice, deferral=deferral, part=part)


def query_for_choice(facts: Facts, stage: Stage, choice: Choice, *, deferral: int, part: int = 0) -> Call:
    """The query to a cost model for a choice. `deferral` is the most extra periods that a sequence may stay in flight;
    it matters only with overcommit."""
    return Call(
        stage=stage,
        model=facts.models.spec(stage.role),
        layout=choice.layout,
        schedule=choice.schedule,
        max_deferral=deferral if choice.schedule.overcommit else 0,
        part=part,
        recomputes_cache=stage.generates and facts.cache_after_refit == "recompute",
    )
