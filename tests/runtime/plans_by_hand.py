"""Plans of a job that are written down stage by stage, without a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import Choice, cost_model_of, stage_transfers
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan, Solver
from meshwright.planner.plan.steps_ahead import StepsAhead, synchronous
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.assemble import Origin, Pick, assemble
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule


@dataclass(frozen=True)
class Where:
    """The ranks, written `first:number`, the layout and the schedule of a stage."""

    ranks: str
    layout: str = "tp1"
    schedule: Schedule = field(default_factory=Schedule)

    @property
    def pool(self) -> Ranks:
        first, number = map(int, self.ranks.split(":"))
        return Ranks(first, number)


def plan_by_hand(
    facts: Facts, where: Mapping[str, Where], ahead: StepsAhead | None = None, order: Sequence[str] | None = None
) -> Plan:
    """The plan with each stage where it is said to be, `other` standing for all that are not named, in their order."""
    model = cost_model_of(facts)
    ahead = ahead or synchronous(facts.graph)
    picks = {}
    for stage in facts.graph.stages:
        place = where[stage.name if stage.name in where else "other"]
        schedule = place.schedule
        if stage.generates and not schedule.generation_slots:
            schedule = Schedule(generation_slots=-(-facts.workload.wave.batch_size // Layout.parse(place.layout).dp))
        choice = Choice(Layout.parse(place.layout), schedule)
        picks[stage.name] = Pick(place.pool, choice)
    solver = Solver(
        name="none",
        version="0",
        seed=0,
        num_workers=1,
        max_deterministic_time=0.0,
        status="pinned",
        objective_seconds=1.0,
        bound_seconds=0.0,
        gap=1.0,
    )
    names = order or facts.graph.names
    plan = assemble(
        facts,
        model,
        transfers=stage_transfers(facts, model),
        picks=picks,
        order=[*(f"refit {name}" for name in names), *names],
        origin=Origin(digests=facts.digests(), pins=(), solver=solver),
        ahead=ahead,
    )
    period = plan.period_seconds
    solver = solver.model_copy(update={"objective_seconds": period, "gap": 1.0})
    plan = plan.model_copy(update={"solver": solver})
    assert verify(plan) == (), verify(plan)
    return plan
