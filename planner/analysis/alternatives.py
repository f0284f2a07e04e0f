"""What else each stage could have been given: the next best choices, everything else of the plan staying as it is.

Each alternative is a whole plan, timed by the evaluator in the same order of tasks; those that do not fit are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from meshwright.cost_models.question import CostModel
from meshwright.planner.plan.calls import Choice
from meshwright.planner.plan.edges import Handover, handovers
from meshwright.planner.plan.evaluate import free_bytes, private_bytes, refit_name, resident_bytes, tasks
from meshwright.planner.plan.pins import Ranks, parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.assemble import Origin, Pick, assemble
from meshwright.planner.search.frontier import Frontier, frontiers
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule

_FASTEST = 4
"""Fitting candidates tried per stage and pool; slower ones on the same pool seldom make a better plan."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One other choice for a stage; `delta_seconds` is how much longer the step would be."""

    ranks: Ranks
    layout: Layout
    schedule: Schedule
    period_seconds: float
    delta_seconds: float


@dataclass(frozen=True, kw_only=True)
class Considered:
    """What the search looked at for one stage: the best other choices, and how many were left out by which rule."""

    stage: str
    runners_up: tuple[Alternative, ...]
    rejected: Mapping[str, int]


def alternatives(plan: Plan, model: CostModel, *, most: int = 3) -> tuple[Considered, ...]:
    """The `most` best other choices of each stage, under the plan's pins. `model` prices the plan's own facts."""
    edges = handovers(plan.facts, model)
    return tuple(
        Considered(
            stage=found.stage.name,
            runners_up=_best(_tried(plan, model, edges, found), most),
            rejected=dict(found.rejected),
        )
        for found in frontiers(plan.facts, model, parse_pins(plan.pins, plan.graph))
    )


def _best(tried: Iterator[Alternative], most: int) -> tuple[Alternative, ...]:
    """The fastest, one per size of pool and layout, so that they differ in more than a position or a micro-batch."""
    best: dict[Layout, Alternative] = {}
    for one in tried:
        known = best.get(one.layout)
        if known is None or one.period_seconds < known.period_seconds:
            best[one.layout] = one
    return tuple(sorted(best.values(), key=lambda a: (a.period_seconds, a.ranks, a.layout))[:most])


def _tried(plan: Plan, model: CostModel, edges: Sequence[Handover], found: Frontier) -> Iterator[Alternative]:
    """Plans that differ in one stage's choice and fit in memory: the fastest few of every pool."""
    stage, picks, order = found.stage.name, _picks(plan), _order(plan)
    origin = Origin(digests=plan.digests, pins=plan.pins, solver=plan.solver)

    def plan_with(pick: Pick) -> Plan:
        changed = {**picks, stage: pick}
        return assemble(plan.facts, model, handovers=edges, picks=changed, order=order, origin=origin, ahead=plan.ahead)

    for ranks in found.pools:
        room = room_for(plan, stage, ranks)
        nearest = sorted(found.on(ranks), key=lambda candidate: candidate.seconds)
        small = (Pick(ranks, c.choice) for c in nearest if c.peak_bytes - c.weights_bytes <= room)
        plans = ((pick, plan_with(pick)) for pick in small if pick != picks[stage])
        fitting = ((pick, other) for pick, other in plans if _fits(other))
        for pick, other in islice(fitting, _FASTEST):
            yield Alternative(
                ranks=ranks,
                layout=pick.choice.layout,
                schedule=pick.choice.schedule,
                period_seconds=other.period_seconds,
                delta_seconds=other.period_seconds - plan.period_seconds,
            )


def room_for(plan: Plan, stage: str, ranks: Ranks) -> float:
    """The most bytes that a stage can have on these ranks beside what the others keep there.

    Weights of the stage's own role are left out: they may come to be shared.
    """
    role = plan.stage(stage).role

    def kept(rank: int) -> float:
        others = [p for p in plan.placements if p.stage != stage and rank in plan.pool(p.pool).ranks]
        return sum(resident_bytes(plan, p) if plan.stage(p.stage).role != role else private_bytes(p) for p in others)

    first, last = ranks.first_rank, ranks.first_rank + ranks.num_ranks
    return plan.facts.cluster.usable_bytes(first) - max(kept(rank) for rank in range(first, last))


def _fits(plan: Plan) -> bool:
    return free_bytes(plan) >= 0


def _picks(plan: Plan) -> dict[str, Pick]:
    found = {}
    for placement in plan.placements:
        pool = plan.pool(placement.pool)
        choice = Choice(placement.layout, placement.schedule)
        found[placement.stage] = Pick(Ranks(pool.first_rank, pool.num_ranks), choice)
    return found


def _order(plan: Plan) -> tuple[str, ...]:
    """The plan's order of tasks, with refits that only another choice would need at its start."""
    names = [task.name for task in tasks(plan)]
    absent = [name for name in map(refit_name, plan.graph.refit_targets) if name not in names]
    return (*absent, *names)
