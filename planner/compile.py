"""The search from the facts of a job to a verified plan; read this file first.

cases      = search cases: how many steps ahead of training each stage works, and whether state is offloaded
first      = a plan of default choices, found quickly
pruning    = from the first plan: how long a choice may take beside the fastest choices of the other stages
frontiers  = for each case and stage: the Pareto-optimal legal choices (layout and schedule) within the pruning bound
problem    = for each case: the frontiers on every pool, the precedences, the refits and the memory limits
result     = the best answer to a problem, with a lower bound that holds for every plan of its case
             (`planner/solver/search.py`: bounds of combinations of choices in arrays, then CP-SAT)
plan       = the best answer over all cases, timed by the evaluator and checked by the verifier
no plan    = if nothing fits: the binding limits, and the smallest changes that make the job feasible
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import CostModelBuilder, StageTransfer, stage_transfers
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.layout_and_schedule_rules import workload_violations
from meshwright.planner.plan.pins import Pin, parse_pins
from meshwright.planner.plan.plan import Plan, Solver
from meshwright.planner.plan.reward_workers import extra_reward_wait_bound, reward_readers, with_workers
from meshwright.planner.plan.steps_ahead import SearchCase, StepsAhead, search_cases, steps_ahead_patterns
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.assemble import Origin
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontiers import Frontier, StageCosts, costing_order
from meshwright.planner.search.legal_choices import check_pins
from meshwright.planner.search.no_plan import NoPlan, explain_no_plan, no_legal_training, unexplained_no_plan
from meshwright.planner.search.pruning_bound import (
    LowerBounds,
    PruningBound,
    StageKey,
    default_frontiers,
    first_plan,
    load_solver,
)
from meshwright.planner.search.search_case import (
    FormulatedCase,
    SolvedCase,
    count_work,
    likeliest_index,
    solver_record,
    with_gap,
)
from meshwright.planner.search.search_control import ProgressCallback, ProgressReporter, TimeLimitedCostModel
from meshwright.planner.solver.result import Effort, Limits, OutOfTimeError
from meshwright.profiles.stages import Stage

_EXPLANATION_SECONDS = 60.0
"""Time limit for explaining why there is no plan, if the user set none; it usually takes a few seconds."""

_MIN_RANKS_FOR_FIRST_PLAN = 16
"""Smallest cluster for which a first plan is searched; on fewer ranks, costing every choice is faster than finding it.
"""

_GAP_SHARE_WITH_REWARDS = 0.95
"""Share of the requested gap that the search uses if stages wait for rewards.

