"""Layouts that a coarse problem does not tell apart: transfers last about as long, copies are about as large.

One of them stands for all, with the least of what they take.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from meshwright.planner.solver.problem import CallOptions, Option, Place, Problem, Transfer


@dataclass(frozen=True)
class Alike:
    """A problem with fewer layouts, and by family of calls and layout which of them stands for it."""

    problem: Problem
    family: Mapping[str, str]
    stands_for: Mapping[tuple[str, str], str]

    def place(self, call: str, place: Place) -> Place:
        """The place that stands for a place of a call."""
        if call not in self.family:
            return place
        return place._replace(layout=self.stands_for[self.family[call], place.layout])


def alike(problem: Problem, *, ticks: int, blocks: int) -> Alike:
    """The problem when layouts are one whose transfers last as many times `ticks` and whose copies as many times
    `blocks`, rounded down. Every answer to the problem has one here that is no longer and no larger."""
    family = _families(problem)
    stands_for: dict[tuple[str, str], str] = {}
    first: dict[Hashable, str] = {}
    for (of, layout), look in _looks(problem, family, ticks, blocks).items():
        stands_for[of, layout] = first.setdefault((of, frozenset(look)), layout)
    same = Alike(problem, family, stands_for)
    calls = tuple(_with_fewer_layouts(same, call) for call in problem.calls)
    tasks = tuple(_shortest(same, task) if isinstance(task, Transfer) else task for task in problem.tasks)
    return replace(same, problem=replace(problem, calls=calls, tasks=tasks))


def _families(problem: Problem) -> dict[str, str]:
    """For each call whose layout matters to others, the first by name of those that it is tied to."""
    family = {name: {name} for name in problem.tied}
    for tie in (*problem.copies, *((move.source, move.target) for move in _transfers(problem))):
        joined = set().union(*(family[name] for name in tie))
        family.update(dict.fromkeys(joined, joined))
    return {name: min(joined) for name, joined in family.items()}


def _transfers(problem: Problem) -> tuple[Transfer, ...]:
    return tuple(task for task in problem.tasks if isinstance(task, Transfer))


def _looks(
    problem: Problem, family: Mapping[str, str], ticks: int, blocks: int
) -> dict[tuple[str, str], set[Hashable]]:
    """What tells a layout from the others of its family: the sizes of its pools and copies, how long transfers last."""
    looks: dict[tuple[str, str], set[Hashable]] = {}
    left: dict[str, set[str]] = {call.name: set() for call in problem.calls}
    for call in problem.calls:
        for option in call.options if call.name in family else ():
            look = looks.setdefault((family[call.name], option.place.layout), set())
            look.add((option.place.num_ranks, option.shared_blocks // blocks))
            left[call.name].add(option.place.layout)
    for task in _transfers(problem):
        of = family[task.source]
        for (one, other, overlap), lasts in task.ticks.items():
            if other in left[task.target] and (of, one) in looks:
                looks[of, one].add((task.name, "to", other, overlap, lasts // ticks))
            if one in left[task.source] and (of, other) in looks:
                looks[of, other].add((task.name, "from", one, overlap, lasts // ticks))
    return looks


def _with_fewer_layouts(same: Alike, call: CallOptions) -> CallOptions:
    """The call with its options at the places that stand for theirs; a copy is as small as the smallest there."""
    if call.name not in same.family:
        return call
    least: dict[Place, int] = {}
    for option in call.options:
        place = same.place(call.name, option.place)
        least[place] = min(option.shared_blocks, least.get(place, option.shared_blocks))

    def moved(option: Option) -> Option:
        place = same.place(call.name, option.place)
        own = option.resident_blocks - option.shared_blocks
        return replace(option, place=place, resident_blocks=own + least[place], shared_blocks=least[place])

    return CallOptions(call.name, tuple(map(moved, call.options)))


def _shortest(same: Alike, task: Transfer) -> Transfer:
    """The transfer with the least ticks between any two layouts that two others stand for."""
    of = same.family[task.source]
    ticks: dict[tuple[str, str, int], int] = {}
    for (one, other, overlap), lasts in task.ticks.items():
        if (of, one) in same.stands_for and (of, other) in same.stands_for:
            key = same.stands_for[of, one], same.stands_for[of, other], overlap
            ticks[key] = min(lasts, ticks.get(key, lasts))
    return replace(task, ticks=ticks)
