"""How blocks lie to each other: whatever the rules admit can be laid out in ranks, and whatever is laid out is."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations, product

import pytest

from meshwright.planner.solver import cp_model
from meshwright.planner.solver.problem import Mode, Problem, Resource, Run, Task
from meshwright.planner.solver.rank_range_model import add_rank_ranges, first_ranks

NAMES = ("a", "b", "c")
PAIRS = tuple(permutations(NAMES, 2))
NUM_RANKS = 4


def problem() -> Problem:
    modes = tuple(Mode(resource=Resource(0, size, "P"), ticks=1) for size in (1, 2, 4))
    return Problem(
        num_ranks=NUM_RANKS,
        device_units=1,
        tasks=tuple(Task(name, modes) for name in NAMES),
        activities=tuple(Run(name=name, task=name) for name in NAMES),
        anywhere=True,
    )


def laid_out(sizes: Mapping[str, int]) -> set[tuple[bool, ...]]:
    """Which block is inside which, over all positions of blocks of these sizes."""
    found = set()
    for firsts in product(*(range(0, NUM_RANKS, sizes[name]) for name in NAMES)):
        ranks = {name: set(range(first, first + sizes[name])) for name, first in zip(NAMES, firsts, strict=True)}
        found.add(tuple(ranks[one] <= ranks[other] for one, other in PAIRS))
    return found


def admitted(sizes: Mapping[str, int]) -> set[tuple[bool, ...]]:
    """The same by the rules."""

    def is_admitted(inside: tuple[bool, ...]) -> bool:
        model = cp_model.CpModel()
        size = {name: model.new_int_var(sizes[name], sizes[name], name) for name in NAMES}
        blocks = add_rank_ranges(model, problem(), size)
        for pair, value in zip(PAIRS, inside, strict=True):
            model.add(blocks.inside[pair] == value)
        return cp_model.CpSolver().solve(model) == cp_model.OPTIMAL

    return {inside for inside in product((False, True), repeat=len(PAIRS)) if is_admitted(inside)}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (4, 2, 1), (2, 1, 1), (4, 4, 2)])
def test_the_rules_admit_exactly_what_can_be_laid_out(sizes: tuple[int, int, int]) -> None:
    by_name = dict(zip(NAMES, sizes, strict=True))
    assert admitted(by_name) == laid_out(by_name)


@pytest.mark.parametrize("sizes", list(product((1, 2, 4), repeat=3)))
def test_blocks_are_given_ranks_in_which_they_lie_as_they_were_said_to(sizes: tuple[int, int, int]) -> None:
    by_name = dict(zip(NAMES, sizes, strict=True))
    for inside in laid_out(by_name):
        firsts = first_ranks(by_name, dict(zip(PAIRS, inside, strict=True)))
        ranks = {name: set(range(first, first + by_name[name])) for name, first in firsts.items()}
        assert all(first % by_name[name] == 0 and first + by_name[name] <= NUM_RANKS for name, first in firsts.items())
        assert tuple(ranks[one] <= ranks[other] for one, other in PAIRS) == inside
