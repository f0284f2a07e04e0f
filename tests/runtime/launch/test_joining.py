"""A rank that torchrun has started: its seat, and the place of its node in the plan."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from meshwright.profiles.errors import BadInput
from meshwright.runtime.launch.launch import MESSAGES_ONLY
from meshwright.runtime.launch.torchrun import LaunchedRank, NodeOptions, _node_number

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_what_torchrun_says_is_a_seat_and_nothing_said_is_none() -> None:
    seat = LaunchedRank.from_environment(TORCHRUN)
    assert seat == LaunchedRank(rank=3, local_rank=1, num_ranks=4, ranks_per_node=2, address="10.0.0.1")
    assert (seat.node, seat.num_nodes) == (1, 2)
    assert LaunchedRank.from_environment({"RANK": "0"}) is None


def test_a_seat_that_the_plan_does_not_have_is_refused() -> None:
    seat = LaunchedRank.from_environment(TORCHRUN)
    assert seat is not None
    seat.require(nodes=2, ranks_per_node=2)
    with pytest.raises(BadInput, match=r"2 of 4 ranks .* has 1 nodes of 4; use torchrun --nnodes 1 --nproc-per-node 4"):
        seat.require(nodes=1, ranks_per_node=4)
    with pytest.raises(BadInput, match="rank 2 was started as local rank 1 of 2; ranks of a node must be consecutive"):
        replace(seat, rank=2).require(nodes=2, ranks_per_node=2)


def places(*node_ranks: int | None) -> list[int]:
    """The plan's node of every rank of two nodes of two, all of which agree at once."""
    store = HashStore()

    def agree(rank: int) -> int:
        node, local_rank = divmod(rank, 2)
        seat = LaunchedRank(rank=rank, local_rank=local_rank, num_ranks=4, ranks_per_node=2, address="127.0.0.1")
        place = NodeOptions(preparation=MESSAGES_ONLY, node_rank=node_ranks[node], work="w", logs=Path("not written"))
        return _node_number(store, seat, place)

    with ThreadPoolExecutor(4) as ranks:
        return list(ranks.map(agree, range(4)))


def test_the_ranks_of_a_node_agree_on_its_place_in_the_plan() -> None:
    assert places(None, None) == [0, 0, 1, 1]
    assert places(1, 0) == [1, 1, 0, 0]


def test_a_launcher_that_says_nothing_of_its_nodes_has_one() -> None:
    seat = LaunchedRank.from_environment(
        {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
    )
    assert seat is not None
    assert (seat.ranks_per_node, seat.num_nodes) == (4, 1)
