"""Splits a problem into branches, one for each mode of the task with the fewest possible modes.

Fixing that mode excludes the modes that do not fit in memory beside it, and the relaxation with memory spread over
all ranks (`linear_relaxation.py`) bounds how long the other tasks take with what is left. The typical case is a
synchronous step: the KV cache of generation fills every device, and the little that each of its modes leaves
decides how much of the other stages has to be offloaded, recomputed or run in small micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.linear_relaxation import LinearRelaxation, ModeBounds, ModeMask
from meshwright.planner.solver.problem import Mode, Problem, Resource, Task, Transfer

_MAX_MEAN_SHARE = 0.7
"""If a branch has on average more than this share of the modes of all branches together, the problem is not split."""

_MAX_BRANCHES = 64
"""Largest number of branches; with more, the small fixed cost of each adds up to more than one joint search."""

_NUM_TRIED = 4
"""Number of branches that are bounded first, to decide if splitting saves work."""


@dataclass(frozen=True)
class Branch:
    """The answers to a problem that use one mode of some task; none of them ends before `bound`."""

    problem: Problem
    bounds: ModeBounds

    @property
    def bound(self) -> int:
        return self.bounds.least

    def size(self, makespan: int) -> int:
        """Return the number of modes that may be part of an answer within the makespan."""
        return sum(int(kept.sum()) for kept in self.bounds.within(makespan).values())

    def within(self, makespan: int) -> Problem:
        """Return the problem with the modes that may be part of an answer of this branch within the makespan."""
        return _restricted(self.problem, self.bounds.within(makespan))


def branches(
    problem: Problem, relaxation: LinearRelaxation, makespan: int, in_time: Callable[[], bool]
) -> list[Branch]:
    """Return branches that together contain all answers with at most this makespan, sorted by their bound.

    The whole problem is one branch if branches would differ little or be too many, or once `in_time` returns False.
    """
    bounds_of_all = relaxation.bounds({task.name: np.ones(len(task.modes), dtype=bool) for task in problem.tasks})
    if bounds_of_all is None or bounds_of_all.least > makespan:
        return []
    split, kept, memory_check = [], bounds_of_all.within(makespan), _MemoryCheck(problem)
    num_kept = {name: int(mask.sum()) for name, mask in kept.items()}
    deciding = min(problem.tasks, key=lambda task: (num_kept[task.name] == 1, num_kept[task.name]))
    likeliest = _likeliest(bounds_of_all.each[deciding.name], makespan)
    if len(likeliest) > _MAX_BRANCHES:
        return [Branch(problem, bounds_of_all)]
    for index in _evenly_spaced_first(likeliest):
        if not in_time():
            return [Branch(problem, bounds_of_all)]
        bounds = relaxation.bounds(memory_check.beside(deciding, index, kept))
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
    """True if a branch has on average so few of all modes that searching each one separately is less work."""
    separate_size = sum(branch.size(makespan) for branch in split)
    return separate_size < _MAX_MEAN_SHARE * len(split) * _merged(split).size(makespan)


def _merged(split: list[Branch]) -> Branch:
    """Merge branches of one problem into one."""
    each = {name: np.min([branch.bounds.each[name] for branch in split], axis=0) for name in split[0].bounds.each}
    return Branch(split[0].problem, ModeBounds(min(branch.bound for branch in split), each))


def _restricted(problem: Problem, kept: ModeMask) -> Problem:
    """Return the problem with the modes that are kept, and the transfers between their layouts."""
    tasks = tuple(Task(c.name, tuple(compress(c.modes, kept[c.name].tolist()))) for c in problem.tasks)
    layouts = {task.name: {mode.resource.layout for mode in task.modes} for task in tasks}
    activities = tuple(
        _between(activity, layouts) if isinstance(activity, Transfer) else activity for activity in problem.activities
    )
    return replace(problem, tasks=tasks, activities=activities)


def _between(transfer: Transfer, layouts: Mapping[str, Collection[str]]) -> Transfer:
    source, target = layouts[transfer.source], layouts[transfer.target]
    return replace(
        transfer, ticks={key: t for key, t in transfer.ticks.items() if key[0] in source and key[1] in target}
    )


class _MemoryCheck:
    """Decides which modes fit in memory beside each other on ranks that they must have in common."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._size, self._resident, self._transient, self._saved = (
            {task.name: np.array([amount(o) for o in task.modes], dtype=np.int64) for task in problem.tasks}
            for amount in map(attrgetter, ("resource.num_ranks", "resident_units", "transient_units", "shared_units"))
        )
        self._free = {
            task.name: np.array(list(_unowned_units(problem, task)), dtype=np.int64) for task in problem.tasks
        }

    def beside(self, deciding: Task, index: int, kept: ModeMask) -> ModeMask:
        """Return which of the kept modes fit beside one mode of the deciding task; of that task, only this
        mode."""
        mode = deciding.modes[index]
        own_resident = mode.resident_units - int(self._free[deciding.name][index])
        fitting: dict[str, NDArray[np.bool_]] = {}
        for task in self._problem.tasks:
            name = task.name
            common_resident = (
                own_resident + self._resident[name] - self._free[name] - self._shared_units(deciding.name, mode, task)
            )
            peak = common_resident + np.maximum(self._transient[name], mode.transient_units)
            may_be_disjoint = self._size[name] + mode.resource.num_ranks <= self._problem.num_ranks
            fitting[name] = kept[name] & (may_be_disjoint | (peak <= self._problem.device_units))
        only = np.zeros(len(deciding.modes), dtype=bool)
        only[index] = True
        return {**fitting, deciding.name: only}

    def _shared_units(self, name: str, mode: Mode, other: Task) -> NDArray[np.int64] | int:
        """Return the units of a copy that two tasks would share on the same resource, [modes of the other task]."""
        if not any(name in group and other.name in group for group in self._problem.sharing_groups):
            return 0
        at_same_resource = np.array([o.resource == mode.resource for o in other.modes])
        return np.where(at_same_resource, np.maximum(self._saved[other.name], mode.shared_units), 0)


def _unowned_units(problem: Problem, task: Task) -> Iterator[int]:
    """Yield for each mode the units that sharing may save beyond the size of any owner's copy at its resource."""
    owned: dict[Resource, int] = {}
    for owner in problem.owners(task.name):
        for mode in problem.modes(owner):
            owned[mode.resource] = min(mode.shared_units, owned.get(mode.resource, mode.shared_units))
    for mode in task.modes:
        yield max(0, mode.shared_units - owned.get(mode.resource, mode.shared_units))
