"""Plans of one job on clusters of several sizes: the smallest size with a plan, the best plan on each size, and the
Pareto fronts of step time against GPUs and against cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.planner.analysis.sweep import SharedCostModels, is_undominated
from meshwright.planner.analysis.whatif import Consequence, PlanMetrics, WhatIf, whatif
from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.job.whatif_settings import Setting, size_settings, with_setting
from meshwright.planner.plan.cost_queries import CostModelBuilder
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.parallel import map_in_processes
from meshwright.planner.solver.result import Limits
from meshwright.profiles.hardware import require_uniform


@dataclass(frozen=True, kw_only=True)
class SizePoint:
    """One size of the cluster. Without `metrics` no plan was found, and `violations` says why.

    A size is on the front of GPUs if no other size has both a shorter step and fewer GPUs, and on the front of money if
    no other has both a shorter step and a lower cost per step. Money is proportional to GPU-hours, so its front needs
    no price.
    """

    num_ranks: int
    metrics: PlanMetrics | None
    is_on_front_of_gpus: bool
    is_on_front_of_money: bool
    violations: tuple[str, ...]


def pareto(
    plan: Plan,
    sizes: Sequence[int],
    rebuild_cost_model: CostModelBuilder,
    *,
    price: float | None = None,
    limits: Limits | None = None,
    progress: Callable[[], None] | None = None,
) -> tuple[SizePoint, ...]:
    """Return one point for each size, ascending. Raises BadInput for a size that is neither whole nodes nor a part of
    one.

    `price` is that of a GPU-hour. Each size needs a new search under the plan's pins; `progress` is called after it.
    """
    settings = dict(zip(sizes, size_settings(plan.facts.cluster, sizes), strict=True))
    answers: dict[int, Consequence] = {}
    for size in sorted(settings):
        answer = whatif(plan, (settings[size],), rebuild_cost_model, replan=True, price=price, limits=limits)
        answers[size] = answer.answers[0]
        if progress:
            progress()
    return size_points(answers)


def size_points(answers: Mapping[int, Consequence]) -> tuple[SizePoint, ...]:
    """The points of answers by number of ranks, with the fronts among them."""
    metrics_by_size = {size: answer.metrics for size, answer in answers.items() if answer.metrics}
    gpus = _front({size: (metrics.step_seconds, float(size)) for size, metrics in metrics_by_size.items()})
    money = _front({size: (metrics.step_seconds, metrics.gpu_hours) for size, metrics in metrics_by_size.items()})
    return tuple(
        SizePoint(
            num_ranks=size,
            metrics=answer.metrics,
            is_on_front_of_gpus=size in gpus,
            is_on_front_of_money=size in money,
            violations=answer.violations,
        )
        for size, answer in answers.items()
    )


def _front(points: dict[int, tuple[float, float]]) -> frozenset[int]:
    """The keys of the points that no other point dominates: as good in both numbers, and better in one."""
    return frozenset(key for key, point in points.items() if is_undominated(point, points.values()))


_MAX_NODE_FACTOR = 16
"""The largest cluster that is tried, as a multiple of the job's nodes."""

_NUM_SIZES = 4
"""The number of sizes that are planned by default: the smallest and its doublings."""

_ANY_PLAN = Limits(gap=0.99)
"""Limits of a search that only has to find some plan that fits."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The smallest number of ranks with a plan, and the best plan on each of several sizes.

    `min_ranks` and `answers` are None if the job fits on none of the sizes that were tried, up to `max_ranks`.
    """

    min_ranks: int | None
    max_ranks: int
    points: tuple[SizePoint, ...]
    answers: WhatIf | None


