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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from typing import Literal, TypeAlias

from meshwright.cost_models.question import CostModel
from meshwright.planner.plan.calls import Remodel
from meshwright.planner.plan.edges import Handover, handovers
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Pin, Ranks, parse_pins
from meshwright.planner.plan.plan import Plan, Solver
from meshwright.planner.plan.steps_ahead import Scope, ScopeKey, StepsAhead, patterns, scopes
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.assemble import Origin, Pick, assemble
from meshwright.planner.search.deadline import Hurried, OutOfTimeError
from meshwright.planner.search.formulate import Formulation, formulate
from meshwright.planner.search.frontier import Frontier, frontier, kinds_of
from meshwright.planner.search.parallel import side_by_side
from meshwright.planner.search.refusal import NoPlan, refuse, unexplained
from meshwright.planner.search.space import check_pins
from meshwright.planner.search.worth import Key, Least, Worth
from meshwright.planner.solver.bounds import least_makespan
from meshwright.planner.solver.result import Answer, Limits, Result
from meshwright.profiles.stages import STAGES, Stage

Progress = Callable[[float, float], None]
"""Called with the period and the bound, in seconds, of each better plan that the search finds."""

_FROM_RANKS = 16
"""On fewer ranks all choices are costed sooner than a first plan is found."""

_LARGE = 4
"""A first plan has pools of this part of all ranks and more."""

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
) -> Plan | NoPlan:
    """The fastest plan that fits, or why there is none. Raises BadInput for a pin that is not legal.

    `digests` name inputs other than the facts, such as the measured table behind the model. `remodel` is needed to say
    which change of the facts would make a job feasible.
    """
    limits = limits or Limits()
    fixed = parse_pins(pins)
    check_pins(facts, fixed)
    best = best_plan(facts, model, pins=fixed, digests=digests, limits=limits, progress=progress)
    if isinstance(best, Plan):
        return best
    try:
        return refuse(facts, _until(limits, model), pins=fixed, status=best, limits=limits, remodel=remodel)
    except OutOfTimeError:
        return unexplained()


def _until(limits: Limits, model: CostModel) -> CostModel:
    """The model, answering until the deadline where there is one."""
    return model if limits.deadline is None else Hurried(model, limits.deadline)


def best_plan(
    facts: Facts,
    model: CostModel,
    *,
    pins: Sequence[Pin] = (),
    digests: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
    ahead: Sequence[StepsAhead] | None = None,
) -> Plan | Missing:
    """The fastest plan that keeps the pins, which may exclude every choice; without reasons when there is none.

    `ahead` may be some of the patterns that the bound on staleness allows; all of them are searched without it.
    """
    limits = (limits or Limits()).on(facts.cluster.num_ranks)
    allowed = patterns(facts.staleness) if ahead is None else ahead
    hurried = _until(limits, model)
    search = _Search(facts=facts, model=hurried, pins=pins, ahead=allowed, limits=limits, progress=progress)
    searched = search.search_all() if limits.deadline is None else search.search_in_time()
    answered = [one for one in searched if one.result.answer is not None]
    if not answered:
        unknown = search.left_out or any(one.result.status == "out_of_limit" for one in searched)
        return "out_of_limit" if unknown else "infeasible"
    best = min(answered, key=lambda one: one.objective_seconds)
    origin = Origin(
        digests={**facts.digests(), **(digests or {})},
        pins=tuple(str(pin) for pin in pins),
        solver=_record(searched, limits, is_whole=not search.left_out),
    )
    assert best.result.answer is not None
    picks, order = _picks(best.formulation, best.result.answer), _order(best.formulation, best.result.answer)
    plan = assemble(facts, model, handovers=best.edges, picks=picks, order=order, origin=origin, ahead=best.scope.ahead)
    plan = _with_gap(plan)
    broken = verify(plan)
    assert not broken, broken
    return plan


@dataclass(frozen=True, kw_only=True)
class _Formulated:
    """One scope and its problem."""

    scope: Scope
    edges: tuple[Handover, ...]
    formulation: Formulation

    @property
    def least_seconds(self) -> float:
        """A bound by arithmetic alone, infinite when a stage has no choice."""
        problem = self.formulation.problem
        has_choices = all(call.options for call in problem.calls)
        return least_makespan(problem) * self.formulation.tick_seconds if has_choices else math.inf

    def ticks(self, seconds: float) -> int:
        return math.ceil(seconds / self.formulation.tick_seconds)


