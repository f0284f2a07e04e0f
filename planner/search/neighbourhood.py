"""Searches the neighbourhood of an existing plan, fast enough to re-plan a running job whose facts have changed.

The neighbourhood has layouts with the plan's degrees, of which one may be halved or doubled, on pools of at least a
quarter of the ranks, with a similar number of rows or slots at a time. No lower bound is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import Choice, query_for_choice, stage_transfers
from meshwright.planner.plan.layout_and_schedule_rules import available_bytes, layout_rules, schedules, streaming_rules
from meshwright.planner.plan.pins import Pin
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.planner.plan.reward_workers import extra_reward_wait_seconds, reward_readers
from meshwright.planner.plan.steps_ahead import SearchCase, max_deferral, search_cases, steps_ahead_patterns
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.assemble import Origin
from meshwright.planner.search.choice_costs import Candidate, QueryCounts, cost_query, undominated
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontiers import Frontier, PoolKind, StageCosts
from meshwright.planner.search.legal_choices import agrees
from meshwright.planner.search.search_case import SolvedCase, count_work, solver_record
from meshwright.planner.solver.result import Effort, Limits
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule

_MAX_RANKS_OVER_POOL = 4
"""Maximum ratio of all ranks to the ranks of a pool."""

_DEGREE_FACTORS = (2.0, 0.5)
"""Factors by which one degree of a layout may be multiplied."""

_MAX_SIZE_FACTOR = 4
"""Rows and slots at a time may be smaller or larger by up to this factor."""

_SOLVER_TIME = 4.0
"""Deterministic time limit of the solver for each search case."""


def best_plan_nearby(
    plan: Plan, facts: Facts, model: CostModel, limits: Limits, pins: Sequence[Pin] = ()
) -> Plan | None:
    """Return the best plan of these facts in the neighbourhood of `plan`, or None. No lower bound is computed."""
    edges, effort, all_frontiers, costs = stage_transfers(facts, model), Effort(), [], StageCosts(facts, model, pins)
    solved_cases: list[SolvedCase] = []
    for search_case in _search_cases(plan, facts):
        frontiers = [_frontier(plan.placement(stage.name), costs, search_case) for stage in facts.graph.stages]
        all_frontiers += frontiers
        formulation = formulate(facts, model, frontiers, edges, search_case.ahead)
        from meshwright.planner.solver.solve import solve  # imported here, because it loads OR-Tools

        solver_limits = replace(limits.with_default_gap(facts.cluster.num_ranks), max_deterministic_time=_SOLVER_TIME)
        result = solve(formulation.problem, solver_limits, effort=effort)
        if result.answer is not None:
            solved_cases.append(
                SolvedCase(search_case=search_case, edges=edges, formulation=formulation, result=result)
            )
    if not solved_cases:
        return None
    best = min(solved_cases, key=lambda solved: solved.objective_seconds)
    solver = solver_record(
        limits, is_whole=False, statuses=(), bound_seconds=0.0, work=count_work(all_frontiers, effort)
    )
    origin = Origin(digests=facts.digests(), pins=tuple(map(str, pins)), solver=solver)
    best_plan = best.assemble_plan(facts, model, origin)
    update = {"objective_seconds": best_plan.period_seconds, "gap": 1.0}
    best_plan = best_plan.model_copy(update={"solver": solver.model_copy(update=update)})
    violations = verify(best_plan)
    assert not violations, violations
    return best_plan


def _search_cases(plan: Plan, facts: Facts) -> tuple[SearchCase, ...]:
    """Return the search cases with the plan's steps ahead, or the furthest that the staleness allows."""
    allowed = steps_ahead_patterns(facts.graph, facts.staleness)
    ahead = plan.ahead if plan.ahead in allowed else allowed[-1]
    return search_cases(ahead, facts.staleness)


