"""How many ranks a job needs at least, and what the best plan gives on each of several numbers of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.planner.analysis.pareto import SizePoint, size_points
from meshwright.planner.analysis.whatif import Consequence, WhatIf, whatif
from meshwright.planner.compile import best_plan
from meshwright.planner.plan.calls import Remodel
from meshwright.planner.plan.cluster_sizes import size_settings
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.settings import with_setting
from meshwright.planner.solver.result import Limits
from meshwright.profiles.cluster import of_one_kind

_MOST_TIMES = 16
"""More nodes are looked for up to this many times those of the job."""

_SIZES = 4
"""Numbers of ranks that are planned where none are asked for: the least and its doublings."""

_ANY = Limits(gap=0.99)
"""A plan that fits is enough to know that one does."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The least number of ranks with a plan, and the best plan's numbers on several.

    None and nothing where the job fits on none that was looked at, of which `most_ranks` is the largest.
    """

    least_ranks: int | None
    most_ranks: int
    points: tuple[SizePoint, ...]
    answers: WhatIf | None


def fit(
    facts: Facts,
    remodel: Remodel,
    *,
    sizes: Sequence[int] = (),
    price: float | None = None,
    limits: Limits | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Fit:
    """The least number of ranks, and a search on each of `sizes`: by default the least and its doublings.

    `price` is of a GPU-hour. Raises BadInput for a size that is no number of whole nodes or a part of one.
    """
    tell = progress or _silent
    size_settings(facts.cluster, sizes)
    least = _least(facts, remodel, tell)
    most = max(_sizes(facts), default=0)
    if least is None:
        return Fit(least_ranks=None, most_ranks=most, points=(), answers=None)
    asked = sorted(set(sizes)) or list(_doublings(facts, least.facts.cluster.num_ranks))
    answers: dict[int, Consequence] = {}
    found: WhatIf | None = None
    for place, size in enumerate(asked):
        tell("planning sizes", place, len(asked))
        found = whatif(least, size_settings(facts.cluster, [size]), remodel, replan=True, price=price, limits=limits)
        answers[size] = found.answers[0]
    assert found is not None
    return Fit(
        least_ranks=least.facts.cluster.num_ranks,
        most_ranks=most,
        points=size_points(answers),
        answers=replace(found, answers=tuple(answers.values())),
    )


def _least(facts: Facts, remodel: Remodel, tell: Callable[[str, int, int], None]) -> Plan | None:
    """A plan on the fewest ranks that have one: parts of a node by powers of two, then whole nodes."""
    sizes, too_few = _sizes(facts), 0
    for place, size in enumerate(sizes):
        tell("looking for the least", place, len(sizes))
        found = _plan_on(facts, size, remodel)
        if found:
            return _fewer_nodes(facts, remodel, found, too_few)
        too_few = size
    return None


def _fewer_nodes(facts: Facts, remodel: Remodel, found: Plan, too_few: int) -> Plan:
    """The plan on the fewest whole nodes between so many ranks, which are too few, and those of a plan that fits."""
    per_node, size = facts.cluster.ranks_per_node, found.facts.cluster.num_ranks
    if size - too_few <= per_node:
        return found
    middle = (size + too_few) // (2 * per_node) * per_node
    other = _plan_on(facts, middle, remodel)
    return _fewer_nodes(facts, remodel, other or found, too_few if other else middle)


def _plan_on(facts: Facts, size: int, remodel: Remodel) -> Plan | None:
    there = with_setting(facts, size_settings(facts.cluster, [size])[0])
    found = best_plan(there, remodel(there), limits=_ANY)
    return found if isinstance(found, Plan) else None


def _sizes(facts: Facts) -> list[int]:
    """Where a plan is looked for: 1, 2, 4 and so on ranks of a node, then 1, 2, 4 and so on nodes."""
    cluster = of_one_kind(facts.cluster, "fit")
    in_node = _powers(cluster.ranks_per_node - 1)
    nodes = _powers(cluster.nodes * _MOST_TIMES)
    return [*in_node, *(number * cluster.ranks_per_node for number in nodes)]


def _doublings(facts: Facts, least: int) -> Iterator[int]:
    """The least and its doublings, in whole nodes beyond one."""
    per_node = facts.cluster.ranks_per_node
    for times in range(_SIZES):
        size = least * 2**times
        yield size if size <= per_node else -(-size // per_node) * per_node


def _powers(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length())]


def _silent(_what: str, _done: int, _total: int) -> None: ...
