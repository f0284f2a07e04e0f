"""Degrees, budgets and pools of a configuration in our words."""

from __future__ import annotations

import pytest

from meshwright.planner.imports.said import Configured, Said, cluster_of, layout_of, pools_in_a_row, rows_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout


def test_replicas_are_what_degrees_leave() -> None:
    assert layout_of({"tp": 2, "pp": 2}, 16, sp=True) == Layout(tp=2, pp=2, dp=4, sp=True)
    assert layout_of({"tp": 1}, 4, sp=True) == Layout(dp=4)
    with pytest.raises(BadInput, match="tp=3 does not divide the 8 ranks"):
        layout_of({"tp": 3}, 8)


def test_a_budget_holds_rows_of_mean_length_and_one_at_least() -> None:
    assert rows_of(4096, 1, 1024) == 4
    assert rows_of(512, 2, 1024) == 1
    assert rows_of(10, 1, 1024) == 1


def test_pools_follow_each_other() -> None:
    assert dict(pools_in_a_row([("a", 4), ("b", 2)])) == {"a": "0:4", "b": "4:2"}


def test_pools_are_nodes_or_parts_of_one() -> None:
    assert cluster_of({"a": (2, 8), "b": (1, 8)}) == (3, 8)
    assert cluster_of({"a": (1, 4), "b": (1, 2), "c": (1, 2)}) == (1, 8)
    with pytest.raises(BadInput, match="a 2 x 8, b 1 x 4"):
        cluster_of({"a": (2, 8), "b": (1, 4)})


def test_words_are_found_by_what_they_are_of() -> None:
    found = Configured(said=(Said("cluster.nodes", 2, ("trainer.nnodes",)),), steps_ahead=0)
    assert found.words == {"cluster.nodes": 2}
