"""A sweep: the best plan of a job under each of several settings, and the Pareto front of step time, ranks and cost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.analysis.plan_summary import RunCost, run_cost
from meshwright.planner.analysis.predicted_ranges import PredictedRanges, predicted_ranges
from meshwright.planner.job.job import Facts
from meshwright.planner.job.whatif_settings import Setting
from meshwright.planner.plan.cost_queries import CostModelBuilder
from meshwright.planner.plan.evaluate import free_bytes
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.no_plan import NoPlan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import MixedCluster
from meshwright.profiles.html_tables import html_table
from meshwright.profiles.uncertainty import Interval
from meshwright.profiles.untrusted_text import MAX_JSON_BYTES, read_text


@dataclass(frozen=True, kw_only=True)
class SweptPlan:
    """The plan of one setting in numbers: its step, ranks and staleness, its response tokens a second, the free
    bytes of its fullest rank, the cost of a number of steps, and the ranges of these.

    It is on the front if no other plan of the sweep is as good in step time, ranks and GPU-hours and better in one.
    """

    step_seconds: float
    num_ranks: int
    staleness: int
    free_bytes: int
    cost: RunCost
    ranges: PredictedRanges
    is_on_front: bool = False


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One setting. Without a `plan`, `violations` says why; `is_cut_short` if its search was stopped."""

    setting: Setting
    plan: SweptPlan | None
    violations: tuple[str, ...] = ()
    is_cut_short: bool = False


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The points of a sweep in the order of their settings.

    `price` is that of a GPU-hour, and costs are those of `num_steps` steps. `num_missing` points were not planned
    before the sweep was stopped. `digest` covers everything that the points depend on besides their
    settings, so that a stopped sweep is continued with the same; empty if it cannot be continued.
    """

    points: tuple[SweepPoint, ...]
    price: float | None
    num_steps: int
    num_missing: int = 0
    digest: str = ""

    def _repr_html_(self) -> str:
        """The sweep in a notebook: a row for each point, from the cheapest on."""
        of_steps = f"of {self.num_steps:,} steps"
        headings = ("", "GPUs", "step s", "p10 s", "p90 s", f"GPU-hours {of_steps}", f"money {of_steps}", "front")
        return html_table(headings, map(_html_row, self.by_cost))

    @property
    def by_cost(self) -> tuple[SweepPoint, ...]:
        """The points from the fewest GPU-hours to the most, followed by those without a plan."""
        planned = [point for point in self.points if point.plan]
        without = [point for point in self.points if not point.plan]
        return (*sorted(planned, key=lambda point: point.plan.cost.gpu_hours if point.plan else 0.0), *without)


def _html_row(point: SweepPoint) -> tuple[str, ...]:
    label = ", ".join(f"{path}={value}" for path, value in point.setting.items())
    if point.plan is None:
        return label, "no plan: " + " ".join(point.violations)
    plan = point.plan
    return (
        label,
        f"{plan.num_ranks:,}",
        *(f"{seconds:.3f}" for seconds in (plan.step_seconds, *plan.ranges.step_seconds)),
        f"{plan.cost.gpu_hours:,.1f}",
        "" if plan.cost.money is None else f"{plan.cost.money:,.2f}",
        "on the front" if plan.is_on_front else "",
    )


def sweep_point(
    setting: Setting,
    outcome: Plan | NoPlan,
    step_interval: Interval | None,
    *,
    price: float | None,
    num_steps: int,
    is_cut_short: bool = False,
) -> SweepPoint:
    """The point of one setting; a plan needs the interval of its step."""
    if isinstance(outcome, NoPlan):
        sentences = tuple(limit.sentence for limit in outcome.limits) or ("no plan was found in time.",)
        return SweepPoint(setting=setting, plan=None, violations=sentences)
    assert step_interval is not None
    cost = run_cost(outcome, price, num_steps)
    swept = SweptPlan(
        step_seconds=outcome.period_seconds,
        num_ranks=outcome.facts.cluster.num_ranks,
        staleness=outcome.staleness,
        free_bytes=free_bytes(outcome),
        cost=cost,
        ranges=predicted_ranges(outcome, step_interval, cost),
    )
    return SweepPoint(setting=setting, plan=swept, is_cut_short=is_cut_short)


def sweep_of(
    points: Sequence[SweepPoint], *, price: float | None, num_steps: int, num_missing: int = 0, digest: str = ""
) -> Sweep:
    """The sweep of these points, with those on the front marked."""
    objectives = [_objectives(point.plan) for point in points if point.plan]
    return Sweep(
        points=tuple(
            replace(point, plan=replace(point.plan, is_on_front=is_undominated(_objectives(point.plan), objectives)))
            if point.plan
            else point
            for point in points
        ),
        price=price,
        num_steps=num_steps,
        num_missing=num_missing,
        digest=digest,
    )


def sweep_json(sweep: Sweep) -> str:
    """The text of a file with the points of a sweep."""
    return f"{json.dumps(asdict(sweep), indent=2)}\n"


def read_sweep(path: Path) -> Sweep:
    """Read the points of a sweep from a file. Raises BadInput for a file that is not one of a sweep."""
    text = read_text(path, "sweep", MAX_JSON_BYTES)
    try:
        return TypeAdapter(Sweep).validate_json(text)
    except ValidationError:
        raise BadInput(f"{path} is not a sweep that `whatif --sweep` wrote; name a new file.") from None


def is_undominated(amounts: tuple[float, ...], others: Iterable[tuple[float, ...]]) -> bool:
    """True if none of the others is as small in every amount and smaller in one."""
    return not any(
        other != amounts and all(one <= two for one, two in zip(other, amounts, strict=True)) for other in others
    )


def _objectives(plan: SweptPlan) -> tuple[float, int, float]:
    return plan.step_seconds, plan.num_ranks, plan.cost.gpu_hours


_MAX_SEARCHES_OF_A_MODEL = 16
"""Searches that use one cost model, which remembers what it costed: some 10 MiB for a search of a 7B job."""

_MANY_NODES = 2
"""Numbers of nodes from this one on have the same costs of a choice; on one node nothing crosses the network."""


@dataclass
class SharedCostModels:
    """A builder of cost models that gives successive facts the same model if only nodes and staleness differ.

    What a choice costs depends on neither, except that one node needs no network between nodes. A model is built anew
    after a number of searches, so that what it remembers stays bounded.
    """

    build: CostModelBuilder
    key: str = ""
    model: CostModel | None = None
    num_searches: int = 0

    def __call__(self, facts: Facts) -> CostModel:
        """The cost model of these facts."""
        key = shared_costs_key(facts)
        if self.model is None or key != self.key or self.num_searches == _MAX_SEARCHES_OF_A_MODEL:
            self.key, self.model, self.num_searches = key, self.build(facts), 0
        self.num_searches += 1
        return self.model


def shared_costs_key(facts: Facts) -> str:
    """A text that is the same for facts with the same costs of a choice: all but staleness and the number of nodes."""
    cluster = facts.cluster
    if not isinstance(cluster, MixedCluster):
        cluster = cluster.model_copy(update={"nodes": min(cluster.nodes, _MANY_NODES)})
    return facts.model_copy(update={"staleness": 0, "cluster": cluster}).model_dump_json()
