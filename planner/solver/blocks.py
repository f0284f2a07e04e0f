"""How the pools of calls lie to each other when a call may be on any aligned block of its number of ranks.

Such blocks are nested, equal or apart, so that it is enough to say which lies inside which: blocks that are nested in
this way, and whose parts fit into them, can always be laid out in ranks. No variable stands for a position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, permutations

from ortools.sat.python import cp_model

from meshwright.planner.solver.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """By names of calls: each call's number of ranks, and for two calls how their blocks lie to each other."""

    size: Mapping[str, cp_model.IntVar]
    inside: Mapping[tuple[str, str], cp_model.IntVar]  # the first's block is part of the second's, or equal to it
    equal: Mapping[tuple[str, str], cp_model.IntVar]
    meet: Mapping[tuple[str, str], cp_model.IntVar]  # one is inside the other


def add_blocks(model: cp_model.CpModel, problem: Problem, size: Mapping[str, cp_model.IntVar]) -> Blocks:
    """The variables, and the rules that make them blocks of one cluster."""
    names = [call.name for call in problem.calls]
    inside = {pair: model.new_bool_var("inside[{},{}]".format(*pair)) for pair in permutations(names, 2)}
    equal, meet = {}, {}
    for one, other in combinations(names, 2):
        equal[one, other] = equal[other, one] = model.new_bool_var(f"equal[{one},{other}]")
        meet[one, other] = meet[other, one] = model.new_bool_var(f"meet[{one},{other}]")
    blocks = Blocks(size=size, inside=inside, equal=equal, meet=meet)
    _equal_and_meet_follow_inside(model, names, blocks)
    _a_part_is_smaller(model, names, blocks)
    _blocks_are_nested_or_apart(model, names, blocks)
    _parts_fit(model, problem, names, blocks)
    return blocks


def first_ranks(sizes: Mapping[str, int], inside: Mapping[tuple[str, str], bool]) -> dict[str, int]:
    """Where each call's block starts when every block holds its parts from its start on, the larger ones first."""
    free = {"": 0}  # the first rank within each block, or the cluster, that no part has taken
    firsts: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        around = [other for other in firsts if inside[name, other]]
        if same := [other for other in around if inside[other, name]]:
            firsts[name] = firsts[same[0]]
            continue
        holder = min(around, key=lambda other: sizes[other], default="")
        firsts[name] = free[holder]
        free[holder] += sizes[name]
        free[name] = firsts[name]
    return firsts


def _equal_and_meet_follow_inside(model: cp_model.CpModel, names: list[str], blocks: Blocks) -> None:
    """Blocks are equal when each is inside the other, and meet when one is."""
    for one, other in combinations(names, 2):
        there, back = blocks.inside[one, other], blocks.inside[other, one]
        equal, meet = blocks.equal[one, other], blocks.meet[one, other]
        model.add_bool_and(there, back).only_enforce_if(equal)
        model.add_bool_or(equal, ~there, ~back)
        model.add_bool_or(there, back).only_enforce_if(meet)
        model.add_implication(there, meet)
        model.add_implication(back, meet)


def _a_part_is_smaller(model: cp_model.CpModel, names: list[str], blocks: Blocks) -> None:
    """A block inside another has no more ranks, and fewer unless they are equal."""
    for one, other in permutations(names, 2):
        model.add(blocks.size[one] <= blocks.size[other]).only_enforce_if(blocks.inside[one, other])
        proper = (blocks.inside[one, other], ~blocks.inside[other, one])
        model.add(blocks.size[one] < blocks.size[other]).only_enforce_if(*proper)


def _blocks_are_nested_or_apart(model: cp_model.CpModel, names: list[str], blocks: Blocks) -> None:
    """What is inside a part is inside the whole, and two blocks around a third meet."""
    for one, other, third in permutations(names, 3):
        model.add_bool_or(~blocks.inside[one, other], ~blocks.inside[other, third], blocks.inside[one, third])
        if other < third:
            model.add_bool_or(~blocks.inside[one, other], ~blocks.inside[one, third], blocks.meet[other, third])


def _parts_fit(model: cp_model.CpModel, problem: Problem, names: list[str], blocks: Blocks) -> None:
    """The largest parts of a block, and of the cluster, have together no more ranks than it; equal ones count once."""
    first = {name: model.new_bool_var(f"first[{name}]") for name in names}  # of those that are equal to it
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
        taken = []
        for part in names:
            if part == whole:
                continue
            between = [_between(model, proper, part, third, whole) for third in names if third not in (part, whole)]
            counts = model.new_bool_var(f"counts[{part},{whole}]")
            outside = [] if whole is None else [~first[whole], ~proper[part, whole]]
            model.add_bool_or(counts, ~first[part], *outside, *between)
            ranks = model.new_int_var(0, problem.num_ranks, f"taken[{part},{whole}]")
            model.add(ranks >= blocks.size[part]).only_enforce_if(counts)
            taken.append(ranks)
        model.add(sum(taken) <= (problem.num_ranks if whole is None else blocks.size[whole]))


def _between(
    model: cp_model.CpModel,
    proper: Mapping[tuple[str, str], cp_model.IntVar],
    part: str,
    third: str,
    whole: str | None,
) -> cp_model.IntVar:
    """Whether a third block lies between a part and a whole, or around the part when the whole is the cluster."""
    if whole is None:
        return proper[part, third]
    between = model.new_bool_var(f"between[{part},{third},{whole}]")
    model.add_implication(between, proper[part, third])
    model.add_implication(between, proper[third, whole])
    return between
