"""The best plan among choices near those of another one: found at once, where facts change in the middle of a run.

Near are layouts with the degrees of the other plan's, but for one that may be halved or doubled, on pools of
a quarter of the ranks and more, with about as many rows or slots at a time. Nothing is known of what is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.cost_models.question import CostModel
from meshwright.planner.plan.calls import Choice, call_of
from meshwright.planner.plan.edges import handovers
from meshwright.planner.plan.host_workers import late_seconds, reward_readers
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Pin
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.planner.plan.rules import layout_rules, room_on, schedules, streaming_rules
from meshwright.planner.plan.steps_ahead import Scope, max_deferral, patterns, scopes
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.assemble import Origin
from meshwright.planner.search.candidates import Candidate, costed, undominated
from meshwright.planner.search.costing import Asked
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontier import Frontier, PoolKind
from meshwright.planner.search.searched import Searched
from meshwright.planner.search.solver_record import solver_record, work_of
from meshwright.planner.search.space import agrees
from meshwright.planner.search.stage_costs import StageCosts
from meshwright.planner.solver.result import Effort, Limits
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule

_LARGE = 4
"""A pool has this part of all ranks and more."""

_DEGREES = (2.0, 0.5)
"""What one degree of a layout may be multiplied by."""

_TIMES = 4
"""Rows and slots at a time are between so many times fewer and more."""

_TIME = 4.0
"""Of the solver, deterministic, for each scope."""


def near_plan(plan: Plan, facts: Facts, model: CostModel, limits: Limits, pins: Sequence[Pin] = ()) -> Plan | None:
    """The best plan of these facts with choices near those of `plan`, without a bound; None where there is none."""
    edges, effort, every, costs = handovers(facts, model), Effort(), [], StageCosts(facts, model, pins)
    answered: list[Searched] = []
    for scope in _scopes(plan, facts):
        frontiers = [_frontier(plan.placement(stage.name), costs, scope) for stage in facts.graph.stages]
        every += frontiers
        formulation = formulate(facts, model, frontiers, edges, scope.ahead)
        from meshwright.planner.solver.solve import solve

        asked = replace(limits.on(facts.cluster.num_ranks), max_deterministic_time=_TIME)
        result = solve(formulation.problem, asked, effort=effort)
        if result.answer is not None:
            answered.append(Searched(scope=scope, edges=edges, formulation=formulation, result=result))
    if not answered:
        return None
    best = min(answered, key=lambda one: one.objective_seconds)
    solver = solver_record(limits, is_whole=False, statuses=(), bound_seconds=0.0, work=work_of(every, effort))
    origin = Origin(digests=facts.digests(), pins=tuple(map(str, pins)), solver=solver)
    found = best.assembled(facts, model, origin)
    update = {"objective_seconds": found.period_seconds, "gap": 1.0}
    found = found.model_copy(update={"solver": solver.model_copy(update=update)})
    broken = verify(found)
    assert not broken, broken
    return found


def _scopes(plan: Plan, facts: Facts) -> tuple[Scope, ...]:
    """Those with stages as far ahead as in the plan, or as near to it as the staleness allows."""
    allowed = patterns(facts.graph, facts.staleness)
    ahead = plan.ahead if plan.ahead in allowed else allowed[-1]
    return scopes(ahead, facts.staleness)


def _frontier(placement: Placement, costs: StageCosts, scope: Scope) -> Frontier:
    """What fits and no other choice beats, of those near a placement."""
    stage, facts, asked = costs.facts.graph.by_name[placement.stage], costs.facts, Asked()
    mine = [pin for pin in costs.pins if pin.stage == stage.name]
    deferral = max_deferral(scope.ahead, facts.staleness)

    def kept(kind: PoolKind) -> tuple[Candidate, ...]:
        if kind.num_ranks * _LARGE < facts.cluster.num_ranks:
            return ()
        near = (choice for choice in _choices(placement, facts, kind, scope) if agrees(choice, mine))
        calls = [call_of(facts, stage, one, deferral=deferral, part=kind.part) for one in near]
        found = [costed(costs.model, replace(call, schedule=costs.model.dealt(call))) for call in calls]
        if stage.generates and reward_readers(facts):
            found = [
                one._replace(late_seconds=late_seconds(facts, kind.part, one.layout, one.schedule, one.seconds))
                for one in found
            ]
        asked.timed, asked.weighed = asked.timed + len(found), asked.weighed + len(found)
        device_bytes, host_bytes = room_on(facts, kind.part)
        fitting = [one for one in found if one.peak_bytes <= device_bytes and one.host_bytes <= host_bytes]
        by_layout: dict[Layout, list[Candidate]] = {}
        for one in fitting:
            by_layout.setdefault(one.layout, []).append(one)
        return tuple(one for same in by_layout.values() for one in undominated(same))

    candidates = {kind: kept(kind) for kind in sorted(costs.kinds[stage.name])}
    pools = costs.pools[stage.name]
    return Frontier(stage=stage, pools=pools, candidates=candidates, rejected=Counter(), smallest={}, asked=asked)


def _choices(placement: Placement, facts: Facts, kind: PoolKind, scope: Scope) -> Iterator[Choice]:
    """The legal ones on a kind of pool."""
    stage = facts.graph.by_name[placement.stage]
    for layout in _layouts(placement.layout, kind.num_ranks):
        if layout_rules(facts, stage, layout, kind.part):
            continue
        for schedule in schedules(facts, stage, layout, scope):
            if _is_near(schedule, placement.schedule, facts.workload.max_tokens) and not streaming_rules(
                facts, layout, schedule, kind.part
            ):
                yield Choice(layout, schedule)


def _layouts(layout: Layout, num_ranks: int) -> Iterator[Layout]:
    """On so many ranks, with the same degrees but for one, and as many replicas as that leaves."""
    for tp, pp in ((1.0, 1.0), *((times, 1.0) for times in _DEGREES), *((1.0, times) for times in _DEGREES)):
        degrees = int(layout.tp * tp), int(layout.pp * pp)
        each = degrees[0] * degrees[1] * layout.cp
        if min(degrees) >= 1 and num_ranks % each == 0:
            dp, has_tp = num_ranks // each, degrees[0] > 1
            for vpp in dict.fromkeys((1, layout.vpp if degrees[1] > 1 else 1)):
                spread = layout.expert_replicas if dp % layout.expert_replicas == 0 else 1
                sp, folded = has_tp and (layout.sp or layout.tp == 1), degrees[0] if layout.folded > 1 else 1
                experts = {"ep": spread * folded, "etp": degrees[0] // folded}
                yield Layout(tp=degrees[0], pp=degrees[1], dp=dp, sp=sp, cp=layout.cp, vpp=vpp, **experts)


def _is_near(schedule: Schedule, other: Schedule, longest: int) -> bool:
    """About as many tokens or slots at a time."""

    def near(one: int, there: int) -> bool:
        return there <= one * _TIMES and one <= there * _TIMES

    return near(schedule.most_tokens(longest), other.most_tokens(longest)) and near(
        schedule.generation_slots, other.generation_slots
    )
