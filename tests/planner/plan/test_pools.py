"""Pools are any part of a single node, powers of two within one of several nodes, and whole nodes, of one kind or all
of two, and do not cross."""

from __future__ import annotations

import itertools
import math

import pytest

from meshwright.planner.plan.pool_rules import (
    first_ranks,
    mixed_pool_rules,
    overlap_violations,
    pool_sizes,
    pool_violations,
    row_split_rules,
)
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.hardware import MixedCluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from tests.planner.jobs import mixed_facts, small_facts

BOTH = 2
"""The number of the two kinds of `mixed_facts` together."""


@pytest.mark.parametrize(
    ("nodes", "per_node", "sizes"),
    [
        (1, 6, (1, 2, 3, 4, 5, 6)),
        (1, 8, (1, 2, 3, 4, 5, 6, 7, 8)),
        (1, 10, (1, 2, 4, 6, 8, 10)),
        (1, 20, (1, 2, 4, 8, 12, 16, 20)),
        (3, 2, (1, 2, 4, 6)),
        (2, 6, (1, 2, 6, 12)),
        (5, 8, (1, 2, 4, 8, 16, 24, 32, 40)),
        (19, 4, (1, 2, 4, 8, 16, 32, 48, 64, 76)),
        (96, 1, (1, 2, 4, 8, *range(16, 97, 16))),
    ],
)
def test_pools_are_any_part_of_a_single_node_or_powers_of_two_within_one_of_several_and_whole_nodes(
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
    assert overlap_violations(range(0, 4), range(4, 8)) == ()
    assert overlap_violations(range(0, 8), range(4, 8)) == ()
    assert overlap_violations(range(4, 6), range(0, 8)) == ()
    assert overlap_violations(range(0, 4), range(2, 6)) == (
        "ranks 0-3 and ranks 2-5 overlap in part; of two pools one must contain the other, or they must be disjoint.",
    )


def test_a_pool_is_of_one_kind_of_node_or_all_of_two() -> None:
    """Two ranks of each of two kinds: a pool of all four, and none that begins in the middle."""
    cluster = mixed_facts().cluster
    assert pool_sizes(cluster) == (1, 2, 4)
    assert first_ranks(cluster, 4) == (0,)
    assert first_ranks(cluster, 2) == (0, 2)
    assert first_ranks(cluster, 1) == (0, 1, 2, 3)


def test_of_three_kinds_a_pool_has_neighbouring_ones() -> None:
    mixed = mixed_facts().cluster
    cluster = MixedCluster(parts=(*mixed.parts, mixed.parts[0]), between=mixed.parts[0].inter_node)
    assert (pool_sizes(cluster), first_ranks(cluster, 4)) == ((1, 2, 4), (0, 2))
    (crossing,) = overlap_violations(range(0, 4), range(2, 6))
    assert "overlap in part" in crossing


def test_whole_replicas_are_on_nodes_of_one_kind_each() -> None:
    facts, train = mixed_facts(batch_size=8), PPO_GRAPH.by_name["actor_train"]
    assert mixed_pool_rules(facts, train, Layout(pp=2, dp=2), 1) == ()
    assert mixed_pool_rules(facts, train, Layout(tp=2, dp=2, sp=True), BOTH) == ()
    (sentence,) = mixed_pool_rules(facts, train, Layout(pp=2, dp=2), BOTH)
    assert sentence == ("pp=2 splits replicas over the kinds of nodes of a pool of 2 x toy and 2 x fast toy; use pp=1.")
    (sentence,) = mixed_pool_rules(facts, train, Layout(tp=4), BOTH)
    assert sentence.startswith("replicas of 4 ranks do not fit 2 x toy and 2 x fast toy evenly; use tp x cp = 2.")
    (sentence,) = mixed_pool_rules(facts, train, Layout(dp=4, ep=2), BOTH)
    assert sentence.startswith("ep=2 needs equally many sequences on every replica")
    (sentence,) = mixed_pool_rules(facts, PPO_GRAPH.by_name["actor_generate"], Layout(dp=4), BOTH)
    assert sentence.startswith("actor_generate runs on nodes of one kind")


def test_rows_are_dealt_by_speed_on_two_kinds_of_nodes_alone() -> None:
    facts, dealt = mixed_facts(), Schedule(rows=(3, 5))
    assert row_split_rules(facts, 8, Layout(dp=4), dealt, BOTH) == ()
    assert row_split_rules(facts, 8, Layout(dp=2), Schedule(), 0) == ()
    (sentence,) = row_split_rules(facts, 8, Layout(dp=2), dealt, 0)
    assert sentence == "rows=[3, 5] on nodes of one kind, which split rows evenly; leave it out."
    for rows in ((), (8,), (4, 5), (7, 1), (1, 7), (2, 3, 3)):
        (sentence,) = row_split_rules(facts, 8, Layout(dp=4), Schedule(rows=rows), BOTH)
        assert sentence.startswith(
            f"rows={list(rows)} does not split 8 sequences over two kinds of nodes, at least 2 and 2 of them"
        )
