"""A problem taken apart: one branch for each option of the call with the fewest that are worth it.

With one option given, what cannot be beside it in memory is left out, and the relaxation with memory spread over all
ranks (`spread.py`) says how long the others take in what is left. A synchronous turn is the example: the keys and
values of generation fill every device, and the little that each of its options leaves decides how much of the other
stages has to be offloaded, recomputed or done in small pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.problem import CallOptions, Option, Place, Problem, Transfer
from meshwright.planner.solver.spread import Bounds, Kept, Spread

_SHARE = 0.7
"""Of the options of all branches: where a branch has more of them on average, all are looked at together."""

_MOST = 64
"""Branches: of more, the little work for each adds up to more than all take together."""

_TRIED = 4
"""So many branches say whether the others are worth a look."""


@dataclass(frozen=True)
class Branch:
    """The answers to a problem that have one option of some call; none of them ends before `bound`."""

    asked: Problem
    bounds: Bounds

    @property
    def bound(self) -> int:
        return self.bounds.least

    def size(self, makespan: int) -> int:
        """The number of options that may be part of such an answer."""
        return sum(int(kept.sum()) for kept in self.bounds.within(makespan).values())

    def within(self, makespan: int) -> Problem:
        """The problem with the options that may be part of an answer of this branch that ends by the tick."""
        return _with(self.asked, self.bounds.within(makespan))


def branches(problem: Problem, makespan: int, in_time: Callable[[], bool]) -> list[Branch]:
    """Branches that have all the answers that end by the tick, those with the least bound first.

    They are one where they differ little or are many, and the whole problem where time ends.
    """
    spread = Spread(problem)
    whole = spread.bounds({call.name: np.ones(len(call.options), dtype=bool) for call in problem.calls})
    if whole is None or whole.least > makespan:
        return []
    found, kept, room = [], whole.within(makespan), _Room(problem)
    deciding = min(problem.calls, key=lambda call: int(kept[call.name].sum()))
    likeliest = _likeliest(whole.each[deciding.name], makespan)
    if len(likeliest) > _MOST:
        return [Branch(problem, whole)]
    for index in _spaced(likeliest):
        if not in_time():
            return [Branch(problem, whole)]
        bounds = spread.bounds(room.beside(deciding, index, kept))
        if bounds is not None and bounds.least <= makespan:
            found.append(Branch(problem, bounds))
        if len(found) == _TRIED and not _differ(found, makespan):
            return [Branch(problem, whole)]
    if found and _differ(found, makespan):
        return sorted(found, key=lambda branch: branch.bound)
    return [_together(found)] if found else []


def _likeliest(bounds: NDArray[np.float64], makespan: int) -> list[int]:
    """The positions of bounds within the makespan, those of the least first."""
    order: list[int] = np.argsort(bounds, kind="stable").tolist()
    return order[: int((bounds <= makespan).sum())]


def _spaced(order: list[int]) -> list[int]:
    """So many as are tried first evenly spaced, then the others."""
    first = order[:: max(1, len(order) // _TRIED)][:_TRIED]
    return [*first, *(index for index in order if index not in first)]


def _differ(found: list[Branch], makespan: int) -> bool:
    """Whether a branch has on average so few of the options of all that to look at each is less work."""
    alone = sum(branch.size(makespan) for branch in found)
    return alone < _SHARE * len(found) * _together(found).size(makespan)


def _together(found: list[Branch]) -> Branch:
    """All answers of some branches of one problem as one."""
    each = {name: np.min([branch.bounds.each[name] for branch in found], axis=0) for name in found[0].bounds.each}
    return Branch(found[0].asked, Bounds(min(branch.bound for branch in found), each))


def _with(problem: Problem, kept: Kept) -> Problem:
    """The problem with some options, and of its transfers what is between their layouts."""
    calls = tuple(CallOptions(c.name, tuple(compress(c.options, kept[c.name].tolist()))) for c in problem.calls)
    layouts = {call.name: {option.place.layout for option in call.options} for call in calls}
    tasks = tuple(_between(task, layouts) if isinstance(task, Transfer) else task for task in problem.tasks)
    return replace(problem, calls=calls, tasks=tasks)


def _between(transfer: Transfer, layouts: Mapping[str, Collection[str]]) -> Transfer:
    source, target = layouts[transfer.source], layouts[transfer.target]
    return replace(
        transfer, ticks={key: t for key, t in transfer.ticks.items() if key[0] in source and key[1] in target}
    )


class _Room:
    """What two options leave each other on ranks that they must have in common."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._size, self._resident, self._transient, self._saved = (
            {call.name: np.array([amount(o) for o in call.options], dtype=np.int64) for call in problem.calls}
            for amount in map(attrgetter, ("place.num_ranks", "resident_blocks", "transient_blocks", "shared_blocks"))
        )
        self._free = {call.name: np.array(list(_unowned(problem, call)), dtype=np.int64) for call in problem.calls}

    def beside(self, deciding: CallOptions, index: int, kept: Kept) -> Kept:
        """Of the options that are kept those that fit beside one of a call, and that one."""
        option = deciding.options[index]
        own = option.resident_blocks - int(self._free[deciding.name][index])
        found: dict[str, NDArray[np.bool_]] = {}
        for call in self._problem.calls:
            name = call.name
            together = own + self._resident[name] - self._free[name] - self._common(deciding.name, option, call)
            most = together + np.maximum(self._transient[name], option.transient_blocks)
            apart = self._size[name] + option.place.num_ranks <= self._problem.num_ranks
            found[name] = kept[name] & (apart | (most <= self._problem.device_blocks))
        only = np.zeros(len(deciding.options), dtype=bool)
        only[index] = True
        return {**found, deciding.name: only}

    def _common(self, name: str, option: Option, other: CallOptions) -> NDArray[np.int64] | int:
        """Blocks of one copy that two calls would share at one place, [options of the other]."""
        if not any(name in group and other.name in group for group in self._problem.copies):
            return 0
        same = np.array([o.place == option.place for o in other.options])
        return np.where(same, np.maximum(self._saved[other.name], option.shared_blocks), 0)


def _unowned(problem: Problem, call: CallOptions) -> Iterator[int]:
    """Blocks of each option that sharing may save on its ranks although no owner of the copy has as many there."""
    owned: dict[Place, int] = {}
    for owner in problem.owners(call.name):
        for option in problem.options(owner):
            owned[option.place] = min(option.shared_blocks, owned.get(option.place, option.shared_blocks))
    for option in call.options:
        yield max(0, option.shared_blocks - owned.get(option.place, option.shared_blocks))
