"""Alternatives: the next best choices of each stage, with the rest of the plan unchanged.

Each alternative is a whole plan that the evaluator times with the same order of tasks; plans that do not fit in memory
are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from meshwright.cost_models.question import CostModel
from meshwright.planner.plan.calls import Choice
from meshwright.planner.plan.edges import StageTransfer, stage_transfers
from meshwright.planner.plan.evaluate import free_bytes, private_bytes, refit_name, resident_bytes, tasks
from meshwright.planner.plan.pins import Ranks, parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.assemble import Origin, Pick, assemble
from meshwright.planner.search.frontier import Frontier, frontiers
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule

_MAX_TRIED = 4
"""The most fitting candidates evaluated for each stage and pool; slower ones seldom make a better plan."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another choice for a stage; `delta_seconds` is the increase of the step time."""

    ranks: Ranks
    layout: Layout
    schedule: Schedule
    period_seconds: float
    delta_seconds: float


@dataclass(frozen=True, kw_only=True)
class StageAlternatives:
    """The choices that the search considered for one stage: the best alternatives, and the number of choices that each
    rule rejected."""

    stage: str
    runners_up: tuple[Alternative, ...]
    rejected: Mapping[str, int]


def alternatives(plan: Plan, model: CostModel, *, max_count: int = 3) -> tuple[StageAlternatives, ...]:
    """Return up to `most` best alternatives of each stage, under the plan's pins. `model` is the cost model of the
    plan's own facts."""
    edges = stage_transfers(plan.facts, model)
    return tuple(
        StageAlternatives(
            stage=frontier_of_stage.stage.name,
            runners_up=_best(_fitting_alternatives(plan, model, edges, frontier_of_stage), max_count),
            rejected=dict(frontier_of_stage.rejected),
        )
        for frontier_of_stage in frontiers(plan.facts, model, parse_pins(plan.pins, plan.graph))
    )


def _best(alternatives: Iterator[Alternative], most: int) -> tuple[Alternative, ...]:
    """The fastest alternatives, one for each layout, so that they differ in more than a position or a micro-batch."""
    best: dict[Layout, Alternative] = {}
    for alternative in alternatives:
        fastest = best.get(alternative.layout)
        if fastest is None or alternative.period_seconds < fastest.period_seconds:
            best[alternative.layout] = alternative
    return tuple(sorted(best.values(), key=lambda a: (a.period_seconds, a.ranks, a.layout))[:most])


def _fitting_alternatives(
    plan: Plan, model: CostModel, edges: Sequence[StageTransfer], frontier_of_stage: Frontier
) -> Iterator[Alternative]:
    """The fastest few alternatives of a stage on every pool that fit in memory."""
    stage, picks, order = frontier_of_stage.stage.name, _picks(plan), _order(plan)
    origin = Origin(digests=plan.digests, pins=plan.pins, solver=plan.solver)

    def plan_with(pick: Pick) -> Plan:
        changed = {**picks, stage: pick}
        return assemble(plan.facts, model, handovers=edges, picks=changed, order=order, origin=origin, ahead=plan.ahead)

    for ranks in frontier_of_stage.pools:
        room = free_bytes_for(plan, stage, ranks)
        fastest_first = sorted(frontier_of_stage.candidates_on(ranks), key=lambda candidate: candidate.seconds)
        small = (Pick(ranks, c.choice) for c in fastest_first if c.peak_bytes - c.weights_bytes <= room)
        plans = ((pick, plan_with(pick)) for pick in small if pick != picks[stage])
        fitting = ((pick, other) for pick, other in plans if _fits(other))
        for pick, other in islice(fitting, _MAX_TRIED):
            yield Alternative(
                ranks=ranks,
                layout=pick.choice.layout,
                schedule=pick.choice.schedule,
                period_seconds=other.period_seconds,
                delta_seconds=other.period_seconds - plan.period_seconds,
            )


def free_bytes_for(plan: Plan, stage: str, ranks: Ranks) -> float:
    """The bytes that a stage may use on each of these ranks, given what other stages keep there.

    Weights of the stage's own role do not count, because the stage may share them.
    """
    role = plan.stage(stage).role

    def kept_bytes(rank: int) -> float:
        others = [p for p in plan.placements if p.stage != stage and rank in plan.pool(p.pool).ranks]
        return sum(resident_bytes(plan, p) if plan.stage(p.stage).role != role else private_bytes(p) for p in others)

    first, last = ranks.first_rank, ranks.first_rank + ranks.num_ranks
    return plan.facts.cluster.usable_bytes(first) - max(kept_bytes(rank) for rank in range(first, last))


def _fits(plan: Plan) -> bool:
    return free_bytes(plan) >= 0


def _picks(plan: Plan) -> dict[str, Pick]:
    picks = {}
    for placement in plan.placements:
        pool = plan.pool(placement.pool)
        choice = Choice(placement.layout, placement.schedule)
        picks[placement.stage] = Pick(Ranks(pool.first_rank, pool.num_ranks), choice)
    return picks


def _order(plan: Plan) -> tuple[str, ...]:
    """The plan's order of tasks, preceded by refits that only an alternative would need."""
    names = [task.name for task in tasks(plan)]
    absent = [name for name in map(refit_name, plan.graph.refit_targets) if name not in names]
    return (*absent, *names)
