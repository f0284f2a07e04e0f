"""Finds a tree of cases that proves a bound near the period of a plan: the case with the least bound is split, again
and again, until enough is proven."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import combinations, count

import numpy as np

from meshwright.cost_models.question import CostModel
from meshwright.planner.plan.plan import Plan
from meshwright.planner.proof.cases import Case
from meshwright.planner.proof.checker import every_scope, proven_seconds, split
from meshwright.planner.proof.document import Closed, Meeting, Node, Proof, Split, Tree
from meshwright.planner.proof.enumeration import AMOUNTS, Enumeration
from meshwright.profiles.documents import digest

MOST_SPLITS = 2000
"""Of all scopes: each is tried in a few milliseconds, and checked in as many."""

ENOUGH = 1e-3
"""Relative distance to the plan within which no more is split."""

_BY = ("ranks", "own", "weights", "transient", "seconds")
"""The amounts by which choices are split."""

_LIKELY, _LIKELIEST = 14, 3
"""Splits of a case that are looked at by their work, and of those the ones that are bounded in full."""

_OTHER = 0.3
"""What the better of two halves counts beside the worse one."""


@dataclass(eq=False)
class _Branch:
    """A case, its bound in seconds, and how it is split where it is."""

    case: Case
    seconds: float
    split: Split | Meeting | None = None
    halves: tuple[_Branch, ...] = ()

    def nodes(self, case: Case, enough: float) -> Iterator[Node]:
        """Those of the tree from here on for a case with no more plans than its own, as they are read: no case is split
        that is empty, or takes enough time."""
        waiting: list[tuple[_Branch, Case]] = [(self, case)]
        while waiting:
            branch, left = waiting.pop()
            if left.is_empty:
                yield Closed(closed_by="memory")
            elif branch.split is None or left.least_seconds(enough) >= enough:
                yield Closed(closed_by="time")
            else:
                yield branch.split
                waiting += reversed(list(zip(branch.halves, split(left, branch.split), strict=True)))


def prove(plan: Plan, model: CostModel, *, most_splits: int = MOST_SPLITS) -> Proof:
    """What this many splits prove of the plan's facts. The model is the one that the plan was made with."""
    scopes = every_scope(plan)
    spaces = Enumeration(plan.facts, model, plan.period_seconds).spaces(scopes)
    wanted = plan.period_seconds * (1 - ENOUGH)
    roots = [_bounded(Case.whole(space), wanted) for space in spaces]
    _grow(roots, wanted, most_splits)
    every = [tuple(root.nodes(root.case, wanted)) for root in roots]
    found = min(plan.period_seconds, *(proven_seconds(*pair) for pair in zip(spaces, every, strict=True)))
    within = Enumeration(plan.facts, model, found).spaces(scopes)
    left = [tuple(root.nodes(Case.whole(space), found)) for root, space in zip(roots, within, strict=True)]
    return Proof(
        facts=digest(plan.facts),
        profile=plan.digests.get("profile"),
        within_seconds=found,
        bound_seconds=min(found, *(proven_seconds(*pair) for pair in zip(within, left, strict=True))),
        solver_bound_seconds=plan.solver.bound_seconds,
        trees=tuple(
            Tree(ahead=dict(scope.ahead), runs_on=scope.runs_on, nodes=nodes)
            for scope, nodes in zip(scopes, left, strict=True)
        ),
    )


def _grow(roots: list[_Branch], wanted: float, most_splits: int) -> None:
    """Splits the branch with the least bound until it is what is wanted, or cannot be split."""
    number = count()
    open_ = [(root.seconds, next(number), root) for root in roots if root.seconds < wanted]
    for _ in range(most_splits):
        if not open_:
            return
        _, _, branch = heappop(open_)
        found = _best_split(branch, wanted)
        if found is None:
            return  # the bound is this one's
        branch.split, branch.halves = found
        for half in branch.halves:
            half.seconds = max(half.seconds, branch.seconds)
            if half.seconds < wanted:
                heappush(open_, (half.seconds, next(number), half))


def _best_split(branch: _Branch, wanted: float) -> tuple[Split | Meeting, tuple[_Branch, ...]] | None:
    """The split whose halves are bounded best, of those whose halves promise most by their work."""
    case = branch.case
    promising = sorted(_splits(case), key=lambda pair: -pair[0])[:_LIKELY]
    likely: list[Split | Meeting] = [one for _, one in promising]
    if len(promising) < _LIKELY or promising[0][0] < ENOUGH * wanted:
        likely += _meetings(case)
    by_work = sorted(likely, key=lambda one: -_worth(*(half.least_seconds_by_work() for half in split(case, one))))
    best: tuple[float, Split | Meeting, tuple[_Branch, ...]] | None = None
    for one in by_work[:_LIKELIEST]:
        halves = tuple(_bounded(half, wanted) for half in split(case, one))
        worth = _worth(*(min(half.seconds, wanted) for half in halves))
        if best is None or worth > best[0]:
            best = worth, one, halves
    return best[1:] if best else None


def _bounded(case: Case, wanted: float) -> _Branch:
    return _Branch(case, math.inf if case.is_empty else case.least_seconds(wanted))


def _worth(one: float, other: float) -> float:
    return min(one, other) + _OTHER * max(one, other)


def _meetings(case: Case) -> Iterator[Meeting]:
    """The pairs of stages of which it is open whether their pools meet."""
    for one, other in combinations(case.names, 2):
        if not case.meets(one, other) and frozenset((one, other)) not in case.related:
            yield Meeting(meet=(one, other))


def _splits(case: Case) -> Iterator[tuple[float, Split]]:
    """Splits of one stage's choices, each with what its halves add at least to the seconds of all ranks or its own.

    Around the amounts of the fastest choice: just below and above it, and half-way to the ends.
    """
    for name in case.names:
        amounts = case.space.choices[name].amounts[:, case.left[name].numbers]
        seconds, work = amounts[AMOUNTS.index("seconds")], amounts[AMOUNTS.index("work")] / case.num_ranks
        fastest = int(np.argmin(seconds + work))
        for by in _BY:
            row = amounts[AMOUNTS.index(by)]
            values = np.unique(row)
            at = int(np.searchsorted(values, row[fastest]))
            cuts = {at, at + 1, (at + 1) // 2, (at + len(values)) // 2} & set(range(1, len(values)))
            for cut in sorted(cuts):
                below = np.nextafter(values[cut], -math.inf)  # what lies between two neighbouring floats is rounded
                most = float(min((values[cut - 1] + values[cut]) / 2, below))
                added = [
                    max(work[kept].min() - work.min(), seconds[kept].min() - seconds.min())
                    for kept in (row <= most, row > most)
                ]
                yield _worth(*added), Split(stage=name, amount=by, most=most)
