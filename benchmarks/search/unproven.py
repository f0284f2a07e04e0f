"""A plan of choices that some other search made: timed and checked like ours, with no bound of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import stage_transfers
from meshwright.planner.plan.plan import Plan, Solver
from meshwright.planner.plan.steps_ahead import StepsAhead
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.assemble import Origin, Pick, assemble


def unproven(
    facts: Facts, model: CostModel, *, name: str, picks: Mapping[str, Pick], order: Sequence[str], ahead: StepsAhead
) -> Plan:
    """The plan; `name` says whose search it is. It breaks no rule."""
    solver = Solver(
        name=name,
        version="0",
        seed=0,
        num_workers=1,
        max_deterministic_time=0.0,
        status="pinned",
        objective_seconds=1.0,
        bound_seconds=0.0,
        gap=1.0,
    )
    origin = Origin(digests=facts.digests(), pins=(), solver=solver)
    edges = stage_transfers(facts, model)
    plan = assemble(facts, model, transfers=edges, picks=picks, order=order, origin=origin, ahead=ahead)
    timed = solver.model_copy(update={"objective_seconds": plan.period_seconds})
    plan = plan.model_copy(update={"solver": timed})
    broken = verify(plan)
    assert not broken, broken
    return plan
