"""Finds a tree of cases that proves a lower bound close to the period of a plan.

The case with the smallest bound is split repeatedly, until the bound is close enough. The quick bound of a case follows
from the work of its choices (seconds x ranks) alone, and the full bound also from the order of the stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush, nlargest
from itertools import combinations, count
from operator import itemgetter

import numpy as np

from meshwright.cost_models.protocol import CostModel, Memo
from meshwright.planner.plan.plan import Plan
from meshwright.planner.proof.cases import Case
from meshwright.planner.proof.checker import all_search_cases, proven_seconds, split
from meshwright.planner.proof.document import Closed, Node, Overlap, Proof, Split, Tree
from meshwright.planner.proof.halves import Halves
from meshwright.planner.proof.space import AMOUNTS, ChoiceSubset, Enumeration
from meshwright.profiles.documents import digest

MAX_SPLITS = 2000
"""Limit on the splits over all search cases; finding one takes a few milliseconds, and so does checking it."""

TARGET_GAP = 1e-3
"""Relative distance to the plan's period below which no more cases are split."""

_SPLIT_AMOUNTS = ("ranks", "own", "weights", "transient", "seconds")
"""The amounts by which choices are split."""

_NUM_BY_WORK, _NUM_IN_FULL = 14, 3
"""Number of candidate splits of a case whose halves are bounded by their work alone, which is quick, and number of the
best of these whose halves are then bounded in full."""

_BETTER_HALF_WEIGHT = 0.3
"""Weight of the better of two halves relative to the worse one in the score of a split."""


@dataclass(eq=False)
class _Branch:
    """A case with its bound in seconds, and how it is split, if it is."""

    case: Case
    seconds: float
    split: Split | Overlap | None = None
    halves: tuple[_Branch, ...] = ()

    @property
    def proven_seconds(self) -> float:
        """The smallest bound of the cases of this subtree that are not split."""
        stack, proven = [self], math.inf
        while stack:
            branch = stack.pop()
            stack += branch.halves
            proven = proven if branch.halves else min(proven, branch.seconds)
        return proven

    def nodes(self, case: Case, target: float) -> Iterator[Node]:
        """Yield the nodes of this subtree, depth first, with its splits applied to `case`.

        The plans of `case` must be among those of the branch's own case. A case is closed as soon as it is empty or its
        bound reaches `target`.
        """
        stack: list[tuple[_Branch, Case]] = [(self, case)]
        while stack:
            branch, remaining = stack.pop()
            if remaining.is_empty:
                yield Closed(closed_by="memory")
            elif branch.split is None or remaining.least_seconds(target) >= target:
                yield Closed(closed_by="time")
            else:
                yield branch.split
                stack += reversed(list(zip(branch.halves, split(remaining, branch.split), strict=True)))


def prove(plan: Plan, model: CostModel, *, max_splits: int = MAX_SPLITS) -> Proof:
    """Return a proof with at most `max_splits` splits. `model` is the cost model that the plan was made with.

    The splits are found in the spaces of all choices that a plan of this period may have, and prove some bound. The
    proof then enumerates only the choices that a plan faster than that bound may have, which needs fewer splits.
    """
    search_cases = all_search_cases(plan)
    enumeration = Enumeration(plan.facts, model, plan.period_seconds)
    target = plan.period_seconds * (1 - TARGET_GAP)
    roots = [_bounded(Case.whole(space), target) for space in enumeration.spaces(search_cases)]
    _grow(roots, target, max_splits)
    proven = min(plan.period_seconds, *(root.proven_seconds for root in roots))
    short_spaces = enumeration.of_shorter_periods(proven).spaces(search_cases)
    trees = [tuple(root.nodes(Case.whole(space), proven)) for root, space in zip(roots, short_spaces, strict=True)]
    return Proof(
        facts=digest(plan.facts),
        profile=plan.digests.get("profile"),
        cutoff_seconds=proven,
        bound_seconds=min(proven, *(proven_seconds(*pair) for pair in zip(short_spaces, trees, strict=True))),
        solver_bound_seconds=plan.solver.bound_seconds,
        trees=tuple(
            Tree(steps_ahead=dict(search_case.ahead), keeps_in_flight=search_case.keeps_in_flight, nodes=nodes)
            for search_case, nodes in zip(search_cases, trees, strict=True)
        ),
    )