@dataclass(frozen=True, kw_only=True)
class _Searched(_Formulated):
    """One scope, its problem and what the search answered."""

    result: Result

    @property
    def objective_seconds(self) -> float:
        assert self.result.objective is not None
        return self.result.objective * self.formulation.tick_seconds

    @property
    def bound_seconds(self) -> float:
        return self.result.bound * self.formulation.tick_seconds


@dataclass(kw_only=True)
class _Search:
    """The search of every scope, and what is the same in all of them."""

    facts: Facts
    model: CostModel
    pins: Sequence[Pin]
    ahead: Sequence[StepsAhead]
    limits: Limits
    progress: Progress | None
    known: dict[tuple[str, ScopeKey], Frontier] = field(default_factory=dict)
    left_out: list[Scope] = field(default_factory=list)

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """All that are searched, those with stages less far ahead first."""
        return tuple(scope for ahead in self.ahead for scope in scopes(ahead, self.facts.staleness))

    @cached_property
    def edges(self) -> tuple[Handover, ...]:
        return handovers(self.facts, self.model)

    @cached_property
    def worth(self) -> Worth | None:
        """How slow choices may be, where a plan is known: the best of a few plain choices, on a quarter of the ranks
        and more, in the scope with stages furthest ahead."""
        scope, cluster = self.scopes[-1], self.facts.cluster
        if cluster.num_ranks < _FROM_RANKS or len(cluster.parts) > 1:
            return None  # there is no first answer where nodes are of several kinds
        kinds = {stage.name: set(kinds_of(self.facts, stage, self.pins).values()) for stage in STAGES}

        def plain(stage: Stage) -> Frontier:
            large = {kind: math.inf for kind in kinds[stage.name] if kind.num_ranks * _LARGE >= cluster.num_ranks}
            return frontier(self.facts, self.model, stage, self.pins, scope=scope, most_seconds=large, is_plain=True)

        frontiers = side_by_side(plain, STAGES, prepare=_load_solver)
        if not all(any(one.candidates.values()) for one in frontiers):
            return None
        formulation = formulate(self.facts, self.model, frontiers, self.edges, scope.ahead)
        from meshwright.planner.solver.solve import first_makespan  # loaded by now, see `_load_solver`

        ticks = first_makespan(formulation.problem, self.limits)
        if ticks is None:
            return None
        ticks = self.limits.as_short(ticks + len(formulation.problem.tasks))
        least: dict[Key, Least] = {
            (stage.name, scope.of(stage.name)): {
                kind: self.model.least_seconds(stage, self.facts.models.spec(stage.role), kind.num_ranks, kind.part)
                for kind in kinds[stage.name]
            }
            for stage in STAGES
            for scope in self.scopes
        }
        return Worth(cluster.num_ranks, ticks * formulation.tick_seconds, self.scopes, self.edges, least)

    def search_all(self) -> list[_Searched]:
        """Every pattern of steps ahead, offload included: state that waits in the host makes room for what is faster.

        Stages work further ahead only where that makes the turn shorter by more than the gap. The likeliest scope is
        searched out of turn, and again if one before it is as short: its answer often excludes the others at once.
        """
        formulated = [self.formulate(scope) for scope in self.scopes]
        likeliest = _likeliest(formulated, self.limits.tolerance)
        early = self.search(formulated[likeliest])
        searched: list[_Searched] = []
        for one in formulated[:likeliest]:
            searched.append(self.search(one, self._shorter(one, searched), self._as_short(one, early)))
        if any(one.result.answer is not None for one in searched):
            early = self.search(formulated[likeliest], self._shorter(early, searched))
        searched.append(early)
        for one in formulated[likeliest + 1 :]:
            searched.append(self.search(one, self._shorter(one, searched)))
        return searched

    def search_in_time(self) -> list[_Searched]:
        """One pattern of steps ahead after the other until the deadline; those after it are left out, and then no bound
        is known."""
        searched: list[_Searched] = []
        for scope in self.scopes:
            try:
                one = self.formulate(scope)
            except OutOfTimeError:
                self.left_out.append(scope)
                continue
            searched.append(self.search(one, self._shorter(one, searched)))
        return searched

    def formulate(self, scope: Scope) -> _Formulated:
        formulation = formulate(self.facts, self.model, self._frontiers(scope), self.edges, scope.ahead)
        return _Formulated(scope=scope, edges=self.edges, formulation=formulation)

    def search(self, one: _Formulated, *most: int | None) -> _Searched:
        """What the search of one scope answers within the least of `most` ticks."""
        from meshwright.planner.solver.solve import solve  # loaded by then, see `_load_solver`

        limits = replace(self.limits, most=min((ticks for ticks in most if ticks is not None), default=None))
        result = solve(one.formulation.problem, limits, _in_seconds(self.progress, one.formulation.tick_seconds))
        return _Searched(scope=one.scope, edges=one.edges, formulation=one.formulation, result=result)

    def _shorter(self, one: _Formulated, searched: Sequence[_Searched]) -> int | None:
        """The most ticks of a scope that are fewer, by more than the gap, than every answer; None when there is
        none."""
        answered = [other.objective_seconds for other in searched if other.result.answer is not None]
        return self.limits.shorter(one.ticks(min(answered))) if answered else None

    def _as_short(self, one: _Formulated, other: _Searched) -> int | None:
        """The most ticks of a scope than which another's answer is not shorter by more than the gap; None when there is
        none."""
        answered = other.result.answer is not None
        return self.limits.as_short(one.ticks(other.objective_seconds)) if answered else None

    def _frontiers(self, scope: Scope) -> list[Frontier]:
        """One for each stage; those of an earlier scope that does not differ for the stage are kept."""
        keys = [(stage.name, scope.of(stage.name)) for stage in STAGES]
        new = [stage for stage, key in zip(STAGES, keys, strict=True) if key not in self.known]
        for trains in (False, True):
            alike = [stage for stage in new if stage.trains == trains]
            for one in side_by_side(partial(self._frontier, scope), alike, prepare=_load_solver):
                key = scope.of(one.stage.name)
                self.known[one.stage.name, key] = one
                if self.worth:
                    self.worth.learn(one.stage.name, key, one)
        return [self.known[key] for key in keys]

    def _frontier(self, scope: Scope, stage: Stage) -> Frontier:
        most = self.worth.most_seconds(stage.name, scope.of(stage.name)) if self.worth else None
        return frontier(self.facts, self.model, stage, self.pins, scope=scope, most_seconds=most)


