"""Relations between the rank ranges of calls that may be on any aligned range of their size.

Such ranges are nested, equal or disjoint, so that it suffices to model which lies inside which: ranges that are nested
consistently, and whose parts fit into them, can always be laid out on ranks. No variable represents a position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, permutations

from ortools.sat.python import cp_model

from meshwright.planner.solver.problem import Problem


@dataclass(frozen=True, kw_only=True)
class RankRanges:
    """The number of ranks of each call, and the relations of the rank ranges of two calls, by call names."""

    size: Mapping[str, cp_model.IntVar]
    inside: Mapping[tuple[str, str], cp_model.IntVar]  # the first range is part of the second, or equal to it
    equal: Mapping[tuple[str, str], cp_model.IntVar]
    intersect: Mapping[tuple[str, str], cp_model.IntVar]  # one range is inside the other


def add_rank_ranges(model: cp_model.CpModel, problem: Problem, size: Mapping[str, cp_model.IntVar]) -> RankRanges:
    """Add the variables, and the rules that make them rank ranges of one cluster."""
    names = [call.name for call in problem.calls]
    inside = {pair: model.new_bool_var("inside[{},{}]".format(*pair)) for pair in permutations(names, 2)}
    equal, meet = {}, {}
    for one, other in combinations(names, 2):
        equal[one, other] = equal[other, one] = model.new_bool_var(f"equal[{one},{other}]")
        meet[one, other] = meet[other, one] = model.new_bool_var(f"meet[{one},{other}]")
    blocks = RankRanges(size=size, inside=inside, equal=equal, intersect=meet)
    _equal_and_meet_follow_inside(model, names, blocks)
    _a_part_is_smaller(model, names, blocks)
    _ranges_are_nested_or_disjoint(model, names, blocks)
    _parts_fit(model, problem, names, blocks)
    return blocks


def first_ranks(sizes: Mapping[str, int], inside: Mapping[tuple[str, str], bool]) -> dict[str, int]:
    """Lay the ranges out on ranks: every range holds its parts from its first rank on, the larger ones first."""
    first_free = {"": 0}  # the first rank of each range, and of the cluster (""), that no part occupies yet
    firsts: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        enclosing = [other for other in firsts if inside[name, other]]
        if equal := [other for other in enclosing if inside[other, name]]:
            firsts[name] = firsts[equal[0]]
            continue
        innermost = min(enclosing, key=lambda other: sizes[other], default="")
        firsts[name] = first_free[innermost]
        first_free[innermost] += sizes[name]
        first_free[name] = firsts[name]
    return firsts


def _equal_and_meet_follow_inside(model: cp_model.CpModel, names: list[str], blocks: RankRanges) -> None:
    """Ranges are equal if each is inside the other, and intersect if one is."""
    for one, other in combinations(names, 2):
        forward, backward = blocks.inside[one, other], blocks.inside[other, one]
        equal, meet = blocks.equal[one, other], blocks.intersect[one, other]
        model.add_bool_and(forward, backward).only_enforce_if(equal)
        model.add_bool_or(equal, ~forward, ~backward)
        model.add_bool_or(forward, backward).only_enforce_if(meet)
        model.add_implication(forward, meet)
        model.add_implication(backward, meet)


def _a_part_is_smaller(model: cp_model.CpModel, names: list[str], blocks: RankRanges) -> None:
    """A range inside another has no more ranks, and fewer unless they are equal."""
    for one, other in permutations(names, 2):
        model.add(blocks.size[one] <= blocks.size[other]).only_enforce_if(blocks.inside[one, other])
        proper = (blocks.inside[one, other], ~blocks.inside[other, one])
        model.add(blocks.size[one] < blocks.size[other]).only_enforce_if(*proper)


def _ranges_are_nested_or_disjoint(model: cp_model.CpModel, names: list[str], blocks: RankRanges) -> None:
    """The inside relation is transitive, and two ranges around a third intersect."""
    for one, other, third in permutations(names, 3):
        model.add_bool_or(~blocks.inside[one, other], ~blocks.inside[other, third], blocks.inside[one, third])
        if other < third:
            model.add_bool_or(~blocks.inside[one, other], ~blocks.inside[one, third], blocks.intersect[other, third])


def _parts_fit(model: cp_model.CpModel, problem: Problem, names: list[str], blocks: RankRanges) -> None:
    """The largest parts of a range, or of the cluster, together have no more ranks than it; equal parts count once."""
    first = {name: model.new_bool_var(f"first[{name}]") for name in names}  # the first call among equal ranges
    for index, name in enumerate(names):
        earlier = [blocks.equal[other, name] for other in names[:index]]
        model.add_bool_or(first[name], *earlier)
        for equal in earlier:
            model.add_implication(equal, ~first[name])
    proper = {}
    for one, other in permutations(names, 2):
        proper[one, other] = model.new_bool_var(f"proper[{one},{other}]")
        model.add_implication(proper[one, other], blocks.inside[one, other])
        model.add_implication(proper[one, other], ~blocks.inside[other, one])
        model.add_bool_or(proper[one, other], ~blocks.inside[one, other], blocks.inside[other, one])
    for whole in (*names, None):
        part_ranks = []
        for part in names:
            if part == whole:
                continue
            between = [_between(model, proper, part, third, whole) for third in names if third not in (part, whole)]
            counts = model.new_bool_var(f"counts[{part},{whole}]")
            exempt = [] if whole is None else [~first[whole], ~proper[part, whole]]
            model.add_bool_or(counts, ~first[part], *exempt, *between)
            ranks = model.new_int_var(0, problem.num_ranks, f"taken[{part},{whole}]")
            model.add(ranks >= blocks.size[part]).only_enforce_if(counts)
            part_ranks.append(ranks)
        model.add(sum(part_ranks) <= (problem.num_ranks if whole is None else blocks.size[whole]))


def _between(
    model: cp_model.CpModel,
    proper: Mapping[tuple[str, str], cp_model.IntVar],
    part: str,
    third: str,
    whole: str | None,
) -> cp_model.IntVar:
    """Return a variable for whether a third range lies between a part and a whole.

    If the whole is the cluster, the third range only has to lie around the part.
    """
    if whole is None:
        return proper[part, third]
    between = model.new_bool_var(f"between[{part},{third},{whole}]")
    model.add_implication(between, proper[part, third])
    model.add_implication(between, proper[third, whole])
    return between