def _grow(roots: list[_Branch], target: float, max_splits: int) -> None:
    """Split the branch with the smallest bound, until all bounds reach the target or that branch cannot be split."""
    number, candidates = count(), _Candidates(target)
    open_ = [(root.seconds, next(number), root) for root in roots if root.seconds < target]
    for _ in range(max_splits):
        if not open_:
            return
        _, _, branch = heappop(open_)
        best = _best_split(branch, target, candidates.of_case(branch.case))
        if best is None:
            return  # this branch determines the bound
        branch.split, branch.halves = best
        for half in branch.halves:
            half.seconds = max(half.seconds, branch.seconds)
            if half.seconds < target:
                heappush(open_, (half.seconds, next(number), half))


def _best_split(
    branch: _Branch, target: float, candidates: Sequence[Split | Overlap]
) -> tuple[Split | Overlap, tuple[_Branch, ...]] | None:
    """Return the split whose halves have the best bounds in full, among those with the best bounds by work alone."""
    if not candidates:
        return None
    by_work = Halves(branch.case, candidates).least_seconds_by_work().reshape(-1, 2).tolist()
    scores = [-_score(*seconds) for seconds in by_work]
    best: tuple[float, Split | Overlap, tuple[_Branch, ...]] | None = None
    for index in sorted(range(len(candidates)), key=scores.__getitem__)[:_NUM_IN_FULL]:
        halves = tuple(
            _Branch(half, half.least_seconds_by_order(seconds, target))
            for half, seconds in zip(split(branch.case, candidates[index]), by_work[index], strict=True)
        )
        score = _score(*(min(half.seconds, target) for half in halves))
        if best is None or score > best[0]:
            best = score, candidates[index], halves
    return best[1:] if best else None


def _bounded(case: Case, target: float) -> _Branch:
    return _Branch(case, math.inf if case.is_empty else case.least_seconds(target))


def _score(one: float, other: float) -> float:
    return min(one, other) + _BETTER_HALF_WEIGHT * max(one, other)


@dataclass(frozen=True)
class _Candidates:
    """Splits that may raise the bound of a case towards the target; those of a stage's choices are found once."""

    target: float
    _of_choices: Memo[ChoiceSubset, list[tuple[float, Split]]] = field(default_factory=Memo)

    def of_case(self, case: Case) -> list[Split | Overlap]:
        """Return the splits by amounts that add most seconds and, if those are few or add little, those by overlap."""
        by_amount = (
            scored
            for name in case.names
            for scored in self._of_choices.memoize(case.remaining[name], partial(_splits, case, name))
        )
        by_gain = nlargest(_NUM_BY_WORK, by_amount, key=itemgetter(0))
        candidates: list[Split | Overlap] = [candidate for _, candidate in by_gain]
        if len(by_gain) < _NUM_BY_WORK or by_gain[0][0] < TARGET_GAP * self.target:
            candidates += _overlaps(case)
        return candidates


def _overlaps(case: Case) -> Iterator[Overlap]:
    """Yield the pairs of stages whose pools may or may not intersect in the plans of the case."""
    for one, other in combinations(case.names, 2):
        if not case.always_intersect(one, other) and frozenset((one, other)) not in case.intersects:
            yield Overlap(overlap=(one, other))


def _splits(case: Case, name: str) -> list[tuple[float, Split]]:
    """Return splits of one stage's choices, each with a score by the seconds that its halves add to the bound.

    Splits are tried around the amounts of the fastest choice: just below and above it, and half-way to the ends. The
    added seconds of a half are the larger of the work spread over all ranks and the stage's own seconds.
    """
    amounts = case.space.choices[name].amounts[:, case.remaining[name].indices]
    seconds, work = amounts[AMOUNTS.index("seconds")], amounts[AMOUNTS.index("work")] / case.num_ranks
    fastest, splits = int(np.argmin(seconds + work)), list[tuple[float, Split]]()
    for amount in _SPLIT_AMOUNTS:
        row = amounts[AMOUNTS.index(amount)]
        values = np.unique(row)
        position = int(np.searchsorted(values, row[fastest]))
        cuts = {position, position + 1, (position + 1) // 2, (position + len(values)) // 2} & set(range(1, len(values)))
        for cut in sorted(cuts):
            below = np.nextafter(values[cut], -math.inf)  # the mean of two neighbouring floats may round up
            upper_bound = float(min((values[cut - 1] + values[cut]) / 2, below))
            added = [
                max(work[half].min() - work.min(), seconds[half].min() - seconds.min())
                for half in (row <= upper_bound, row > upper_bound)
            ]
            splits.append((_score(*added), Split(stage=name, amount=amount, upper_bound=upper_bound)))
    return splits
