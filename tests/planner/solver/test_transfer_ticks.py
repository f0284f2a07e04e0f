"""Ticks between classes of layouts are those between the layouts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from meshwright.planner.solver.transfer_ticks import TransferTicks

OVERLAPS = (0, 4)


def random_ticks(seed: int) -> TransferTicks:
    """Layouts a to h in few classes at both ends, some of which move to themselves in other ticks."""
    rng = np.random.default_rng(seed)
    sources, targets = ({name: int(rng.integers(3)) for name in "abcdefgh"} for _ in range(2))
    moved = rng.integers(0, 3, (3, 3, len(OVERLAPS)))
    in_place = {name: rng.integers(0, 3, len(OVERLAPS)) for name in "abcd"}
    return TransferTicks(sources, targets, {0: 0, 4: 1}, moved, in_place)


def mapping_of(ticks: TransferTicks) -> dict[tuple[str, str, int], int]:
    return {key: ticks.between(*key) for key in product(ticks.sources, ticks.targets, OVERLAPS)}


@pytest.mark.parametrize("seed", range(20))
def test_classes_of_layouts_are_a_short_form_of_a_mapping(seed: int) -> None:
    ticks = random_ticks(seed)
    same = TransferTicks.from_mapping(mapping_of(ticks))
    assert ticks == same
    assert ticks.among("abc", "cdh") == same.among("abc", "cdh")
    assert ticks.longest >= max(mapping_of(ticks).values())
    assert same.longest == max(mapping_of(ticks).values())


@pytest.mark.parametrize("seed", range(20))
def test_layouts_have_equal_keys_only_if_all_transfers_take_equally_long(seed: int) -> None:
    ticks = random_ticks(seed).among("abcdef", "cdefgh")
    known = mapping_of(ticks)
    sources, targets = ticks.keys_of_sources(), ticks.keys_of_targets()
    for one, other in product(ticks.sources, repeat=2):
        rows = [[known[name, target, n] for target, n in product(ticks.targets, OVERLAPS)] for name in (one, other)]
        assert (sources[one] == sources[other]) <= (rows[0] == rows[1])
    for one, other in product(ticks.targets, repeat=2):
        rows = [[known[source, name, n] for source, n in product(ticks.sources, OVERLAPS)] for name in (one, other)]
        assert (targets[one] == targets[other]) <= (rows[0] == rows[1])


@pytest.mark.parametrize("seed", range(20))
def test_merged_layouts_take_the_least_ticks_of_those_that_they_stand_for(seed: int) -> None:
    ticks = random_ticks(seed)
    representative = dict(zip("abcdef", "aaccee", strict=True))
    merged, known = ticks.merged(representative), mapping_of(ticks)
    for one, other, overlap in product("ace", "ace", OVERLAPS):
        least = min(
            duration
            for (source, target, n), duration in known.items()
            if (representative.get(source), representative.get(target), n) == (one, other, overlap)
        )
        assert merged.between(one, other, overlap) <= least
    without_own = TransferTicks.from_mapping(known).merged(representative)
    assert all(without_own.between(*key) >= merged.between(*key) for key in product("ace", "ace", OVERLAPS))


def test_what_is_not_known_takes_no_time() -> None:
    ticks = TransferTicks.from_mapping({("a", "b", 0): 3})
    assert [ticks.between("a", "b", 0), ticks.between("a", "b", 1), ticks.between("b", "a", 0)] == [3, 0, 0]
    assert TransferTicks().longest == 0
