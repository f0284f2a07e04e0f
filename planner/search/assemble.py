"""Assembles a plan from the choice of each stage and the order in which the ranks run the tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from meshwright.cost_models.cost import Cost
from meshwright.cost_models.kernels import element_bytes
from meshwright.cost_models.protocol import CostModel, RefitQuery, StageQuery
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import Choice, StageTransfer, query_for_choice
from meshwright.planner.plan.evaluate import evaluate, task_name_of
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Edge, Placement, Plan, Pool, Refit, Solver
from meshwright.planner.plan.reward_workers import with_workers
from meshwright.planner.plan.steps_ahead import StepsAhead, max_deferral, staleness_of, synchronous
from meshwright.profiles.layout import unequal_layers_per_stage
from meshwright.profiles.stages import GENERATE, Stage

_I = TypeVar("_I", Placement, Refit)

_ROUNDING = 1e-12
"""Relative change of a period that summing in another order may cause."""


@dataclass(frozen=True)
class Pick:
    """The ranks and the choice that the search picked for one stage."""

    ranks: Ranks
    choice: Choice


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The provenance of a plan: digests of its inputs, its pins and the solver's record."""

    digests: Mapping[str, str]
    pins: tuple[str, ...]
    solver: Solver


def assemble(
    facts: Facts,
    model: CostModel,
    *,
    transfers: Sequence[StageTransfer],
    picks: Mapping[str, Pick],
    order: Sequence[str],
    origin: Origin,
    ahead: StepsAhead | None = None,
) -> Plan:
    """Return the plan, timed by the evaluator.

    `order` names every stage and every possible `refit <stage>`. Without `ahead` no stage works ahead.
    """
    ahead = ahead or synchronous(facts.graph)
    generation = picks[GENERATE].choice.schedule
    pools = _pools(picks)
    draft = Plan(
        digests=dict(origin.digests),
        facts=facts,
        staleness=staleness_of(ahead[GENERATE], generation, facts.staleness),
        pins=origin.pins,
        solver=origin.solver,
        pools=tuple(pools[ranks] for ranks in sorted(pools)),
        placements=tuple(
            _placement(facts, model, stage, pick=picks[stage.name], pool=pools[picks[stage.name].ranks], ahead=ahead)
            for stage in facts.graph.stages
        ),
        edges=tuple(_edge(transfer) for transfer in transfers),
        refits=(),
        period_seconds=1.0,
        peak_bytes_per_rank=(0,) * facts.cluster.num_ranks,
    )
    refits = tuple(_refit(facts, model, draft, target) for target in copies_to_refit(draft))
    unordered = with_workers(draft.model_copy(update={"refits": refits}))
    plan, early_order = evaluate(_ordered(unordered, order)), _with_early_refits(unordered, order)
    if early_order == list(order):
        return plan
    early_plan = evaluate(_ordered(unordered, early_order))
    return early_plan if early_plan.period_seconds <= plan.period_seconds * (1 + _ROUNDING) else plan


def _with_early_refits(plan: Plan, order: Sequence[str]) -> list[str]:
    """Return the order with those trainings first whose weights a disjoint pool needs, if precedences allow it.

    In a run their refits can then overlap with the other trainings. The predicted period does not include this gain.
    """
    sources = {refit.source for refit in plan.refits if not weight_move(plan, refit.source, refit.target).overlap}
    trainings = [name for name in order if name in plan.graph.train_stage.values()]
    sorted_trainings = iter(sorted(trainings, key=lambda name: name not in sources))
    early_order = [next(sorted_trainings) if name in trainings else name for name in order]
    position = {name: index for index, name in enumerate(early_order)}
    edges = (edge for edge in plan.edges if plan.reads_same_period(edge.producer, edge.consumer))
    return early_order if all(position[edge.producer] < position[edge.consumer] for edge in edges) else list(order)


def copies_to_refit(plan: Plan) -> tuple[str, ...]:
    """Return the stages that own a copy of a trained role's weights other than the training copy."""
    return tuple(name for name in plan.graph.refit_targets if plan.copy_of(name) == name)


def _pools(picks: Mapping[str, Pick]) -> dict[Ranks, Pool]:
    return {
        ranks: Pool(
            name=f"ranks {ranks.first_rank}-{ranks.first_rank + ranks.num_ranks - 1}",
            first_rank=ranks.first_rank,
            num_ranks=ranks.num_ranks,
        )
        for ranks in (pick.ranks for pick in picks.values())
    }


def _placement(facts: Facts, model: CostModel, stage: Stage, *, pick: Pick, pool: Pool, ahead: StepsAhead) -> Placement:
    part, deferral = facts.cluster.part_of_pool(pick.ranks.ranks), max_deferral(ahead, facts.staleness)
    return Placement(
        stage=stage.name,
        pool=pool.name,
        layout=pick.choice.layout,
        stage_layers=unequal_layers_per_stage(facts.models.spec(stage.role), pick.choice.layout.pp),
        schedule=pick.choice.schedule,
        steps_ahead=ahead[stage.name],
        start_seconds=0.0,
        end_seconds=0.0,
        **placement_costs(model, query_for_choice(facts, stage, pick.choice, deferral=deferral, part=part)),
    )


def placement_costs(model: CostModel, query: StageQuery) -> dict[str, Any]:
    """Return the costs of a choice, keyed by the field names of a placement."""
    memory = model.memory(query)
    return {
        "cost": model.seconds(query),
        "tail_seconds": model.tail_seconds(query) if query.schedule.chunk_tokens else 0.0,
        "resident": memory.resident,
        "transient": memory.transient,
        "host": memory.host,
    }


def _edge(transfer: StageTransfer) -> Edge:
    return Edge(
        producer=transfer.producer,
        consumer=transfer.consumer,
        fields=transfer.fields,
        bytes=transfer.num_bytes,
        cost=transfer.cost,
    )


def _refit(facts: Facts, model: CostModel, plan: Plan, target: str) -> Refit:
    role, source = plan.stage(target).role, plan.graph.trainer_of(target)
    spec = facts.models.spec(role)
    cost: Cost = model.refit_seconds(weight_move(plan, source, target))
    return Refit(
        role=role,
        source=source,
        target=target,
        start_seconds=0.0,
        end_seconds=0.0,
        bytes=float(spec.trainable_params * element_bytes(facts.precision)),
        cost=cost,
    )


def weight_move(plan: Plan, source: str, target: str) -> RefitQuery:
    """Return the query for moving a role's weights from its training stage to a stage, as the plan places the two."""
    return RefitQuery(
        model=plan.facts.models.spec(plan.stage(target).role),
        source=plan.placement(source).layout,
        target=plan.placement(target).layout,
        overlap=len(set(plan.pool_of(source).ranks) & set(plan.pool_of(target).ranks)),
        source_part=plan.part_of(source),
        target_part=plan.part_of(target),
        generates=plan.stage(target).generates,
        quantises=plan.stage(target).is_quantised,
    )


def _ordered(plan: Plan, order: Sequence[str]) -> Plan:
    """Return the plan with provisional times: the position of each task in the order."""
    position = {name: float(index) for index, name in enumerate(order)}

    def placed(item: _I) -> _I:
        index = position[task_name_of(item)]
        return item.model_copy(update={"start_seconds": index, "end_seconds": index})

    return plan.model_copy(
        update={"placements": tuple(map(placed, plan.placements)), "refits": tuple(map(placed, plan.refits))}
    )
