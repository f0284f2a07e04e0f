"""Pareto fronts of step time against GPUs and against cost: the best plans of a job on clusters of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.analysis.whatif import Consequence, Outlook, whatif
from meshwright.planner.plan.calls import CostModelBuilder
from meshwright.planner.plan.cluster_sizes import size_settings
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits


@dataclass(frozen=True, kw_only=True)
class SizePoint:
    """One size of the cluster. Without an `outlook` no plan was found, and `broken` says why.

    A size is on a front if no other has both a shorter step and fewer GPUs, or a shorter step and less money per step.
    Money is proportional to GPU-hours, so the front needs no price.
    """

    num_ranks: int
    outlook: Outlook | None
    is_on_front_of_gpus: bool
    is_on_front_of_money: bool
    broken: tuple[str, ...]


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
    outlooks = {size: answer.outlook for size, answer in answers.items() if answer.outlook}
    gpus = _front({size: (outlook.step_seconds, float(size)) for size, outlook in outlooks.items()})
    money = _front({size: (outlook.step_seconds, outlook.gpu_hours) for size, outlook in outlooks.items()})
    return tuple(
        SizePoint(
            num_ranks=size,
            outlook=answer.outlook,
            is_on_front_of_gpus=size in gpus,
            is_on_front_of_money=size in money,
            broken=answer.broken,
        )
        for size, answer in answers.items()
    )


def _front(points: dict[int, tuple[float, float]]) -> frozenset[int]:
    """The keys of the points that no other point dominates: as good in both numbers, and better in one."""

    def is_dominated(one: tuple[float, float]) -> bool:
        return any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in points.values())

    return frozenset(key for key, point in points.items() if not is_dominated(point))
