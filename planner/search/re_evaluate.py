"""Re-evaluates the placements of a plan under other facts: the rules that they violate, and what they cost.

A search that starts from a re-evaluated plan looks only for faster ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.cost_models.kernels import element_bytes
from meshwright.cost_models.protocol import CostModel
from meshwright.planner.job.job import Facts
from meshwright.planner.job.limits import position_violations
from meshwright.planner.plan.cost_queries import query_for_placement, stage_transfers
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.layout_and_schedule_rules import layout_rules, schedule_rules
from meshwright.planner.plan.pins import Pin
from meshwright.planner.plan.plan import Edge, Placement, Plan, Refit
from meshwright.planner.plan.pool_rules import pool_violations
from meshwright.planner.plan.reward_workers import with_recorded_workers, with_workers
from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.assemble import placement_costs, weight_move
from meshwright.profiles.stages import StageGraph


def violations_under(plan: Plan, facts: Facts) -> tuple[str, ...]:
    """Return one sentence for each rule of these facts that the plan's pools, layouts and schedules violate."""
    return tuple(_violations(plan, facts))


def _violations(plan: Plan, facts: Facts) -> Iterator[str]:
    if _skeleton(plan.graph) != _skeleton(facts.graph):
        yield "the plan's stages or their edges differ from those of the job's graph; plan the job again."
        return
    yield from position_violations(facts.models.by_name, facts.workload)
    for pool in plan.pools:
        for sentence in pool_violations(facts.cluster, pool.first_rank, pool.num_ranks):
            yield f"pool {pool.name!r}: {sentence}"
    for placement in plan.placements:
        stage = facts.graph.by_name[placement.stage]
        part = facts.cluster.part_of_pool(plan.pool_of(placement.stage).ranks)
        rules = layout_rules(facts, stage, placement.layout, part)
        for sentence in rules or schedule_rules(facts, stage, placement.layout, placement.schedule, part):
            yield f"{placement.stage}: {sentence}"


def _skeleton(graph: StageGraph) -> object:
    """Return the parts of a graph on which placements and their order depend."""
    stages = frozenset((s.name, s.role, s.modes, s.is_trained, s.is_quantised) for s in graph.stages)
    return stages, frozenset((edge.producer, edge.consumer) for edge in graph.edges)


def re_evaluate(plan: Plan, facts: Facts, model: CostModel) -> Plan:
    """Return the plan with the same placements and order, costed by `model` under `facts` and timed again.

    The placements have to be legal under `facts`. Nothing is searched, so no lower bound is known: the status is
    `pinned` and the gap is 1.
    """
    with_facts = plan.model_copy(update={"facts": facts, "digests": facts.digests(), "engine_options": None})
    costed = with_facts.model_copy(
        update={
            "placements": tuple(_placement(with_facts, p, model) for p in plan.placements),
            "edges": tuple(
                Edge(
                    producer=transfer.producer,
                    consumer=transfer.consumer,
                    fields=transfer.fields,
                    bytes=transfer.num_bytes,
                    cost=transfer.cost,
                )
                for transfer in stage_transfers(facts, model)
            ),
            "refits": tuple(_refit(with_facts, refit, model) for refit in plan.refits),
        }
    )
    timed = evaluate(with_recorded_workers(costed) if facts == plan.facts else with_workers(costed))
    update = {"status": "pinned", "objective_seconds": timed.period_seconds, "bound_seconds": 0.0, "gap": 1.0}
    return timed.model_copy(update={"solver": plan.solver.model_copy(update=update)})


def _placement(plan: Plan, placement: Placement, model: CostModel) -> Placement:
    return placement.model_copy(update=placement_costs(model, query_for_placement(plan, placement)))


def _refit(plan: Plan, refit: Refit, model: CostModel) -> Refit:
    move = weight_move(plan, refit.source, refit.target)
    num_bytes = float(move.model.trainable_params * element_bytes(plan.facts.precision))
    return refit.model_copy(update={"cost": model.refit_seconds(move), "bytes": num_bytes})


def re_evaluated_or_violation(plan: Plan, facts: Facts, model: CostModel, pins: Sequence[Pin]) -> Plan | str:
    """Return the plan costed under these facts, or a sentence naming the first rule or pin that it violates."""
    violation = next(_start_violations(plan, facts, pins), None)
    if violation is None:
        re_evaluated = re_evaluate(plan, facts, model).model_copy(update={"pins": tuple(map(str, pins))})
        violation = next(iter(verify(re_evaluated)), None)
        if violation is None:
            return re_evaluated
    return violation


def _start_violations(plan: Plan, facts: Facts, pins: Sequence[Pin]) -> Iterator[str]:
    if plan.graph != facts.graph:
        yield f"it is a plan for {plan.facts.algorithm}, and its stages differ from those of {facts.algorithm}."
        return
    yield from violations_under(plan, facts)
    if plan.ahead not in steps_ahead_patterns(facts.graph, facts.staleness):
        yield f"its stages work further ahead than a staleness of {facts.staleness} allows."
    for pin in pins:
        if not pin.allows(plan.choice(pin.stage, pin.key)):
            yield f"{pin.quoted} is not kept."