def _likeliest(formulated: Sequence[_Formulated], gap: float) -> int:
    """The first of those whose bound none is below by more than the gap."""
    bounds = [one.least_seconds for one in formulated]
    return next(index for index, bound in enumerate(bounds) if bound * (1 - gap) <= min(bounds))


def _load_solver() -> None:
    """OR-Tools takes as long to load as a stage to cost, which a second process may do meanwhile."""
    import_module("meshwright.planner.solver.solve")


def _picks(formulation: Formulation, answer: Answer) -> dict[str, Pick]:
    picks = {}
    for stage, pairs in formulation.behind.items():
        pool, candidate = pairs[answer.picked[stage]]
        picks[stage] = Pick(Ranks(answer.first_ranks[stage], pool.num_ranks), candidate)
    return picks


def _order(formulation: Formulation, answer: Answer) -> tuple[str, ...]:
    """The tasks by their start; those that start together in an order that respects what waits for what."""
    position = {name: index for index, name in enumerate(formulation.problem.order)}
    return tuple(sorted(position, key=lambda name: (answer.starts[name], position[name])))


def _record(searched: Sequence[_Searched], limits: Limits, *, is_whole: bool) -> Solver:
    """How the answer was found; objective and gap follow when the plan has been timed.

    A bound on every scope is one on all plans; where some were left out there is none but 0.
    """
    from meshwright.planner.solver.place_model import NAME, VERSION

    possible = [one for one in searched if one.result.status != "infeasible"]
    exact = {"optimal"} if limits.tolerance else {"optimal", "beaten"}
    return Solver(
        name=NAME,
        version=VERSION,
        seed=limits.seed,
        num_workers=limits.num_workers,
        max_deterministic_time=limits.max_deterministic_time,
        asked_gap=limits.tolerance,
        status="optimal" if is_whole and all(one.result.status in exact for one in possible) else "feasible",
        objective_seconds=0.0,
        bound_seconds=min(one.bound_seconds for one in possible) if is_whole else 0.0,
        gap=0.0,
    )


def _with_gap(plan: Plan) -> Plan:
    period, bound = plan.period_seconds, min(plan.solver.bound_seconds, plan.period_seconds)
    update = {"objective_seconds": period, "bound_seconds": bound, "gap": (period - bound) / period}
    return plan.model_copy(update={"solver": plan.solver.model_copy(update=update)})


def _in_seconds(progress: Progress | None, tick_seconds: float) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    tell = progress
    return lambda objective, bound: tell(objective * tick_seconds, bound * tick_seconds)
