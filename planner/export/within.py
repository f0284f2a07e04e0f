"""The best plan among those that a trainer can say.

A way of the trainer is pins, which the search keeps, and choices that have to be alike, which it does not know. Without
the latter a search has a bound that holds for every plan of the way. Choices are then made alike, by the value of the
leader or of one that follows it, and what is best so is the plan; its gap is to the least bound of all ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product

from meshwright.cost_models.question import CostModel
from meshwright.planner.compile import best_plan
from meshwright.planner.export.trainer import OtherTrainer
from meshwright.planner.export.ways import Way
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits

_MOST_TRIED = 12
"""Of the ways to make choices alike, for each way of a trainer."""


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
    limits: Limits | None = None,
    digests: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Within | None:
    """The best plan of a job that a trainer can say, with a bound on all of them; None where none fits.

    Stages may work ahead as far as the job's staleness allows. `progress` is told the ways that are done, and of how
    many.
    """
    ways = [way for way in trainer.ways(facts) if way.steps_ahead <= facts.staleness]
    search = _WaySearch(facts=facts, model=model, limits=limits or Limits(), digests=digests)
    best, bound = None, float("inf")
    for done, way in enumerate(ways):
        if progress:
            progress(done, len(ways))
        relaxed = search.best(way)
        if relaxed is None:
            continue
        bound = min(bound, relaxed.solver.bound_seconds)
        if best and relaxed.solver.bound_seconds >= best.plan.period_seconds:
            continue
        for plan in search.made_alike(way, relaxed):
            if best is None or plan.period_seconds < best.plan.period_seconds:
                best = Within(plan=plan, way=way)
    return best and Within(plan=_with_bound(best.plan, bound), way=best.way)


@dataclass(frozen=True, kw_only=True)
class _WaySearch:
    """Searches of one job, each in one way."""

    facts: Facts
    model: CostModel
    limits: Limits
    digests: Mapping[str, str] | None

    def best(self, way: Way, chosen: tuple[str, ...] = ()) -> Plan | None:
        """The best plan under the pins of a way and those that were chosen beside them."""
        pins = parse_pins({*way.pins, *chosen})
        found = best_plan(
            self.facts, self.model, pins=pins, ahead=(way.ahead,), limits=self.limits, digests=self.digests
        )
        return found if isinstance(found, Plan) else None

    def made_alike(self, way: Way, relaxed: Plan) -> Iterator[Plan]:
        """The plan where it keeps the rule, else those with the leaders' or the followers' choices for all."""
        if not any(way.broken(relaxed)):
            yield relaxed
            return
        found = (self.best(way, chosen) for chosen in islice(_choices(way, relaxed), _MOST_TRIED))
        yield from (plan for plan in found if plan)


def _choices(way: Way, relaxed: Plan) -> Iterator[tuple[str, ...]]:
    """Pins that give each leader and those that follow it one value, that of one of them in the relaxed plan."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in way.alike:
        groups.setdefault((one.leader, one.key), []).append(one.stage)
    values = [
        list(dict.fromkeys(str(relaxed.choice(stage, key)) for stage in (leader, *stages)))
        for (leader, key), stages in groups.items()
    ]
    for picked in product(*values):
        yield tuple(
            f"{stage}.{key}={value}"
            for ((leader, key), stages), value in zip(groups.items(), picked, strict=True)
            for stage in (leader, *stages)
        )


def _with_bound(plan: Plan, bound: float) -> Plan:
    """The plan as one of all that the trainer can say."""
    period = plan.period_seconds
    least = min(bound, period)
    update = {"status": "feasible", "bound_seconds": least, "gap": (period - least) / period}
    return plan.model_copy(update={"solver": plan.solver.model_copy(update=update)})
