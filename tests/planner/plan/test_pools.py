"""Pools are powers of two within a node and whole nodes, of one kind, and do not cross."""

from __future__ import annotations

import itertools
import math

import pytest

from meshwright.planner.plan.pools import crossing_violations, first_ranks, pool_sizes, pool_violations
from tests.planner.jobs import mixed_facts, small_facts


@pytest.mark.parametrize(
    ("nodes", "per_node", "sizes"),
    [
        (1, 6, (1, 2, 4, 6)),
        (3, 2, (1, 2, 4, 6)),
        (2, 6, (1, 2, 6, 12)),
        (5, 8, (1, 2, 4, 8, 16, 24, 32, 40)),
        (19, 4, (1, 2, 4, 8, 16, 32, 48, 64, 76)),
        (96, 1, (1, 2, 4, 8, *range(16, 97, 16))),
    ],
)
def test_pools_are_powers_of_two_within_a_node_and_whole_nodes(
    nodes: int, per_node: int, sizes: tuple[int, ...]
) -> None:
    cluster = small_facts(nodes=nodes, ranks_per_node=per_node).cluster
    assert pool_sizes(cluster) == sizes
    for size in sizes:
        for first in first_ranks(cluster, size):
            inside = first // per_node == (first + size - 1) // per_node
            assert inside if size < per_node else first % per_node == 0
    for first, size in itertools.product(range(cluster.num_ranks + 1), range(1, cluster.num_ranks + 2)):
        legal = size in sizes and first in first_ranks(cluster, size)
        assert (pool_violations(cluster, first, size) == ()) == legal


def test_few_pools_are_enough_for_a_large_cluster() -> None:
    """Every number of nodes up to eight; of more at most a quarter of all nodes lies between one and the next."""
    assert len(pool_sizes(small_facts(nodes=8, ranks_per_node=8).cluster)) == 11
    for nodes in (9, 17, 100, 128, 2048):
        sizes = [size // 8 for size in pool_sizes(small_facts(nodes=nodes, ranks_per_node=8).cluster) if size >= 8]
        assert len(sizes) <= 8 + math.log2(nodes)
        assert max(after - before for before, after in itertools.pairwise(sizes)) <= nodes / 4


def test_of_two_pools_one_lies_in_the_other_or_they_are_apart() -> None:
    assert crossing_violations(range(0, 4), range(4, 8)) == ()
    assert crossing_violations(range(0, 8), range(4, 8)) == ()
    assert crossing_violations(range(4, 6), range(0, 8)) == ()
    assert crossing_violations(range(0, 4), range(2, 6)) == (
        "ranks 0 to 3 and ranks 2 to 5 have only a part in common; of two pools one lies in the other, or they are "
        "apart.",
    )


def test_a_pool_is_of_one_kind_of_node() -> None:
    """Two ranks of each of two kinds: no pool of all four, and none that begins in the middle."""
    cluster = mixed_facts().cluster
    assert pool_sizes(cluster) == (1, 2)
    assert first_ranks(cluster, 2) == (0, 2)
    assert first_ranks(cluster, 1) == (0, 1, 2, 3)
