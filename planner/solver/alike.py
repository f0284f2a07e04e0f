"""Merges layouts that a coarse problem does not distinguish: their transfers and copies are of about the same size.

One representative of each equivalence class stays in the problem, with the least amounts of the class.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from meshwright.planner.solver.problem import CallOptions, Option, Place, Problem, Transfer


@dataclass(frozen=True)
class MergedLayouts:
    """A problem with fewer layouts, and the representative of each (family of calls, layout)."""

    problem: Problem
    family: Mapping[str, str]
    representative: Mapping[tuple[str, str], str]

    def place(self, call: str, place: Place) -> Place:
        """Return a place of a call with its layout replaced by the representative."""
        if call not in self.family:
            return place
        return place._replace(layout=self.representative[self.family[call], place.layout])


def merge_layouts(problem: Problem, *, ticks: int, units: int) -> MergedLayouts:
    """Merge layouts whose transfers and copies are equal when divided by `ticks` and `blocks` and rounded down.

    Every answer to the problem has a counterpart in the result that is no longer and no larger.
    """
    family = _families(problem)
    stands_for: dict[tuple[str, str], str] = {}
    first: dict[Hashable, str] = {}
    for (family_name, layout), layout_properties in _properties(problem, family, ticks, units).items():
        stands_for[family_name, layout] = first.setdefault((family_name, frozenset(layout_properties)), layout)
    merged = MergedLayouts(problem, family, stands_for)
    calls = tuple(_merged_call(merged, call) for call in problem.calls)
    tasks = tuple(_merged_transfer(merged, task) if isinstance(task, Transfer) else task for task in problem.tasks)
    return replace(merged, problem=replace(problem, calls=calls, tasks=tasks))


def _families(problem: Problem) -> dict[str, str]:
    """Return a family name for each call whose layout matters to others: calls tied to each other are in one family."""
    family = {name: {name} for name in problem.tied}
    for tie in (*problem.sharing_groups, *((move.source, move.target) for move in _transfers(problem))):
        members = set().union(*(family[name] for name in tie))
        family.update(dict.fromkeys(members, members))
    return {name: min(members) for name, members in family.items()}


def _transfers(problem: Problem) -> tuple[Transfer, ...]:
    return tuple(task for task in problem.tasks if isinstance(task, Transfer))


def _properties(
    problem: Problem, family: Mapping[str, str], ticks: int, blocks: int
) -> dict[tuple[str, str], set[Hashable]]:
    """Return what distinguishes a layout within its family: sizes of pools and copies, durations of transfers."""
    properties: dict[tuple[str, str], set[Hashable]] = {}
    layouts_of: dict[str, set[str]] = {call.name: set() for call in problem.calls}
    for call in problem.calls:
        for option in call.options if call.name in family else ():
            layout_properties = properties.setdefault((family[call.name], option.place.layout), set())
            layout_properties.add((option.place.num_ranks, option.shared_units // blocks))
            layouts_of[call.name].add(option.place.layout)
    for task in _transfers(problem):
        family_name = family[task.source]
        for (source, target, overlap), duration in task.ticks.items():
            if target in layouts_of[task.target] and (family_name, source) in properties:
                properties[family_name, source].add((task.name, "to", target, overlap, duration // ticks))
            if source in layouts_of[task.source] and (family_name, target) in properties:
                properties[family_name, target].add((task.name, "from", source, overlap, duration // ticks))
    return properties


def _merged_call(merged: MergedLayouts, call: CallOptions) -> CallOptions:
    """Return the call with its options at representative places, where copies are as small as the smallest."""
    if call.name not in merged.family:
        return call
    least: dict[Place, int] = {}
    for option in call.options:
        place = merged.place(call.name, option.place)
        least[place] = min(option.shared_units, least.get(place, option.shared_units))

    def moved(option: Option) -> Option:
        place = merged.place(call.name, option.place)
        private = option.resident_units - option.shared_units
        return replace(option, place=place, resident_units=private + least[place], shared_units=least[place])

    return CallOptions(call.name, tuple(map(moved, call.options)))


def _merged_transfer(merged: MergedLayouts, task: Transfer) -> Transfer:
    """Return the transfer with the least ticks between any two layouts of the represented classes."""
    family_name = merged.family[task.source]
    ticks: dict[tuple[str, str, int], int] = {}
    for (source, target, overlap), duration in task.ticks.items():
        if (family_name, source) in merged.representative and (family_name, target) in merged.representative:
            key = merged.representative[family_name, source], merged.representative[family_name, target], overlap
            ticks[key] = min(duration, ticks.get(key, duration))
    return replace(task, ticks=ticks)
