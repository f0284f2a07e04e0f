"""Degrees, budgets and pools of a configuration in our words."""

from __future__ import annotations

import pytest

from meshwright.planner.trainers.parsed_config import (
    ParsedConfig,
    ParsedField,
    cluster_of,
    consecutive_pools,
    layout_notes,
    layout_of,
)
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout


def test_replicas_are_what_degrees_leave() -> None:
    assert layout_of({"tp": 2, "pp": 2}, 16, sp=True) == Layout(tp=2, pp=2, dp=4, sp=True)
    assert layout_of({"tp": 1}, 4, sp=True) == Layout(dp=4)
    with pytest.raises(BadInput, match=r"^tp=3 does not divide the 8 ranks of its pool; use degrees"):
        layout_of({"tp": 3, "pp": 1}, 8)
    with pytest.raises(
        BadInput, match=r"^width: its pool has 0 ranks; give its nodes and its GPUs a node as 1 or more"
    ):
        layout_of({"tp": 1}, 0, keys={"tp": "width"})
    with pytest.raises(BadInput, match=r"^width=3 x pp=2 does not divide the 8 ranks"):
        layout_of({"tp": 3, "pp": 2}, 8, keys={"tp": "width"})


def test_pools_follow_each_other() -> None:
    assert dict(consecutive_pools([("a", 4), ("b", 2)])) == {"a": "0:4", "b": "4:2"}


def test_pools_are_nodes_or_parts_of_one() -> None:
    assert cluster_of({"a": (2, 8), "b": (1, 8)}) == (3, 8)
    assert cluster_of({"a": (1, 4), "b": (1, 2), "c": (1, 2)}) == (1, 8)
    with pytest.raises(BadInput, match="a 2 x 8, b 1 x 4"):
        cluster_of({"a": (2, 8), "b": (1, 4)})


def test_words_are_found_by_what_they_are_of() -> None:
    found = ParsedConfig(fields=(ParsedField("cluster.nodes", 2, ("trainer.nnodes",)),), steps_ahead=0)
    assert found.by_name == {"cluster.nodes": 2}


def test_a_sentence_on_a_field_names_the_keys_of_the_trainer() -> None:
    """A refusal of workload.batch_size=0 used to name a key that the user's configuration does not have."""
    fields = (
        ParsedField("workload.batch_size", 0, ("rollout_batch", "n")),
        ParsedField("workload.response", 9, ("max_new_tokens",)),
        ParsedField("grpo.temperature", 1.0, ("temperature",)),
        ParsedField("cluster.nodes", 1, ()),
    )
    found = ParsedConfig(fields=fields, steps_ahead=0)
    from_size = "; workload.batch_size comes from rollout_batch and n."
    assert found.with_keys("workload.batch_size is 0.") == f"workload.batch_size is 0{from_size}"
    assert found.with_keys("batch_size=0: use 1.") == f"batch_size=0: use 1{from_size}"
    assert found.with_keys("response.max = 9 is too long.").endswith("; workload.response comes from max_new_tokens.")
    unnamed = "a response of micro_batch_size=3 on cluster.nodes=1 at ppo.grpo.temperature."
    assert found.with_keys(unnamed) == unnamed


def test_experts_that_are_wider_than_the_replicas_are_narrowed_and_told() -> None:
    layout = layout_of({"tp": 4, "ep": 8}, 8)
    assert (layout.dp, layout.ep) == (2, 2)
    assert list(layout_notes("ep-size", {"tp": 4, "ep": 8}, layout)) == [
        "ep-size=8 is read as 2: here experts are divided over replicas, and there are 2."
    ]
    assert not list(layout_notes("ep-size", {"tp": 4, "ep": 2}, layout))


def test_whole_experts_are_dealt_out_to_whole_replicas() -> None:
    assert layout_of({"tp": 4, "ep": 8, "etp": 1}, 16, sp=True) == Layout(tp=4, dp=4, ep=8, etp=1, sp=True)
    assert layout_of({"tp": 4, "ep": 1, "etp": 1}, 16) == layout_of({"tp": 4, "etp": 0}, 16) == Layout(tp=4, dp=4)
    wider = layout_of({"tp": 4, "ep": 64, "etp": 1}, 16)
    assert wider == Layout(tp=4, dp=4, ep=16, etp=1)
    assert list(layout_notes("ep-size", {"ep": 64, "etp": 1}, wider)) == [
        "ep-size=64 is read as 16: here experts are divided over replicas, and there are 4."
    ]
    cut = layout_of({"tp": 4, "ep": 2, "etp": 1}, 16)
    assert cut == Layout(tp=4, dp=4, ep=2)
    assert list(layout_notes("ep-size", {"ep": 2, "etp": 1}, cut)) == [
        "ep-size=2 is read with experts sharded over tp=4: whole experts (etp=1) need an ep that is a multiple of tp."
    ]


def test_experts_take_whole_sequences_on_replicas_in_place_of_ranks_that_share_one() -> None:
    degrees = {"tp": 4, "pp": 4, "cp": 2, "ep": 16, "etp": 1}
    layout = layout_of(degrees, 64, sp=True)
    assert layout == Layout(tp=4, pp=4, dp=4, ep=16, etp=1, sp=True)
    (sentence,) = layout_notes("ep-size", degrees, layout)
    assert "read as 2 times as many replicas" in sentence
    assert layout_of({"cp": 2}, 8) == Layout(cp=2, dp=4)


@pytest.mark.parametrize(
    ("pools", "cluster"),
    [
        ({"actor": (1, 2), "critic": (1, 2), "vllm": (1, 4)}, (1, 8)),
        ({"actor": (1, 4), "critic": (1, 8), "vllm": (1, 4)}, (2, 8)),
        ({"train": (1, 4), "generate": (1, 4)}, (1, 8)),
        ({"train": (2, 4), "generate": (2, 4)}, (4, 4)),
        ({"train": (2, 8), "generate": (1, 8)}, (3, 8)),
        ({"train": (1, 16)}, (1, 16)),
    ],
)
def test_parts_of_nodes_lie_together_on_nodes_of_eight(
    pools: dict[str, tuple[int, int]], cluster: tuple[int, int]
) -> None:
    assert cluster_of(pools) == cluster


def test_a_pool_that_would_lie_across_nodes_goes_first() -> None:
    assert dict(consecutive_pools([("a", 4), ("b", 8), ("c", 4)])) == {"b": "0:8", "a": "8:4", "c": "12:4"}
    assert dict(consecutive_pools([("a", 1), ("b", 3)])) == {"a": "0:1", "b": "1:3"}
    assert dict(consecutive_pools([("a", 8), ("b", 16)])) == {"a": "0:8", "b": "8:16"}
