"""The best plan among those that a trainer can say.

A way of the trainer is pins, which the search keeps, and choices that have to be alike, which it does not know. Without
the latter a search has a bound that holds for every plan of the way. One choice after the other is then made
alike, by the best of the values that its stages have, and what is best so is the plan; its gap is to the least bound of
all ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from meshwright.cost_models.question import CostModel
from meshwright.planner.compile import Missing, best_plan
from meshwright.planner.export.trainer import OtherTrainer
from meshwright.planner.export.ways import Way, fixed
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Pin, Value, parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.solver_record import with_gap
from meshwright.planner.search.start import start_from
from meshwright.planner.solver.result import Limits
from meshwright.profiles.documents import digest
from meshwright.profiles.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Within:
    """The best plan that was found in a trainer's ways, and the way that it is of."""

    plan: Plan
    way: Way


def within(
    trainer: OtherTrainer,
    facts: Facts,
    model: CostModel,
    *,
    pins: Sequence[Pin] = (),
    limits: Limits | None = None,
    digests: Mapping[str, str] | None = None,
    start: Plan | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Within | None:
    """The best plan of a job that a trainer can say and that keeps the pins, with a bound on all of them; None where
    none fits.

    Stages may work ahead as far as the job's staleness allows. `start` is a plan of a job that differs little: where
    a way allows its placements, what is searched for in every way is better by more than the gap, and the digests
    name it. `progress` is told the ways that are done, and of how many.
    """
    search = _WaySearch(facts=facts, model=model, pins=tuple(pins), limits=limits or Limits(), digests=digests)
    ways = [way for way in trainer.ways_of(facts) if way.steps_ahead <= facts.staleness]
    begun = search.begun(start, ways) if start else None
    if start and begun:
        search = replace(search, digests={**(digests or {}), "start": digest(start)}, start=begun.plan)
        ways = [begun.way, *(way for way in ways if way != begun.way)]
    best, bound = None, float("inf")
    for done, way in enumerate(ways):
        if progress:
            progress(done, len(ways))
        relaxed = search.relaxed(way)
        if not isinstance(relaxed, Plan):
            bound = 0.0 if relaxed == "out_of_limit" else bound
            continue
        bound = min(bound, relaxed.solver.bound_seconds)
        if begun and best is None:
            best = Within(plan=_searched_like(relaxed, begun.plan), way=begun.way)
        if begun and relaxed.placements == begun.plan.placements:
            continue
        if best and relaxed.solver.bound_seconds >= best.plan.period_seconds:
            continue
        plan = search.made_alike(way, relaxed)
        if plan and (best is None or plan.period_seconds < best.plan.period_seconds):
            best = Within(plan=plan, way=way)
    return best and Within(plan=_with_bound(best.plan, bound), way=best.way)


@dataclass(frozen=True, kw_only=True)
class _WaySearch:
    """Searches of one job, each in one way."""

    facts: Facts
    model: CostModel
    pins: tuple[Pin, ...]
    limits: Limits
    digests: Mapping[str, str] | None
    start: Plan | None = None

    def begun(self, start: Plan, ways: Iterable[Way]) -> Within | None:
        """A plan's placements under these facts, in the first of the ways that allows them; None where none does."""
        for way in ways:
            plan = start_from(start, self.facts, self.model, self._pins(way))
            if isinstance(plan, Plan) and not any(way.broken(plan)):
                return Within(plan=plan, way=way)
        return None

    def relaxed(self, way: Way) -> Plan | Missing:
        """The best plan under the pins of a way and the user's own, or the one that was begun with, where none is
        better by more than the gap."""
        return self._search(way, (), self.start)

    def _search(self, way: Way, chosen: Iterable[str], start: Plan | None = None) -> Plan | Missing:
        return best_plan(
            self.facts,
            self.model,
            pins=self._pins(way, chosen),
            ahead=(way.ahead(self.facts.graph),),
            limits=self.limits,
            digests=self.digests,
            start=start,
        )

    def _pins(self, way: Way, chosen: Iterable[str] = ()) -> tuple[Pin, ...]:
        """Joins the pins of a way, those that were chosen beside them and the user's own."""
        return tuple(dict.fromkeys((*parse_pins({*way.pins, *chosen}, self.facts.graph), *self.pins)))

    def made_alike(self, way: Way, plan: Plan) -> Plan | None:
        """The best plan that was found with one choice after the other made alike; None where none was."""
        chosen: tuple[str, ...] = ()
        for (leader, key), stages in _groups(way).items():
            values = list(dict.fromkeys(plan.choice(stage, key) for stage in stages))
            if len(values) > 1:
                found = self._fastest(way, chosen, stages, key, values)
                found = found or self._fastest(way, chosen, stages, key, _others(plan, leader, key, values))
                if found is None:
                    return None
                plan = found
            chosen = (*chosen, *_one_choice(key, plan.choice(leader, key), stages))
        return plan

    def _fastest(
        self, way: Way, chosen: tuple[str, ...], stages: Sequence[str], key: str, values: Iterable[Value]
    ) -> Plan | None:
        """The fastest of the best plans with each value for all of some stages."""
        found = (self._search(way, (*chosen, *_one_choice(key, value, stages))) for value in values)
        plans = [plan for plan in found if isinstance(plan, Plan)]
        return min(plans, key=lambda plan: plan.period_seconds, default=None)


def _one_choice(key: str, value: Value, stages: Sequence[str]) -> tuple[str, ...]:
    """The pins that give stages one value; micro-batches of no number of rows are those of which tokens are capped."""
    if key == "micro_batch_size" and not value:
        return tuple(f"{stage}.micro_batch_tokens!=0" for stage in stages)
    return fixed(key, value, stages)


def _groups(way: Way) -> dict[tuple[str, str], list[str]]:
    """The stages that have one choice, by their leader, who is the first, and the choice."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in way.alike:
        found.setdefault((one.leader, one.key), [one.leader]).append(one.stage)
    return found


def _others(plan: Plan, leader: str, key: str, tried: Sequence[Value]) -> Iterator[Value]:
    """Further values where none of those tried leaves a plan: a row at a time, and layouts by powers of two."""
    if key == "micro_batch_size" and 1 not in tried:
        yield 1
    if key == "layout":
        num_ranks = plan.placement(leader).layout.num_ranks
        powers = [2**k for k in range(num_ranks.bit_length()) if num_ranks % 2**k == 0]
        for tp, pp in product(powers, powers):
            if num_ranks % (tp * pp) == 0:
                layout = Layout(tp=tp, pp=pp, dp=num_ranks // (tp * pp), sp=tp > 1)
                if layout not in tried:
                    yield layout


def _searched_like(searched: Plan, begun: Plan) -> Plan:
    """The plan that was begun with, as what a search has found."""
    return with_gap(begun.model_copy(update={"digests": searched.digests, "solver": searched.solver}))


def _with_bound(plan: Plan, bound: float) -> Plan:
    """The plan as one of all that the trainer can say."""
    period = plan.period_seconds
    least = min(bound, period)
    update = {"status": "feasible", "bound_seconds": least, "gap": (period - least) / period}
    return plan.model_copy(update={"solver": plan.solver.model_copy(update=update)})