def fit(
    facts: Facts,
    rebuild_cost_model: CostModelBuilder,
    *,
    sizes: Sequence[int] = (),
    price: float | None = None,
    limits: Limits | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Fit:
    """Find the smallest number of ranks, and search a plan on each of `sizes` (default: the smallest and its
    doublings).

    `price` is that of a GPU-hour. Raises BadInput for a size that is neither whole nodes nor a part of one.
    """
    report = progress or _silent
    size_settings(facts.cluster, sizes)
    smallest = _smallest_fitting(facts, rebuild_cost_model, report)
    max_ranks = max(_tried_sizes(facts), default=0)
    if smallest is None:
        return Fit(min_ranks=None, max_ranks=max_ranks, points=(), answers=None)
    requested = sorted(set(sizes)) or list(_doublings(facts, smallest.facts.cluster.num_ranks))
    settings = size_settings(facts.cluster, requested)
    model_of = SharedCostModels(rebuild_cost_model)

    def answer_to(setting: Setting) -> WhatIf:
        return whatif(smallest, [setting], model_of, replan=True, price=price, limits=limits)

    found = map_in_processes(
        answer_to,
        settings,
        is_stopped=lambda: False,
        on_done=lambda done: report("planning sizes", len(done), len(requested)),
    )
    answers = {size: found[index].answers[0] for index, size in enumerate(requested)}
    return Fit(
        min_ranks=smallest.facts.cluster.num_ranks,
        max_ranks=max_ranks,
        points=size_points(answers),
        answers=replace(found[len(requested) - 1], answers=tuple(answers.values())),
    )


def _smallest_fitting(
    facts: Facts, rebuild_cost_model: CostModelBuilder, report: Callable[[str, int, int], None]
) -> Plan | None:
    """A plan on the smallest size that has one: powers of two within a node, then whole nodes."""
    sizes, too_few = _tried_sizes(facts), 0
    for index, size in enumerate(sizes):
        report("searching for the smallest size", index, len(sizes))
        plan = _plan_on(facts, size, rebuild_cost_model)
        if plan:
            return _fewer_nodes(facts, rebuild_cost_model, plan, too_few)
        too_few = size
    return None


def _fewer_nodes(facts: Facts, rebuild_cost_model: CostModelBuilder, fitting: Plan, too_few: int) -> Plan:
    """Bisect for a plan on the fewest whole nodes, between `too_few` ranks and those of a plan that fits."""
    per_node, size = facts.cluster.ranks_per_node, fitting.facts.cluster.num_ranks
    if size - too_few <= per_node:
        return fitting
    middle = (size + too_few) // (2 * per_node) * per_node
    in_between = _plan_on(facts, middle, rebuild_cost_model)
    return _fewer_nodes(facts, rebuild_cost_model, in_between or fitting, too_few if in_between else middle)


def _plan_on(facts: Facts, size: int, rebuild_cost_model: CostModelBuilder) -> Plan | None:
    facts_on_size = with_setting(facts, size_settings(facts.cluster, [size])[0])
    plan = best_plan(facts_on_size, rebuild_cost_model(facts_on_size), limits=_ANY_PLAN)
    return plan if isinstance(plan, Plan) else None


def _tried_sizes(facts: Facts) -> list[int]:
    """The sizes that are tried, ascending: 1, 2, 4, ... ranks of a node, then 1, 2, 4, ... nodes."""
    cluster = require_uniform(facts.cluster, "fit")
    in_node = _powers(cluster.ranks_per_node - 1)
    nodes = _powers(cluster.nodes * _MAX_NODE_FACTOR)
    return [*in_node, *(number * cluster.ranks_per_node for number in nodes)]


def _doublings(facts: Facts, smallest: int) -> Iterator[int]:
    """The smallest size and its doublings, rounded up to whole nodes beyond one node."""
    per_node = facts.cluster.ranks_per_node
    for times in range(_NUM_SIZES):
        size = smallest * 2**times
        yield size if size <= per_node else -(-size // per_node) * per_node


def _powers(limit: int) -> list[int]:
    """The powers of two up to a limit."""
    return [2**k for k in range(limit.bit_length())]


def _silent(_what: str, _done: int, _total: int) -> None: ...