def _frontier(placement: Placement, costs: StageCosts, search_case: SearchCase) -> Frontier:
    """Return the choices in the neighbourhood of a placement that fit and that no other choice beats."""
    stage, facts, counts = costs.facts.graph.by_name[placement.stage], costs.facts, QueryCounts()
    stage_pins = [pin for pin in costs.pins if pin.stage == stage.name]
    deferral = max_deferral(search_case.ahead, facts.staleness)

    def fitting_on(kind: PoolKind) -> tuple[Candidate, ...]:
        if kind.num_ranks * _MAX_RANKS_OVER_POOL < facts.cluster.num_ranks:
            return ()
        choices = (choice for choice in _choices(placement, facts, kind, search_case) if agrees(choice, stage_pins))
        calls = [query_for_choice(facts, stage, choice, deferral=deferral, part=kind.part) for choice in choices]
        candidates = [
            cost_query(costs.model, replace(query, schedule=costs.model.with_row_split(query))) for query in calls
        ]
        if stage.generates and reward_readers(facts):
            candidates = [
                candidate._replace(
                    late_seconds=extra_reward_wait_seconds(
                        facts, kind.part, candidate.layout, candidate.schedule, candidate.seconds
                    )
                )
                for candidate in candidates
            ]
        counts.num_time_costs, counts.num_memory_costs = (
            counts.num_time_costs + len(candidates),
            counts.num_memory_costs + len(candidates),
        )
        device_bytes, host_bytes = available_bytes(facts, kind.part)
        fits = [
            candidate
            for candidate in candidates
            if candidate.peak_bytes <= device_bytes and candidate.host_bytes <= host_bytes
        ]
        groups: dict[Layout, list[Candidate]] = {}
        for candidate in fits:
            groups.setdefault(candidate.layout, []).append(candidate)
        return tuple(candidate for group in groups.values() for candidate in undominated(group))

    by_kind = {kind: fitting_on(kind) for kind in sorted(costs.kinds[stage.name])}
    pools = costs.pools[stage.name]
    return Frontier(stage=stage, pools=pools, candidates=by_kind, rejected=Counter(), smallest={}, queries=counts)


def _choices(placement: Placement, facts: Facts, kind: PoolKind, search_case: SearchCase) -> Iterator[Choice]:
    """Yield the legal choices in the neighbourhood on a kind of pool."""
    stage = facts.graph.by_name[placement.stage]
    for layout in _layouts(placement.layout, kind.num_ranks):
        if layout_rules(facts, stage, layout, kind.part):
            continue
        for schedule in schedules(facts, stage, layout, search_case):
            if _is_similar(schedule, placement.schedule, facts.workload.max_tokens) and not streaming_rules(
                facts, layout, schedule, kind.part
            ):
                yield Choice(layout, schedule)


def _layouts(layout: Layout, num_ranks: int) -> Iterator[Layout]:
    """Yield layouts on `num_ranks` ranks with at most one degree changed, and with as many replicas as that leaves."""
    for tp_factor, pp_factor in (
        (1.0, 1.0),
        *((factor, 1.0) for factor in _DEGREE_FACTORS),
        *((1.0, factor) for factor in _DEGREE_FACTORS),
    ):
        degrees = int(layout.tp * tp_factor), int(layout.pp * pp_factor)
        replica_ranks = degrees[0] * degrees[1] * layout.cp
        if min(degrees) >= 1 and num_ranks % replica_ranks == 0:
            dp, has_tp = num_ranks // replica_ranks, degrees[0] > 1
            for vpp in dict.fromkeys((1, layout.vpp if degrees[1] > 1 else 1)):
                expert_replicas = layout.expert_replicas if dp % layout.expert_replicas == 0 else 1
                sp, folded = has_tp and (layout.sp or layout.tp == 1), degrees[0] if layout.fold_size > 1 else 1
                experts = {"ep": expert_replicas * folded, "etp": degrees[0] // folded}
                yield Layout(tp=degrees[0], pp=degrees[1], dp=dp, sp=sp, cp=layout.cp, vpp=vpp, **experts)


def _is_similar(schedule: Schedule, other: Schedule, longest: int) -> bool:
    """True if two schedules have a similar number of tokens and slots at a time."""

    def is_similar(first: int, second: int) -> bool:
        return second <= first * _MAX_SIZE_FACTOR and first <= second * _MAX_SIZE_FACTOR

    return is_similar(schedule.max_tokens(longest), other.max_tokens(longest)) and is_similar(
        schedule.generation_slots, other.generation_slots
    )
