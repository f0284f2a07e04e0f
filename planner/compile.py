"""The search from the facts of a job to a verified plan; read this file first.

scope      = a search case: how many steps ahead of training each stage works, and whether state is offloaded
frontiers  = for each stage, the Pareto-optimal legal choices (layout and schedule) of the search case, with their costs
problem    = one per search case: the frontiers on every pool, the precedences, the refits and the memory limits
result     = the best answer to a problem, with a lower bound that holds for every plan of its search case
plan       = the best answer over all search cases, timed by the evaluator and checked by the verifier
no plan    = if nothing fits: the binding limits, and the smallest changes that make the job feasible
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal, TypeAlias

from meshwright.cost_models.question import CostModel
from meshwright.planner.plan.calls import Remodel
from meshwright.planner.plan.edges import Handover, handovers
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.host_workers import least_late_of, reward_readers, with_workers
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Pin, parse_pins
from meshwright.planner.plan.plan import Plan, Solver
from meshwright.planner.plan.rules import workload_violations
from meshwright.planner.plan.steps_ahead import Scope, StepsAhead, patterns, scopes
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.assemble import Origin
from meshwright.planner.search.deadline import Hurried
from meshwright.planner.search.first_plan import FirstPlans, load_solver
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontier import Frontier
from meshwright.planner.search.progress import Course, Progress
from meshwright.planner.search.refusal import NoPlan, impossible, refuse, unexplained
from meshwright.planner.search.searched import Formulated, Searched, likeliest_of
from meshwright.planner.search.solver_record import solver_record, with_gap, work_of
from meshwright.planner.search.space import check_pins
from meshwright.planner.search.stage_costs import StageCosts, first_to_cost
from meshwright.planner.search.worth import Key, Least, Worth
from meshwright.planner.solver.result import Effort, Limits, OutOfTimeError
from meshwright.profiles.stages import Stage

_REFUSAL_SECONDS = 60.0
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
    remodel: Remodel | None = None,
    progress: Progress | None = None,
    start: Plan | None = None,
) -> Plan | NoPlan:
    """Return the fastest plan that fits in memory, or the reasons why there is none.

    `digests` name inputs other than the facts, such as the measured table behind the model. `remodel` builds a cost
    model for other facts; without it, only more memory is tried as a change that makes an infeasible job feasible.
    `start` is a plan of these facts, costed by this model, that keeps the pins (`start.start_from`); the search then
    looks only for plans that are faster by more than the gap. Raises BadInput for a pin that is not legal.
    """
    limits = limits or Limits()
    parsed_pins = parse_pins(pins, facts.graph)
    check_pins(facts, parsed_pins)
    if broken := workload_violations(facts):
        return impossible(facts, broken)
    found = best_plan(facts, model, pins=parsed_pins, digests=digests, limits=limits, progress=progress, start=start)
    if isinstance(found, Plan):
        return found
    if limits.deadline is None:
        limits = replace(limits, deadline=time.monotonic() + _REFUSAL_SECONDS)
    remodel_in_time = partial(_rebuilt_cost_model, remodel, limits) if remodel else None
    try:
        return refuse(
            facts,
            _with_time_limit(limits, model),
            pins=parsed_pins,
            status=found,
            limits=limits,
            remodel=remodel_in_time,
        )
    except OutOfTimeError:
        return unexplained()


def _rebuilt_cost_model(remodel: Remodel, limits: Limits, facts: Facts) -> CostModel:
    return _with_time_limit(limits, remodel(facts))


def _with_time_limit(limits: Limits, model: CostModel) -> CostModel:
    """Return the model, wrapped so that it raises OutOfTimeError once the limits leave no time."""
    return model if limits.deadline is None and limits.stop is None else Hurried(model, limits)


def best_plan(
    facts: Facts,
    model: CostModel,
    *,
    pins: Sequence[Pin] = (),
    digests: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
    ahead: Sequence[StepsAhead] | None = None,
    start: Plan | None = None,
) -> Plan | Missing:
    """Return the fastest plan that keeps the pins, or only the status if there is none.

    `ahead` restricts the search to some of the patterns that the staleness bound allows; the default is all of them.
    `start` is as in `compile_plan`.
    """
    limits = (limits or Limits()).on(facts.cluster.num_ranks)
    allowed = patterns(facts.graph, facts.staleness) if ahead is None else ahead
    search = _Search(
        facts=facts,
        model=_with_time_limit(limits, model),
        edges=handovers(facts, model),
        pins=pins,
        ahead=allowed,
        limits=replace(limits, gap=limits.tolerance * _GAP_SHARE_WITH_REWARDS) if facts.rewards else limits,
        progress=progress,
        start=start,
    )
    search.run()
    if search.best is None and start is None:
        return "out_of_limit" if search.is_open else "infeasible"
    origins, solver, plans = {**facts.digests(), **(digests or {})}, _record(search, limits), []
    if start:
        plans.append(start.model_copy(update={"digests": origins, "solver": solver}))
    if search.best:
        origin = Origin(digests=origins, pins=tuple(str(pin) for pin in pins), solver=solver)
        plans.append(search.best.assembled(facts, model, origin))
        if with_gap(plans[-1]).solver.gap > limits.tolerance:
            plans.append(evaluate(with_workers(plans[-1], spare=0.0)))
    plan = with_gap(min(plans, key=lambda candidate: candidate.period_seconds))
    broken = verify(plan)
    assert not broken, broken
    return plan


class _NothingBetterError(Exception):
    """No remaining plan can improve on the known one by more than the gap."""


@dataclass(kw_only=True)
class _Search:
    """The search over all search cases: its inputs, the state that the cases share, and the best answers so far.

    A search case (`Scope`) is identified by its position in `scopes`.
    """

    facts: Facts
    model: CostModel
    edges: tuple[Handover, ...]
    pins: Sequence[Pin]
    ahead: Sequence[StepsAhead]
    limits: Limits
    progress: Progress | None = None
    start: Plan | None = None
    known: dict[Key, Frontier] = field(default_factory=dict)
    formulated: dict[int, Formulated] = field(default_factory=dict)
    searched: dict[int, Searched] = field(default_factory=dict)
    first: Searched | None = None
    is_enough: bool = False
    effort: Effort = field(default_factory=Effort)

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """All search cases, in the order of `ahead`: cases in which stages work fewer steps ahead come first."""
        return tuple(scope for ahead in self.ahead for scope in scopes(ahead, self.facts.staleness))

    @cached_property
    def costs(self) -> StageCosts:
        return StageCosts(self.facts, self.model, self.pins)

    @cached_property
    def course(self) -> Course:
        return Course(self.progress, len(self.scopes))

    @cached_property
    def first_plans(self) -> FirstPlans:
        return FirstPlans(
            costs=self.costs,
            scope=self.scopes[-1],
            edges=self.edges,
            limits=self.limits,
            effort=self.effort,
            begun=self._report_costing,
        )

    @cached_property
    def worth(self) -> Worth | None:
        """The pruning bound on choices, from the start plan or the first plan; None if there is neither."""
        cluster = self.facts.cluster
        if self._needs_first_plan:
            self.first = self.first_plans.best()
        if self.start is None and self.first is None:
            return None
        least: dict[Key, Least] = {}
        for stage in self.facts.graph.stages:
            spec, kinds = self.facts.models.spec(stage.role), self.costs.kinds[stage.name]
            least_on = {kind: self.model.least_seconds(stage, spec, kind.num_ranks, kind.part) for kind in kinds}
            least.update({(stage.name, scope.of(stage)): least_on for scope in self.scopes})
        known_seconds = (
            self.start.period_seconds if self.start else self.first.objective_seconds if self.first else math.inf
        )
        self.course.finds(known_seconds)
        max_seconds = list(self._max_seconds(known_seconds))
        worth = Worth(
            self.facts.graph,
            cluster.num_ranks,
            self.scopes,
            max_seconds,
            self.edges,
            least,
            late=reward_readers(self.facts),
            late_seconds=least_late_of(self.facts),
        )
        for position in range(len(self.scopes)):
            self.course.learns(position, worth.least_seconds(position))
        return worth

    def _max_seconds(self, known_seconds: float) -> Iterator[float]:
        """Yield for each search case the longest period that is worth finding.

        A plan has to be faster by more than the gap than the start plan or, in the search case of the first plan, than
        the first plan. In other search cases the first plan must not be faster than it by more than the gap.
        """
        for scope in self.scopes:
            needs_gap = self.start is not None or scope == self.scopes[-1]
            yield (
                self.limits.shorter_seconds(known_seconds) if needs_gap else self.limits.as_short_seconds(known_seconds)
            )

    @property
    def _needs_first_plan(self) -> bool:
        return self.start is None and self.facts.cluster.num_ranks >= _MIN_RANKS_FOR_FIRST_PLAN

    @cached_property
    def _num_costings(self) -> int:
        """Number of times that the choices of a stage are costed."""
        stages = self.facts.graph.stages
        keys = {(stage.name, scope.of(stage)) for stage in stages for scope in self.scopes}
        return len(keys) + len(stages) * self._needs_first_plan

    def _report_costing(self, index: int) -> None:
        """Report progress when the stage at this position of the current batch starts to be costed."""
        self.course.does("costing", len(self.costs.asked) + index, self._num_costings)

    def run(self) -> None:
        """Run the search and keep what it found when time runs out or no better plan is worth finding."""
        try:
            if self.limits.deadline is None:
                self.search_all()
            else:
                self.search_in_time()
        except OutOfTimeError:
            return
        except _NothingBetterError:
            self.is_enough = True

    def search_all(self) -> None:
        """Search every pattern of steps ahead, with and without offload, which makes room for faster choices.

        A case in which stages work further ahead replaces an earlier answer only if its period is shorter by more than
        the gap. The likeliest case is searched first, because its answer often excludes the others at once; it is
        searched again if an earlier case is as fast.
        """
        self.know_better()
        formulated = [self.formulate(scope) for scope in range(len(self.scopes))]
        likeliest = likeliest_of(formulated, self.limits.tolerance)
        likeliest_result = self.search(likeliest, self._shorter(likeliest, ()))
        searched: list[Searched] = []
        for scope in range(likeliest):
            searched.append(
                self.search(scope, self._shorter(scope, searched), self._not_inferior(scope, likeliest_result))
            )
        if any(one.result.answer is not None for one in searched):
            likeliest_result = self.search(likeliest, self._shorter(likeliest, searched))
        searched.append(likeliest_result)
        for scope in range(likeliest + 1, len(formulated)):
            searched.append(self.search(scope, self._shorter(scope, searched)))

    def know_better(self) -> None:
        """Find a better first plan among all choices of generation, so that fewer other choices need costing."""
        worth, scope = self.worth, self.scopes[-1]
        if worth is None or self.first is None:
            return
        generates, *_ = first_to_cost(self.facts.graph.stages)
        self._cost(scope, generates)
        better = self.first_plans.best(*(self.known[stage.name, scope.of(stage)] for stage in generates))
        if better is not None and better.objective_seconds < self.first.objective_seconds:
            self.first = better
            self.course.finds(better.objective_seconds)
            worth.enough_seconds = list(self._max_seconds(better.objective_seconds))
            if worth.is_enough:
                raise _NothingBetterError

    def search_in_time(self) -> None:
        """Search one pattern of steps ahead after the other, so that an answer exists early."""
        for scope in range(len(self.scopes)):
            self.formulate(scope)
            self.search(scope, self._shorter(scope, tuple(self.searched.values())))

    def formulate(self, scope: int) -> Formulated:
        case = self.scopes[scope]
        formulation = formulate(self.facts, self.model, self._frontiers(case), self.edges, case.ahead)
        formulated = self.formulated[scope] = Formulated(scope=case, edges=self.edges, formulation=formulation)
        self.course.learns(scope, formulated.least_seconds)
        return formulated

    def search(self, scope: int, *most: int | None) -> Searched:
        """Solve one search case for makespans of at most the smallest of `most`, in ticks.

        Raises OutOfTimeError if no time is left for it.
        """
        from meshwright.planner.solver.solve import solve  # already loaded by `load_solver`

        self.limits.require_time()
        formulated = self.formulated[scope]
        max_ticks = [formulated.ticks(self.worth.enough_seconds[scope])] if self.worth else []
        limit = min([*(ticks for ticks in most if ticks is not None), *max_ticks], default=None)
        limits = replace(self.limits, most=limit)
        self.course.does("searching", len(self.searched), len(self.scopes))
        result = solve(formulated.formulation.problem, limits, self._progress(scope), self.effort)
        searched = Searched(
            scope=formulated.scope, edges=formulated.edges, formulation=formulated.formulation, result=result
        )
        if searched.result.answer is not None or scope not in self.searched or self.limits.seconds_left > 0:
            self.searched[scope] = searched
        self.course.learns(scope, searched.bound_seconds)
        return searched

    def _progress(self, scope: int) -> Callable[[int | None, int], None]:
        """Return a callback that reports in seconds what the solver found and proved for a search case."""
        tick_seconds = self.formulated[scope].formulation.tick_seconds

        def report(makespan: int | None, bound: int) -> None:
            if makespan is not None:
                self.course.finds(makespan * tick_seconds)
            self.course.learns(scope, bound * tick_seconds)

        return report

    @property
    def best(self) -> Searched | None:
        """The fastest answer; ties go to the earlier search case, and to a searched case before the first plan."""
        answered = [searched for _, searched in sorted(self.searched.items()) if searched.result.answer is not None]
        candidates = [*answered, self.first] if self.first else answered
        return min(candidates, key=lambda searched: searched.objective_seconds, default=None)

    @property
    def is_open(self) -> bool:
        """True if some plans were not searched."""
        statuses = {searched.result.status for searched in self.searched.values()}
        return len(self.searched) < len(self.scopes) or "out_of_limit" in statuses

    def bound_seconds(self, scope: int) -> float:
        """A lower bound on the period of every plan of the search case, from its search or from arithmetic alone."""
        worth = self.worth if "worth" in vars(self) else None  # time may have run out before it was computed
        least = 0.0
        if scope in self.formulated:
            least = self.formulated[scope].least_seconds
        elif worth:
            least = worth.least_seconds(scope)
        if scope in self.searched:
            least = max(least, self.searched[scope].bound_seconds)
        return min(least, worth.enough_seconds[scope]) if worth else least

    def _shorter(self, scope: int, searched: Sequence[Searched]) -> int | None:
        """The largest makespan in ticks that is shorter than every answer by more than the gap, or None."""
        answered = [other.objective_seconds for other in searched if other.result.answer is not None]
        known_seconds = [*answered, self.start.period_seconds] if self.start else answered
        return self.limits.shorter(self.formulated[scope].ticks(min(known_seconds))) if known_seconds else None

    def _not_inferior(self, scope: int, other: Searched) -> int | None:
        """The largest makespan in ticks that another case's answer undercuts by no more than the gap, or None."""
        if other.result.answer is None:
            return None
        return self.limits.as_short(self.formulated[scope].ticks(other.objective_seconds))

    def _frontiers(self, scope: Scope) -> list[Frontier]:
        """Return one frontier per stage, reusing those of an earlier search case that does not differ for the stage."""
        stages = self.facts.graph.stages
        keys = [(stage.name, scope.of(stage)) for stage in stages]
        new = [stage for stage, key in zip(stages, keys, strict=True) if key not in self.known]
        for batch in first_to_cost(new):
            self._cost(scope, batch)
        return [self.known[key] for key in keys]

    def _cost(self, scope: Scope, stages: Sequence[Stage]) -> None:
        """Cost some stages in parallel, and tighten the pruning bound of the others with the result."""
        worth = self.worth
        frontiers = self.costs.side_by_side(
            partial(self._frontier, scope), stages, prepare=load_solver, begun=self._report_costing
        )
        for frontier in frontiers:
            key = scope.of(frontier.stage)
            self.known[frontier.stage.name, key] = frontier
            if worth:
                worth.learn(frontier.stage.name, key, frontier)
        if worth and worth.is_enough:
            raise _NothingBetterError

    def _frontier(self, scope: Scope, stage: Stage) -> Frontier:
        most = self.worth.most(stage.name, scope.of(stage)) if self.worth else None
        return self.costs.frontier(stage, scope, most)


def _record(search: _Search, limits: Limits) -> Solver:
    """Return the solver record of the plan; the smallest lower bound over all search cases holds for all plans."""
    found_seconds = [search.best.objective_seconds] if search.best else []
    known_seconds = [*found_seconds, search.start.period_seconds] if search.start else found_seconds
    return solver_record(
        limits,
        is_whole=search.is_enough or len(search.searched) == len(search.scopes),
        statuses={"beaten"} if search.is_enough else {searched.result.status for searched in search.searched.values()},
        bound_seconds=min(*known_seconds, *map(search.bound_seconds, range(len(search.scopes)))),
        work=work_of(search.costs.asked, search.effort),
    )
