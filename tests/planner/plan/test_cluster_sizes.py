"""Numbers of ranks that a job may be asked about."""

from __future__ import annotations

import pytest

from meshwright.planner.job.whatif_settings import size_settings
from meshwright.profiles.errors import BadInput
from tests.planner.jobs import mixed_facts, small_facts


def test_sizes_are_whole_nodes_or_parts_of_one() -> None:
    cluster = small_facts(nodes=2, ranks_per_node=4).cluster
    found = size_settings(cluster, [1, 4, 16])
    assert [(s["cluster.nodes"], s["cluster.ranks_per_node"]) for s in found] == [(1, 1), (1, 4), (4, 4)]
    with pytest.raises(BadInput, match="--sizes 6 is not a number of whole nodes of 4 ranks; use 4 or 8"):
        size_settings(cluster, [6])


def test_no_ranks_and_nodes_of_several_kinds_are_refused() -> None:
    with pytest.raises(BadInput, match="--sizes 0 is not a number of whole nodes of 4 ranks; use 1 or more"):
        size_settings(small_facts().cluster, [4, 0])
    with pytest.raises(BadInput, match="--sizes takes a cluster of one kind"):
        size_settings(mixed_facts().cluster, [2])
