"""Queries to a cost model: the cost model of a job's facts, the query for a placement or a choice of a stage, and the
transfers between stages within a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.judge_costs import JudgeModel
from meshwright.cost_models.protocol import CostModel, StageQuery
from meshwright.cost_models.sampling_waves import WavesModel, processes_all_samples, slowest_seconds
from meshwright.planner.job.custom_graph import OwnGraph
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.planner.plan.reward_workers import min_reward_wait
from meshwright.profiles.frameworks import EAGER
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE, KEPT_TOKENS, Stage, field_type
from meshwright.profiles.table import Table
from meshwright.profiles.workload import Workload

CostModelBuilder: TypeAlias = Callable[[Facts], CostModel]
"""A function that builds the cost model of other facts, for what-if questions."""


def cost_model_of(facts: Facts, table: Table | None = None) -> CostModel:
    """Return the cost model of these facts; it uses measured times where a table is given."""
    batch = _batch_model(facts, facts.workload, table)
    if not facts.workload.selects_samples:
        return batch
    workload, sampling = facts.workload.wave, facts.workload.dynamic_sampling
    latencies = [reward.latency_seconds.resolve() for reward in facts.rewards]
    return WavesModel(
        batch,
        wave=_batch_model(facts, workload, table),
        num_waves=sampling.expected_waves(facts.workload.num_prompts) if sampling else 1.0,
        reward_seconds=slowest_seconds(latencies, workload.batch_size) if latencies else 0.0,
    )


def _batch_model(facts: Facts, workload: Workload, table: Table | None) -> CostModel:
    """Return the cost model of a workload, with the verdicts of a judge that generates them."""
    batch = cost_model(facts.cluster, workload, facts.precision, table, facts.engine)
    judge = facts.algorithm.judge if isinstance(facts.algorithm, OwnGraph) else None
    if judge is None:
        return batch
    verdicts = cost_model(facts.cluster, judge.judged(workload), facts.precision, table, EAGER)
    return JudgeModel(batch, verdicts)


@dataclass(frozen=True)
class Choice:
    """A layout and a schedule of a stage, on a pool of `layout.num_ranks` ranks."""

    layout: Layout
    schedule: Schedule


def query_for_placement(plan: Plan, placement: Placement) -> StageQuery:
    """The query to a cost model for a placement of a plan."""
    choice = Choice(placement.layout, placement.schedule)
    deferral, part = plan.facts.staleness - placement.steps_ahead, plan.part_of(placement.stage)
    return query_for_choice(plan.facts, plan.stage(placement.stage), choice, deferral=deferral, part=part)


def query_for_choice(facts: Facts, stage: Stage, choice: Choice, *, deferral: int, part: int = 0) -> StageQuery:
    """The query to a cost model for a choice. `deferral` is the maximum number of extra periods that a sequence may
    stay in flight; it matters only with overcommit."""
    return StageQuery(
        stage=stage,
        model=facts.models.spec(stage.role),
        layout=choice.layout,
        schedule=choice.schedule,
        max_deferral=deferral if choice.schedule.overcommit else 0,
        part=part,
        recomputes_cache=stage.generates and facts.cache_after_refit == "recompute",
    )


@dataclass(frozen=True, kw_only=True)
class StageTransfer:
    """The transfer of fields from a producer to a consumer; its cost does not depend on where the two run."""

    producer: str
    consumer: str
    fields: tuple[str, ...]
    num_bytes: float
    cost: Cost


def stage_transfers(facts: Facts, model: CostModel) -> tuple[StageTransfer, ...]:
    """Return the transfers of a step, by producer and consumer in the order of the stages.

    Transfers from the generation include the minimum time that the consumer waits for rewards on hosts. Stages that
    score candidates receive all of them, other stages only the samples that are kept.
    """
    transfers = []
    for producer, consumer, fields in facts.graph.edges:
        workload = facts.workload.candidates if processes_all_samples(facts.graph.by_name[consumer]) else facts.workload
        top_tokens = facts.graph.by_name[producer].top_tokens
        num_bytes = sum(field_bytes(workload, field, top_tokens) for field in fields)
        cost = model.transfer_seconds(num_bytes)
        if producer == GENERATE:
            cost += min_reward_wait(facts, consumer)
        transfers.append(
            StageTransfer(producer=producer, consumer=consumer, fields=fields, num_bytes=num_bytes, cost=cost)
        )
    return tuple(transfers)


def field_bytes(workload: Workload, field: str, top_tokens: int = 0) -> float:
    """Bytes of one field for a whole batch, written by a stage with these `top_tokens`. Sets of kept tokens are counted
    at their size limit, since how many tokens `top_p` leaves follows from the weights."""
    values = field_type(field)
    prompt, response = workload.prompt_lengths.mean, workload.response_lengths.mean
    num_values = values.num_values(prompt, response, top_tokens)
    if field == KEPT_TOKENS:
        num_values = workload.kept_tokens * workload.sampled_lengths.mean
    return float(workload.batch_size * num_values * values.num_bytes)