The solver rounds the wait for rewards down by less than the rest of the gap.
"""

Missing: TypeAlias = Literal["infeasible", "out_of_limit"]
"""The reason why there is no plan: none fits, or the search ended before it found or excluded one."""


def compile_plan(
    facts: Facts,
    model: CostModel,
    *,
    pins: Sequence[str] = (),
    digests: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    rebuild_cost_model: CostModelBuilder | None = None,
    progress: ProgressCallback | None = None,
    start: Plan | None = None,
) -> Plan | NoPlan:
    """Return the fastest plan that fits in memory, or the reasons why there is none.

    `digests` are those of inputs other than the facts, such as the measured table behind the model.
    `rebuild_cost_model` builds a cost model for other facts; without it, only more memory is tried as a change that
    makes an infeasible job feasible. `start` is a plan of these facts, costed by this model, that keeps the pins
    (`re_evaluated_or_violation` in `planner/search/re_evaluate.py`); the search then looks only for plans that are
    faster by more than the gap. Raises BadInput for a pin that is not legal.
    """
    limits = limits or Limits()
    parsed_pins = parse_pins(pins, facts.graph)
    check_pins(facts, parsed_pins)
    if broken := workload_violations(facts):
        return no_legal_training(facts, broken)
    found = best_plan(facts, model, pins=parsed_pins, digests=digests, limits=limits, progress=progress, start=start)
    if isinstance(found, Plan):
        return found
    if limits.deadline is None:
        limits = replace(limits, deadline=time.monotonic() + _EXPLANATION_SECONDS)
    rebuild_in_time = partial(_rebuilt_cost_model, rebuild_cost_model, limits) if rebuild_cost_model else None
    try:
        return explain_no_plan(
            facts,
            _with_time_limit(limits, model),
            pins=parsed_pins,
            status=found,
            limits=limits,
            rebuild_cost_model=rebuild_in_time,
        )
    except OutOfTimeError:
        return unexplained_no_plan()


def _rebuilt_cost_model(rebuild: CostModelBuilder, limits: Limits, facts: Facts) -> CostModel:
    return _with_time_limit(limits, rebuild(facts))


def _with_time_limit(limits: Limits, model: CostModel) -> CostModel:
    """Return the model, wrapped so that it raises OutOfTimeError once the limits leave no time."""
    return model if limits.deadline is None and limits.stop is None else TimeLimitedCostModel(model, limits)


def best_plan(
    facts: Facts,
    model: CostModel,
    *,
    pins: Sequence[Pin] = (),
    digests: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    progress: ProgressCallback | None = None,
    ahead: Sequence[StepsAhead] | None = None,
    start: Plan | None = None,
) -> Plan | Missing:
    """Return the fastest plan that keeps the pins or, if there is none, the reason; the pins may exclude every choice.

    `ahead` restricts the search to some of the patterns that the staleness bound allows; the default is all of them.
    `start` is as in `compile_plan`.
    """
    limits = (limits or Limits()).with_default_gap(facts.cluster.num_ranks)
    allowed = steps_ahead_patterns(facts.graph, facts.staleness) if ahead is None else ahead
    cases = tuple(case for steps in allowed for case in search_cases(steps, facts.staleness))
    search = _Search(
        facts=facts,
        edges=stage_transfers(facts, model),
        cases=cases,
        costs=StageCosts(facts, _with_time_limit(limits, model), pins),
        limits=replace(limits, gap=limits.tolerance * _GAP_SHARE_WITH_REWARDS) if facts.rewards else limits,
        reporter=ProgressReporter(progress, len(cases)),
        start=start,
    )
    findings = _Findings()
    with suppress(OutOfTimeError):
        _search(search, findings)
    best = findings.best
    if best is None and start is None:
        return "out_of_limit" if findings.is_open(len(cases)) else "infeasible"
    solver = _solver_record(search, findings, limits)
    origin = Origin(digests={**facts.digests(), **(digests or {})}, pins=tuple(map(str, pins)), solver=solver)
    plans = []
    if start:
        plans.append(start.model_copy(update={"digests": dict(origin.digests), "solver": solver}))
    if best:
        plans.append(best.assemble_plan(facts, model, origin))
        if with_gap(plans[-1]).solver.gap > limits.tolerance:
            plans.append(evaluate(with_workers(plans[-1], wait_tolerance=0.0)))
    plan = with_gap(min(plans, key=lambda candidate: candidate.period_seconds))
    broken = verify(plan)
    assert not broken, broken
    return plan


@dataclass(frozen=True, kw_only=True)
class _Search:
    """The inputs of a search. A case is named by its position in `cases`; `costs`, `reporter` and `effort` record what
    was done."""

    facts: Facts
    edges: tuple[StageTransfer, ...]
    cases: tuple[SearchCase, ...]
    costs: StageCosts
    limits: Limits
    reporter: ProgressReporter
    start: Plan | None
    effort: Effort = field(default_factory=Effort)

    @property
    def needs_first_plan(self) -> bool:
        return self.start is None and self.facts.cluster.num_ranks >= _MIN_RANKS_FOR_FIRST_PLAN

    def report_costing(self, index: int) -> None:
        """Report progress when the stage at this position of the current batch starts to be costed."""
        stages = self.facts.graph.stages
        keys = {(stage.name, case.key_for(stage)) for stage in stages for case in self.cases}
        total = len(keys) + len(stages) * self.needs_first_plan
        self.reporter.set_phase("costing", len(self.costs.costed_frontiers) + index, total)


@dataclass
class _Findings:
    """The findings of a search so far; a plan and a bound can be made of them whenever the search ends.

    `is_closed` is True once no remaining plan can improve on the known one by more than the gap, and
    `has_stage_too_large` if a stage fits in no search case.
    """

    first: SolvedCase | None = None
    pruning: PruningBound | None = None
    frontiers: dict[StageKey, Frontier] = field(default_factory=dict)
    formulated: dict[int, FormulatedCase] = field(default_factory=dict)
    searched: dict[int, SolvedCase] = field(default_factory=dict)
    is_closed: bool = False
    has_stage_too_large: bool = False

    @property
    def best(self) -> SolvedCase | None:
        """The fastest answer; ties go to the earlier search case, and to a searched case before the first plan."""
        answered = [searched for _, searched in sorted(self.searched.items()) if searched.result.answer is not None]
        candidates = [*answered, self.first] if self.first else answered
        return min(candidates, key=lambda searched: searched.objective_seconds, default=None)

    def is_open(self, num_cases: int) -> bool:
        """True if some plans were not searched."""
        if self.has_stage_too_large:
            return False
        statuses = {searched.result.status for searched in self.searched.values()}
        return len(self.searched) < num_cases or "out_of_limit" in statuses

    def bound_seconds(self, case: int) -> float:
        """A lower bound on the period of every plan of the search case, from its search or from arithmetic alone."""
        bound = 0.0
        if case in self.formulated:
            bound = self.formulated[case].lower_bound_seconds
        elif self.pruning:
            bound = self.pruning.lower_bound_seconds(case)
        if case in self.searched:
            bound = max(bound, self.searched[case].bound_seconds)
        return min(bound, self.pruning.max_period_seconds[case]) if self.pruning else bound


def _search(search: _Search, findings: _Findings) -> None:
    """Find a first plan, derive the pruning bound, then cost, formulate and solve every search case.

    Raises OutOfTimeError when the limits leave no time; the findings keep what was found until then.
    """
    default_choices: list[Frontier] = []
    if search.needs_first_plan:
        default_choices = default_frontiers(search.costs, search.cases[-1], begun=search.report_costing)
        findings.first = _first_plan(search, default_choices)
    findings.pruning = _pruning_bound(search, findings.first)
    findings.has_stage_too_large = findings.pruning is None and _has_stage_too_large(search)
    if findings.has_stage_too_large:
        return
    if search.limits.deadline is None:
        _improve_first_plan(search, findings, default_choices)
        _search_likeliest_first(search, findings)
    else:
        _search_in_order(search, findings)


def _first_plan(search: _Search, frontiers: Sequence[Frontier]) -> SolvedCase | None:
    return first_plan(
        search.costs,
        search.cases[-1],
        frontiers,
        edges=search.edges,
        limits=search.limits,
        effort=search.effort,
    )


def _has_stage_too_large(search: _Search) -> bool:
    """Return True if some stage has no choice that fits, in whatever search case; nothing is timed for it."""
    for stage in sorted(search.facts.graph.stages, key=lambda stage: not stage.trains):
        case_by_choices = {case.key_for(stage): case for case in search.cases}
        if not any(search.costs.fits(stage, case) for case in case_by_choices.values()):
            return True
    return False


def _pruning_bound(search: _Search, first: SolvedCase | None) -> PruningBound | None:
    """The pruning bound on choices, from the start plan or the first plan; None if there is neither."""
    facts, costs = search.facts, search.costs
    if search.start is not None:
        known_seconds = search.start.period_seconds
    elif first is not None:
        known_seconds = first.objective_seconds
    else:
        return None
    lower_bounds: dict[StageKey, LowerBounds] = {}
    for stage in facts.graph.stages:
        spec, kinds = facts.models.spec(stage.role), costs.kinds[stage.name]
        on_kinds = {kind: costs.model.lower_bound_seconds(stage, spec, kind.num_ranks, kind.part) for kind in kinds}
        lower_bounds.update({(stage.name, case.key_for(stage)): on_kinds for case in search.cases})
    search.reporter.add_plan(known_seconds)
    pruning = PruningBound(
        facts.graph,
        facts.cluster.num_ranks,
        search.cases,
        _max_seconds(search, known_seconds),
        search.edges,
        lower_bounds,
        late=reward_readers(facts),
        late_seconds=extra_reward_wait_bound(facts),
    )
    for case in range(len(search.cases)):
        search.reporter.raise_bound(case, pruning.lower_bound_seconds(case))
    return pruning


def _max_seconds(search: _Search, known_seconds: float) -> list[float]:
    """Return for each search case the longest period that is worth finding.

    A start plan must be beaten by more than the gap in every search case. A first plan must be beaten by more than the
    gap only in its own search case; in the others a period may be longer than that of the first plan by up to the gap.
    """
    limits, of_first = search.limits, search.cases[-1]
    return [
        limits.improving_seconds(known_seconds)
        if search.start is not None or case == of_first
        else limits.comparable_seconds(known_seconds)
        for case in search.cases
    ]


def _improve_first_plan(search: _Search, findings: _Findings, default_choices: Sequence[Frontier]) -> None:
    """Find a better first plan among all choices of generation, so that fewer choices of the other stages need
    costing."""
    first, pruning, case = findings.first, findings.pruning, search.cases[-1]
    if first is None or pruning is None:
        return
    generates, *_ = costing_order(search.facts.graph.stages)
    _cost(search, findings, case, generates)
    if findings.is_closed:
        return
    costed = {stage.name: findings.frontiers[stage.name, case.key_for(stage)] for stage in generates}
    better = _first_plan(search, [costed.get(default.stage.name, default) for default in default_choices])
    if better is not None and better.objective_seconds < first.objective_seconds:
        findings.first = better
        search.reporter.add_plan(better.objective_seconds)
        pruning.max_period_seconds = _max_seconds(search, better.objective_seconds)
        findings.is_closed = pruning.excludes_all_plans


def _search_likeliest_first(search: _Search, findings: _Findings) -> None:
    """Search every pattern of steps ahead, with and without offload (state on the host makes room for faster
    choices).

    A case in which stages work further ahead replaces an earlier answer only if its period is shorter by more than
    the gap. The case that is likeliest to have the best plan (`likeliest_index`) is searched first, because its answer
    often excludes the others at once; it is searched again if an earlier case is as fast.
    """
    cases = range(len(search.cases))
    for case in cases:
        _formulate(search, findings, case)
        if findings.is_closed:
            return
    formulated = [findings.formulated[case] for case in cases]
    likeliest = likeliest_index(formulated, search.limits.tolerance)
    early = _solve(search, findings, likeliest, _max_improving_ticks(search, formulated[likeliest], ()))
    searched: list[SolvedCase] = []
    for case in cases[:likeliest]:
        max_ticks = (
            _max_improving_ticks(search, formulated[case], searched),
            _max_comparable_ticks(search, formulated[case], early),
        )
        searched.append(_solve(search, findings, case, *max_ticks))
    if any(earlier.result.answer is not None for earlier in searched):
        early = _solve(search, findings, likeliest, _max_improving_ticks(search, formulated[likeliest], searched))
    searched.append(early)
    for case in cases[likeliest + 1 :]:
        searched.append(_solve(search, findings, case, _max_improving_ticks(search, formulated[case], searched)))


def _search_in_order(search: _Search, findings: _Findings) -> None:
    """Search one pattern of steps ahead after the other, so that an answer exists early."""
    for case in range(len(search.cases)):
        _formulate(search, findings, case)
        if findings.is_closed:
            return
        max_ticks = _max_improving_ticks(search, findings.formulated[case], tuple(findings.searched.values()))
        _solve(search, findings, case, max_ticks)


def _formulate(search: _Search, findings: _Findings, position: int) -> None:
    """Cost the stages whose choices no earlier case has costed, and formulate the case's problem of all stages.

    Nothing is formulated once the findings are closed.
    """
    facts, case = search.facts, search.cases[position]
    keys = {stage: (stage.name, case.key_for(stage)) for stage in facts.graph.stages}
    for batch in costing_order([stage for stage, key in keys.items() if key not in findings.frontiers]):
        _cost(search, findings, case, batch)
        if findings.is_closed:
            return
    frontiers = [findings.frontiers[key] for key in keys.values()]
    formulation = formulate(facts, search.costs.model, frontiers, search.edges, case.ahead)
    formulated = FormulatedCase(search_case=case, edges=search.edges, formulation=formulation)
    findings.formulated[position] = formulated
    search.reporter.raise_bound(position, formulated.lower_bound_seconds)


def _cost(search: _Search, findings: _Findings, case: SearchCase, stages: Sequence[Stage]) -> None:
    """Cost some stages in parallel, and tighten the pruning bound of the others with the result."""
    pruning = findings.pruning
    work = partial(_frontier, search.costs, pruning, case)
    for frontier in search.costs.in_parallel(work, stages, prepare=load_solver, on_start=search.report_costing):
        key = case.key_for(frontier.stage)
        findings.frontiers[frontier.stage.name, key] = frontier
        if pruning:
            pruning.tighten(frontier.stage.name, key, frontier)
    findings.is_closed = pruning is not None and pruning.excludes_all_plans


def _frontier(costs: StageCosts, pruning: PruningBound | None, case: SearchCase, stage: Stage) -> Frontier:
    return costs.frontier(stage, case, pruning.time_limits(stage.name, case.key_for(stage)) if pruning else None)


def _solve(search: _Search, findings: _Findings, case: int, *max_ticks: int | None) -> SolvedCase:
    """Solve one search case for makespans of at most the smallest of `max_ticks`.

    An answer that is shorter than the first plan by less than the gap will do if it is within the gap of the bound.
    Raises OutOfTimeError if no time is left for it.
    """
    from meshwright.planner.solver.solve import solve  # already loaded by `load_solver`

    search.limits.require_time()
    formulated, reporter = findings.formulated[case], search.reporter
    problem, tick_seconds = formulated.formulation.problem, formulated.formulation.tick_seconds
    pruned = [formulated.ticks(findings.pruning.max_period_seconds[case])] if findings.pruning else []
    hard_limits = [ticks for ticks in max_ticks if ticks is not None]
    limit = min([*hard_limits, *pruned], default=None)
    better = [formulated.ticks(findings.first.objective_seconds) - 1] if findings.first else []
    acceptable = min([*hard_limits, *better]) if better else None

    def report(makespan: int | None, bound: int) -> None:
        if makespan is not None:
            reporter.add_plan(makespan * tick_seconds)
        reporter.raise_bound(case, bound * tick_seconds)

    reporter.set_phase("searching", len(findings.searched), len(search.cases))
    limits = replace(search.limits, max_makespan=limit, max_acceptable_makespan=acceptable)
    result = solve(problem, limits, report, search.effort)
    searched = SolvedCase(
        search_case=formulated.search_case, edges=formulated.edges, formulation=formulated.formulation, result=result
    )
    if result.answer is not None or case not in findings.searched or search.limits.seconds_left > 0:
        findings.searched[case] = searched
    reporter.raise_bound(case, searched.bound_seconds)
    return searched


def _max_improving_ticks(search: _Search, case: FormulatedCase, searched: Sequence[SolvedCase]) -> int | None:
    """The largest makespan in ticks that is shorter by more than the gap than every answer and the start plan; None if
    there is neither."""
    known_seconds = [other.objective_seconds for other in searched if other.result.answer is not None]
    if search.start:
        known_seconds.append(search.start.period_seconds)
    return search.limits.improving_makespan(case.ticks(min(known_seconds))) if known_seconds else None


def _max_comparable_ticks(search: _Search, case: FormulatedCase, other: SolvedCase) -> int | None:
    """The largest makespan in ticks that another case's answer beats by no more than the gap; None if that case has no
    answer."""
    if other.result.answer is None:
        return None
    return search.limits.comparable_makespan(case.ticks(other.objective_seconds))


def _solver_record(search: _Search, findings: _Findings, limits: Limits) -> Solver:
    """Return the solver record of the plan; the smallest lower bound over all search cases holds for all plans."""
    best, start, num_cases = findings.best, search.start, len(search.cases)
    known_seconds = [
        *([best.objective_seconds] if best else []),
        *([start.period_seconds] if start else []),
    ]
    statuses = {searched.result.status for searched in findings.searched.values()}
    return solver_record(
        limits,
        is_whole=findings.is_closed or len(findings.searched) == num_cases,
        statuses={"beaten"} if findings.is_closed else statuses,
        bound_seconds=min(*known_seconds, *map(findings.bound_seconds, range(num_cases))),
        work=count_work(search.costs.costed_frontiers, search.effort),
    )
