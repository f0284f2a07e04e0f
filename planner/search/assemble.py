"""Makes a plan of what was picked for each stage and the order in which the ranks take the tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from meshwright.cost_models.cost import Cost
from meshwright.cost_models.precision import element_bytes
from meshwright.cost_models.question import Call, CostModel, Move
from meshwright.planner.plan.calls import Choice, call_of
from meshwright.planner.plan.edges import Handover
from meshwright.planner.plan.evaluate import evaluate, name_of
from meshwright.planner.plan.host_workers import with_workers
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import SCHEMA_VERSION, Edge, Placement, Plan, Pool, Refit, Solver
from meshwright.planner.plan.steps_ahead import StepsAhead, max_deferral, staleness_of, synchronous
from meshwright.profiles.layout import unequal_stages
from meshwright.profiles.stages import GENERATE, Stage

_I = TypeVar("_I", Placement, Refit)

_ROUNDING = 1e-12
"""Of a period: what the order of a sum may change."""


@dataclass(frozen=True)
class Pick:
    """What one stage was given."""

    ranks: Ranks
    choice: Choice


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a plan comes from: what it was asked, and how it was found."""

    digests: Mapping[str, str]
    pins: tuple[str, ...]
    solver: Solver


def assemble(
    facts: Facts,
    model: CostModel,
    *,
    handovers: Sequence[Handover],
    picks: Mapping[str, Pick],
    order: Sequence[str],
    origin: Origin,
    ahead: StepsAhead | None = None,
) -> Plan:
    """The plan, timed by the evaluator. `order` names every stage and every possible `refit <stage>`; no stage works
    ahead where `ahead` is not given."""
    ahead = ahead or synchronous(facts.graph)
    generation = picks[GENERATE].choice.schedule
    pools = _pools(picks)
    draft = Plan(
        schema_version=SCHEMA_VERSION,
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
        edges=tuple(_edge(handover) for handover in handovers),
        refits=(),
        period_seconds=1.0,
        peak_bytes_per_rank=(0,) * facts.cluster.num_ranks,
    )
    refits = tuple(_refit(facts, model, draft, target) for target in copies_to_refit(draft))
    whole = with_workers(draft.model_copy(update={"refits": refits}))
    plan, sooner = evaluate(_ordered(whole, order)), _given_sooner(whole, order)
    if sooner == list(order):
        return plan
    other = evaluate(_ordered(whole, sooner))
    return other if other.period_seconds <= plan.period_seconds * (1 + _ROUNDING) else plan


def _given_sooner(plan: Plan, order: Sequence[str]) -> list[str]:
    """The order with the trainings whose weights a pool apart takes before the others, if those that they change places
    with read the same: the weights can be on their way while these train, which no period tells."""
    givers = {refit.source for refit in plan.refits if not move_of(plan, refit.source, refit.target).overlap}
    trainings = [name for name in order if name in plan.graph.train_stage.values()]
    sooner = iter(sorted(trainings, key=lambda name: name not in givers))
    found = [next(sooner) if name in trainings else name for name in order]
    place = {name: index for index, name in enumerate(found)}
    waits = (edge for edge in plan.edges if plan.waits(edge.producer, edge.consumer))
    return found if all(place[edge.producer] < place[edge.consumer] for edge in waits) else list(order)


def copies_to_refit(plan: Plan) -> tuple[str, ...]:
    """The stages that own a copy of a trained role's weights which is not the training copy."""
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
        stage_layers=unequal_stages(facts.models.spec(stage.role), pick.choice.layout.pp),
        schedule=pick.choice.schedule,
        steps_ahead=ahead[stage.name],
        start_seconds=0.0,
        end_seconds=0.0,
        **costs_of(model, call_of(facts, stage, pick.choice, deferral=deferral, part=part)),
    )


def costs_of(model: CostModel, call: Call) -> dict[str, Any]:
    """What a placement says of the costs of its choice, by the names of its fields."""
    memory = model.memory(call)
    return {
        "cost": model.seconds(call),
        "tail_seconds": model.tail_seconds(call) if call.schedule.chunk_tokens else 0.0,
        "resident": memory.resident,
        "transient": memory.transient,
        "host": memory.host,
    }


def _edge(handover: Handover) -> Edge:
    return Edge(
        producer=handover.producer,
        consumer=handover.consumer,
        fields=handover.fields,
        bytes=handover.num_bytes,
        cost=handover.cost,
    )


def _refit(facts: Facts, model: CostModel, plan: Plan, target: str) -> Refit:
    role, source = plan.stage(target).role, plan.graph.trainer_of(target)
    spec = facts.models.spec(role)
    cost: Cost = model.move_seconds(move_of(plan, source, target))
    return Refit(
        role=role,
        source=source,
        target=target,
        start_seconds=0.0,
        end_seconds=0.0,
        bytes=float(spec.trained_params * element_bytes(facts.precision)),
        cost=cost,
    )


def move_of(plan: Plan, source: str, target: str) -> Move:
    """The weights of a stage's role on their way from its training stage, as the plan places the two."""
    return Move(
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
    """The plan with positions in the order as provisional times."""
    position = {name: float(index) for index, name in enumerate(order)}

    def placed(item: _I) -> _I:
        at = position[name_of(item)]
        return item.model_copy(update={"start_seconds": at, "end_seconds": at})

    return plan.model_copy(
        update={"placements": tuple(map(placed, plan.placements)), "refits": tuple(map(placed, plan.refits))}
    )
