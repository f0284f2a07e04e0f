"""Splits a problem into branches, one for each option of the call with the fewest possible options.

Fixing that option excludes the options that do not fit in memory beside it, and the relaxation with memory spread over
all ranks (`linear_relaxation.py`) bounds how long the other calls take with what is left. The typical case is a
synchronous step: the KV cache of generation fills every device, and the little that each of its options leaves
decides how much of the other stages has to be offloaded, recomputed or run in small micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.linear_relaxation import OptionBounds, OptionMask, SpreadRelaxation
from meshwright.planner.solver.problem import CallOptions, Option, Place, Problem, Transfer

_MAX_MEAN_SHARE = 0.7
"""If a branch has on average more than this share of the options of all branches together, the problem is not split."""

_MAX_BRANCHES = 64
"""Largest number of branches; with more, the small fixed cost of each adds up to more than one joint search."""

_NUM_TRIED = 4
"""Number of branches that are bounded first, to decide if splitting saves work."""


@dataclass(frozen=True)
class Branch:
    """The answers to a problem that use one option of some call; none of them ends before `bound`."""

    problem: Problem
    bounds: OptionBounds

    @property
    def bound(self) -> int:
        return self.bounds.least

    def size(self, makespan: int) -> int:
        """Return the number of options that may be part of an answer within the makespan."""
        return sum(int(kept.sum()) for kept in self.bounds.within(makespan).values())

    def within(self, makespan: int) -> Problem:
        """Return the problem with the options that may be part of an answer of this branch within the makespan."""
        return _restricted(self.problem, self.bounds.within(makespan))


def branches(problem: Problem, makespan: int, in_time: Callable[[], bool]) -> list[Branch]:
    """Return branches that together contain all answers with at most this makespan, sorted by their bound.

    The whole problem is one branch if branches would differ little or be too many, or once `in_time` returns False.
    """
    spread = SpreadRelaxation(problem)
    bounds_of_all = spread.bounds({call.name: np.ones(len(call.options), dtype=bool) for call in problem.calls})
    if bounds_of_all is None or bounds_of_all.least > makespan:
        return []
    split, kept, memory_check = [], bounds_of_all.within(makespan), _MemoryCheck(problem)
    deciding = min(problem.calls, key=lambda call: int(kept[call.name].sum()))
    likeliest = _likeliest(bounds_of_all.each[deciding.name], makespan)
    if len(likeliest) > _MAX_BRANCHES:
        return [Branch(problem, bounds_of_all)]
    for index in _evenly_spaced_first(likeliest):
        if not in_time():
            return [Branch(problem, bounds_of_all)]
        bounds = spread.bounds(memory_check.beside(deciding, index, kept))
        if bounds is not None and bounds.least <= makespan:
            split.append(Branch(problem, bounds))
        if len(split) == _NUM_TRIED and not _differ(split, makespan):
            return [Branch(problem, bounds_of_all)]
    if split and _differ(split, makespan):
        return sorted(split, key=lambda branch: branch.bound)
    return [_merged(split)] if split else []


def _likeliest(bounds: NDArray[np.float64], makespan: int) -> list[int]:
    """Return the positions of the bounds within the makespan, in ascending order of the bounds."""
    order: list[int] = np.argsort(bounds, kind="stable").tolist()
    return order[: int((bounds <= makespan).sum())]


def _evenly_spaced_first(order: list[int]) -> list[int]:
    """Reorder so that the first few positions are evenly spaced over the list."""
    spaced = order[:: max(1, len(order) // _NUM_TRIED)][:_NUM_TRIED]
    return [*spaced, *(index for index in order if index not in spaced)]


def _differ(split: list[Branch], makespan: int) -> bool:
    """True if a branch has on average so few of all options that searching each one separately is less work."""
    separate_size = sum(branch.size(makespan) for branch in split)
    return separate_size < _MAX_MEAN_SHARE * len(split) * _merged(split).size(makespan)


def _merged(split: list[Branch]) -> Branch:
    """Merge branches of one problem into one."""
    each = {name: np.min([branch.bounds.each[name] for branch in split], axis=0) for name in split[0].bounds.each}
    return Branch(split[0].problem, OptionBounds(min(branch.bound for branch in split), each))


def _restricted(problem: Problem, kept: OptionMask) -> Problem:
    """Return the problem with the options that are kept, and the transfers between their layouts."""
    calls = tuple(CallOptions(c.name, tuple(compress(c.options, kept[c.name].tolist()))) for c in problem.calls)
    layouts = {call.name: {option.place.layout for option in call.options} for call in calls}
    tasks = tuple(_between(task, layouts) if isinstance(task, Transfer) else task for task in problem.tasks)
    return replace(problem, calls=calls, tasks=tasks)


def _between(transfer: Transfer, layouts: Mapping[str, Collection[str]]) -> Transfer:
    source, target = layouts[transfer.source], layouts[transfer.target]
    return replace(
        transfer, ticks={key: t for key, t in transfer.ticks.items() if key[0] in source and key[1] in target}
    )


class _MemoryCheck:
    """Decides which options fit in memory beside each other on ranks that they must have in common."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._size, self._resident, self._transient, self._saved = (
            {call.name: np.array([amount(o) for o in call.options], dtype=np.int64) for call in problem.calls}
            for amount in map(attrgetter, ("place.num_ranks", "resident_units", "transient_units", "shared_units"))
        )
        self._free = {
            call.name: np.array(list(_unowned_units(problem, call)), dtype=np.int64) for call in problem.calls
        }

    def beside(self, deciding: CallOptions, index: int, kept: OptionMask) -> OptionMask:
        """Return which of the kept options fit beside one option of the deciding call; of that call, only this
        option."""
        option = deciding.options[index]
        own_resident = option.resident_units - int(self._free[deciding.name][index])
        fitting: dict[str, NDArray[np.bool_]] = {}
        for call in self._problem.calls:
            name = call.name
            common_resident = (
                own_resident + self._resident[name] - self._free[name] - self._shared_units(deciding.name, option, call)
            )
            peak = common_resident + np.maximum(self._transient[name], option.transient_units)
            may_be_disjoint = self._size[name] + option.place.num_ranks <= self._problem.num_ranks
            fitting[name] = kept[name] & (may_be_disjoint | (peak <= self._problem.device_units))
        only = np.zeros(len(deciding.options), dtype=bool)
        only[index] = True
        return {**fitting, deciding.name: only}

    def _shared_units(self, name: str, option: Option, other: CallOptions) -> NDArray[np.int64] | int:
        """Return the units of a copy that two calls would share at the same place, [options of the other call]."""
        if not any(name in group and other.name in group for group in self._problem.sharing_groups):
            return 0
        at_same_place = np.array([o.place == option.place for o in other.options])
        return np.where(at_same_place, np.maximum(self._saved[other.name], option.shared_units), 0)


def _unowned_units(problem: Problem, call: CallOptions) -> Iterator[int]:
    """Yield for each option the units that sharing may save beyond the size of any owner's copy at its place."""
    owned: dict[Place, int] = {}
    for owner in problem.owners(call.name):
        for option in problem.options(owner):
            owned[option.place] = min(option.shared_units, owned.get(option.place, option.shared_units))
    for option in call.options:
        yield max(0, option.shared_units - owned.get(option.place, option.shared_units))
