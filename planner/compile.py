"""The search, from the facts of a job to a plan that verifies: the entry to open first.

scope      = how far stages work ahead of the training, and whether state is offloaded
frontiers  = for each stage: the legal choices of the scope, costed, without those that another beats
problem    = the frontiers on every pool, what waits for what, refits, memory: one for each scope
result     = the best answer to a problem, with a bound that holds for every plan of its scope
plan       = the best scope's answer, timed by the evaluator and checked by the verifier
no plan    = when nothing fits: what binds, and the smallest changes that would help
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
"""In which it is found out why there is no plan, where no other limit is given: it takes seconds as a rule."""

_FROM_RANKS = 16
"""On fewer ranks all choices are costed sooner than a first plan is found."""

_KEPT_OF_REWARDS = 0.95
"""Part of the gap that is searched to where rewards are waited for: their wait is rounded down by less than the rest
of it."""

Missing: TypeAlias = Literal["infeasible", "out_of_limit"]
"""Why there is no plan: none fits, or the search ended before it found or excluded one."""


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
    """The fastest plan that fits, or why there is none. Raises BadInput for a pin that is not legal.

    `digests` name inputs other than the facts, such as the measured table behind the model. `remodel` is needed to say
    which change of the facts would make a job feasible. `start` is a plan of these facts, by this model, that keeps the
    pins (`start.start_from`): what is searched for is better by more than the gap.
    """
    limits = limits or Limits()
    fixed = parse_pins(pins, facts.graph)
    check_pins(facts, fixed)
    if broken := workload_violations(facts):
        return impossible(facts, broken)
    best = best_plan(facts, model, pins=fixed, digests=digests, limits=limits, progress=progress, start=start)
    if isinstance(best, Plan):
        return best
    if limits.deadline is None:
        limits = replace(limits, deadline=time.monotonic() + _REFUSAL_SECONDS)
    heeding = partial(_remodelled, remodel, limits) if remodel else None
    try:
        return refuse(facts, _until(limits, model), pins=fixed, status=best, limits=limits, remodel=heeding)
    except OutOfTimeError:
        return unexplained()


def _remodelled(remodel: Remodel, limits: Limits, facts: Facts) -> CostModel:
    return _until(limits, remodel(facts))


def _until(limits: Limits, model: CostModel) -> CostModel:
    """The model, answering while there is time where that may end."""
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
    """The fastest plan that keeps the pins, which may exclude every choice; without reasons when there is none.

    `ahead` may be some of the patterns that the bound on staleness allows; all of them are searched without it.
    `start` as in `compile_plan`.
    """
    limits = (limits or Limits()).on(facts.cluster.num_ranks)
    allowed = patterns(facts.graph, facts.staleness) if ahead is None else ahead
    search = _Search(
        facts=facts,
        model=_until(limits, model),
        edges=handovers(facts, model),
        pins=pins,
        ahead=allowed,
        limits=replace(limits, gap=limits.tolerance * _KEPT_OF_REWARDS) if facts.rewards else limits,
        progress=progress,
        start=start,
    )
    search.run()
    if search.best is None and start is None:
        return "out_of_limit" if search.is_open else "infeasible"
    origins, solver, found = {**facts.digests(), **(digests or {})}, _record(search, limits), []
    if start:
        found.append(start.model_copy(update={"digests": origins, "solver": solver}))
    if search.best:
        origin = Origin(digests=origins, pins=tuple(str(pin) for pin in pins), solver=solver)
        found.append(search.best.assembled(facts, model, origin))
        if with_gap(found[-1]).solver.gap > limits.tolerance:
            found.append(evaluate(with_workers(found[-1], spare=0.0)))
    plan = with_gap(min(found, key=lambda one: one.period_seconds))
    broken = verify(plan)
    assert not broken, broken
    return plan


class _EnoughError(Exception):
    """No plan is worth finding beside the one that is known."""


@dataclass(kw_only=True)
class _Search:
    """The search of every scope, what is the same in all of them, and what was found so far; scopes are told apart by
    their positions."""

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
        """All that are searched, those with stages less far ahead first."""
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
            begun=self._begun,
        )

    @cached_property
    def worth(self) -> Worth | None:
        """How slow choices may be, where a plan is known: the one to start from or the first one."""
        cluster = self.facts.cluster
        if self._looks_for_first:
            self.first = self.first_plans.best()
        if self.start is None and self.first is None:
            return None
        least: dict[Key, Least] = {}
        for stage in self.facts.graph.stages:
            spec, kinds = self.facts.models.spec(stage.role), self.costs.kinds[stage.name]
            same = {kind: self.model.least_seconds(stage, spec, kind.num_ranks, kind.part) for kind in kinds}
            least.update({(stage.name, scope.of(stage)): same for scope in self.scopes})
        known = self.start.period_seconds if self.start else self.first.objective_seconds if self.first else math.inf
        self.course.finds(known)
        enough = list(self._enough_seconds(known))
        worth = Worth(
            self.facts.graph,
            cluster.num_ranks,
            self.scopes,
            enough,
            self.edges,
            least,
            late=reward_readers(self.facts),
            late_seconds=least_late_of(self.facts),
        )
        for position in range(len(self.scopes)):
            self.course.learns(position, worth.least_seconds(position))
        return worth

    def _enough_seconds(self, known: float) -> Iterator[float]:
        """Of each scope what a plan has to be within to be worth finding: shorter by more than the gap than the plan to
        start from or, in its own scope, than the first one; in others than which that is not shorter by more."""
        for scope in self.scopes:
            is_likewise = self.start is not None or scope == self.scopes[-1]
            yield self.limits.shorter_seconds(known) if is_likewise else self.limits.as_short_seconds(known)

    @property
    def _looks_for_first(self) -> bool:
        return self.start is None and self.facts.cluster.num_ranks >= _FROM_RANKS

    @cached_property
    def _num_costings(self) -> int:
        """How often choices of a stage are costed."""
        stages = self.facts.graph.stages
        keys = {(stage.name, scope.of(stage)) for stage in stages for scope in self.scopes}
        return len(keys) + len(stages) * self._looks_for_first

    def _begun(self, index: int) -> None:
        """Of those that are costed now, the one at this position."""
        self.course.does("costing", len(self.costs.asked) + index, self._num_costings)

    def run(self) -> None:
        """Searches the scopes; what was found stays when the time is over, or nothing better is worth finding."""
        try:
            if self.limits.deadline is None:
                self.search_all()
            else:
                self.search_in_time()
        except OutOfTimeError:
            return
        except _EnoughError:
            self.is_enough = True

    def search_all(self) -> None:
        """Every pattern of steps ahead, offload included: state that waits in the host makes room for what is faster.

        Stages work further ahead only where that makes the turn shorter by more than the gap. The likeliest scope is
        searched out of turn, and again if one before it is as short: its answer often excludes the others at once.
        """
        self.know_better()
        formulated = [self.formulate(scope) for scope in range(len(self.scopes))]
        likeliest = likeliest_of(formulated, self.limits.tolerance)
        early = self.search(likeliest, self._shorter(likeliest, ()))
        searched: list[Searched] = []
        for scope in range(likeliest):
            searched.append(self.search(scope, self._shorter(scope, searched), self._as_short(scope, early)))
        if any(one.result.answer is not None for one in searched):
            early = self.search(likeliest, self._shorter(likeliest, searched))
        searched.append(early)
        for scope in range(likeliest + 1, len(formulated)):
            searched.append(self.search(scope, self._shorter(scope, searched)))

    def know_better(self) -> None:
        """Finds a better first plan among all choices of generation, so that fewer of the others are worth costing."""
        worth, scope = self.worth, self.scopes[-1]
        if worth is None or self.first is None:
            return
        generates, *_ = first_to_cost(self.facts.graph.stages)
        self._cost(scope, generates)
        better = self.first_plans.best(*(self.known[stage.name, scope.of(stage)] for stage in generates))
        if better is not None and better.objective_seconds < self.first.objective_seconds:
            self.first = better
            self.course.finds(better.objective_seconds)
            worth.enough_seconds = list(self._enough_seconds(better.objective_seconds))
            if worth.is_enough:
                raise _EnoughError

    def search_in_time(self) -> None:
        """One pattern of steps ahead after the other."""
        for scope in range(len(self.scopes)):
            self.formulate(scope)
            self.search(scope, self._shorter(scope, tuple(self.searched.values())))

    def formulate(self, scope: int) -> Formulated:
        asked = self.scopes[scope]
        formulation = formulate(self.facts, self.model, self._frontiers(asked), self.edges, asked.ahead)
        one = self.formulated[scope] = Formulated(scope=asked, edges=self.edges, formulation=formulation)
        self.course.learns(scope, one.least_seconds)
        return one

    def search(self, scope: int, *most: int | None) -> Searched:
        """What the search of one scope answers within the least of `most` ticks.

        Raises OutOfTimeError where no time is left for it.
        """
        from meshwright.planner.solver.solve import solve  # loaded by then, see `load_solver`

        self.limits.require_time()
        one = self.formulated[scope]
        known = [one.ticks(self.worth.enough_seconds[scope])] if self.worth else []
        within = min([*(ticks for ticks in most if ticks is not None), *known], default=None)
        limits = replace(self.limits, most=within)
        self.course.does("searching", len(self.searched), len(self.scopes))
        result = solve(one.formulation.problem, limits, self._progress(scope), self.effort)
        found = Searched(scope=one.scope, edges=one.edges, formulation=one.formulation, result=result)
        if found.result.answer is not None or scope not in self.searched or self.limits.seconds_left > 0:
            self.searched[scope] = found
        self.course.learns(scope, found.bound_seconds)
        return found

    def _progress(self, scope: int) -> Callable[[int | None, int], None]:
        """Tells what the search of a scope has found and proven, in seconds."""
        tick_seconds = self.formulated[scope].formulation.tick_seconds

        def tell(makespan: int | None, bound: int) -> None:
            if makespan is not None:
                self.course.finds(makespan * tick_seconds)
            self.course.learns(scope, bound * tick_seconds)

        return tell

    @property
    def best(self) -> Searched | None:
        """The fastest answer, of scopes that are equally fast the first; the very first one where it is faster."""
        answered = [one for _, one in sorted(self.searched.items()) if one.result.answer is not None]
        every = [*answered, self.first] if self.first else answered
        return min(every, key=lambda one: one.objective_seconds, default=None)

    @property
    def is_open(self) -> bool:
        """Whether there may be plans that were not looked at."""
        statuses = {one.result.status for one in self.searched.values()}
        return len(self.searched) < len(self.scopes) or "out_of_limit" in statuses

    def bound_seconds(self, scope: int) -> float:
        """No plan of the scope is faster: as its search has proven, or by arithmetic alone."""
        worth = self.worth if "worth" in vars(self) else None  # it may be that there was no time for it
        least = 0.0
        if scope in self.formulated:
            least = self.formulated[scope].least_seconds
        elif worth:
            least = worth.least_seconds(scope)
        if scope in self.searched:
            least = max(least, self.searched[scope].bound_seconds)
        return min(least, worth.enough_seconds[scope]) if worth else least

    def _shorter(self, scope: int, searched: Sequence[Searched]) -> int | None:
        """The most ticks of a scope that are fewer, by more than the gap, than every answer; None when there is
        none."""
        answered = [other.objective_seconds for other in searched if other.result.answer is not None]
        known = [*answered, self.start.period_seconds] if self.start else answered
        return self.limits.shorter(self.formulated[scope].ticks(min(known))) if known else None

    def _as_short(self, scope: int, other: Searched) -> int | None:
        """The most ticks of a scope than which another's answer is not shorter by more than the gap; None when there is
        none."""
        if other.result.answer is None:
            return None
        return self.limits.as_short(self.formulated[scope].ticks(other.objective_seconds))

    def _frontiers(self, scope: Scope) -> list[Frontier]:
        """One for each stage; those of an earlier scope that does not differ for the stage are kept."""
        stages = self.facts.graph.stages
        keys = [(stage.name, scope.of(stage)) for stage in stages]
        new = [stage for stage, key in zip(stages, keys, strict=True) if key not in self.known]
        for alike in first_to_cost(new):
            self._cost(scope, alike)
        return [self.known[key] for key in keys]

    def _cost(self, scope: Scope, stages: Sequence[Stage]) -> None:
        """Costs some stages side by side, and learns from them what is worth costing of the others."""
        worth = self.worth
        found = self.costs.side_by_side(partial(self._frontier, scope), stages, prepare=load_solver, begun=self._begun)
        for one in found:
            key = scope.of(one.stage)
            self.known[one.stage.name, key] = one
            if worth:
                worth.learn(one.stage.name, key, one)
        if worth and worth.is_enough:
            raise _EnoughError

    def _frontier(self, scope: Scope, stage: Stage) -> Frontier:
        most = self.worth.most(stage.name, scope.of(stage)) if self.worth else None
        return self.costs.frontier(stage, scope, most)


def _record(search: _Search, limits: Limits) -> Solver:
    """How the answer was found; a bound on every scope is one on all plans."""
    found = [search.best.objective_seconds] if search.best else []
    known = [*found, search.start.period_seconds] if search.start else found
    return solver_record(
        limits,
        is_whole=search.is_enough or len(search.searched) == len(search.scopes),
        statuses={"beaten"} if search.is_enough else {one.result.status for one in search.searched.values()},
        bound_seconds=min(*known, *map(search.bound_seconds, range(len(search.scopes)))),
        work=work_of(search.costs.asked, search.effort),
    )
