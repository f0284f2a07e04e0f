from collections.abc import Callable

import pytest

from meshwright.cost_models.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    SEND_RECEIVE,
    Group,
    Network,
    groups_of,
)
from meshwright.cost_models.cost import Source
from meshwright.profiles.efficiency import Protocol, efficiency_of
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout

OPERATIONS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND_RECEIVE)
GROUPS = (Group(2, 2), Group(8, 8), Group(16, 8), Group(4, 1))
HOPS = {"intra_node": 1.0, "inter_node": 100.0}
"""Seconds of one hop, so long that bytes do not matter."""


@pytest.fixture
def cluster(a100s: Callable[[int], Cluster]) -> Cluster:
    return a100s(4)


@pytest.fixture
def network(cluster: Cluster) -> Network:
    return Network(cluster, efficiency_of("cuda", "a100-80gb"))


def test_groups_follow_the_order_of_ranks(cluster: Cluster) -> None:
    groups = groups_of(Layout(tp=2, dp=16), cluster)
    assert (groups.tensor, groups.data) == (Group(2, 2), Group(16, 4))
    wide = groups_of(Layout(tp=8, pp=2, dp=2), cluster)
    assert (wide.tensor, wide.data, wide.neighbours) == (Group(8, 8), Group(2, 1), Group(2, 1))
    assert groups_of(Layout(tp=2, pp=2), cluster).neighbours == Group(2, 2)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_group_of_one_exchanges_nothing(network: Network, operation: str) -> None:
    assert network.seconds(operation, Group(1, 1), 1e9)[0] == 0.0


@pytest.mark.parametrize("name", ["a100-80gb", "h100-sxm"])
def test_a_message_goes_its_own_way_and_no_slower_than_round_a_ring(cluster: Cluster, name: str) -> None:
    efficiency = efficiency_of("cuda", name)
    assert efficiency.message is not None
    own, ring = (Network(cluster, e) for e in (efficiency, efficiency.model_copy(update={"message": None})))
    for num_bytes in (2.0**20, 2.0**24, 2.0**28):
        expected = efficiency.message.start_seconds + num_bytes / (300e9 * efficiency.message.link_bytes)
        assert own.seconds(SEND_RECEIVE, Group(2, 2), num_bytes)[0] == pytest.approx(expected)
        assert expected < ring.seconds(SEND_RECEIVE, Group(2, 2), num_bytes)[0]
        assert own.seconds(ALL_GATHER, Group(2, 2), num_bytes) == ring.seconds(ALL_GATHER, Group(2, 2), num_bytes)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(cluster: Cluster) -> None:
    protocol = Protocol(start_seconds=0.0, step=1.0, link_bytes=0.7, fabric_bytes=0.9)
    network = Network(cluster, efficiency_of("cuda").model_copy(update={"protocols": (protocol,), "multicast": None}))
    for group in GROUPS:
        halves = network.seconds(REDUCE_SCATTER, group, 1e8)[0] + network.seconds(ALL_GATHER, group, 1e8)[0]
        assert network.seconds(ALL_REDUCE, group, 1e8)[0] == pytest.approx(halves)


def test_a_large_all_reduce_runs_at_bus_bandwidth(network: Network) -> None:
    """8 ranks, 1 GB: 2 x 7/8 GB over 300 GB/s x efficiency."""
    seconds, source = network.seconds(ALL_REDUCE, Group(8, 8), 1e9)
    assert seconds == pytest.approx(
        2 * 7 / 8 * 1e9 / (300e9 * efficiency_of("cuda", "a100-80gb").protocols[-1].link_bytes), rel=0.02
    )
    assert source is Source.ANALYTIC


def test_ranks_of_one_node_drive_their_adapters_side_by_side(network: Network) -> None:
    alone = network.seconds(ALL_REDUCE, Group(2, 1), 1e9)[0]
    together = network.seconds(ALL_REDUCE, Group(16, 8), 1e9)[0]
    assert together == pytest.approx(alone / 8 * (15 / 16) / (1 / 2), rel=0.02)


def test_a_ring_over_nodes_hops_between_them_once_for_each_and_within_them_for_the_rest(cluster: Cluster) -> None:
    """Of 15 hops round 16 ranks on 2 nodes of 8 one is between nodes."""
    protocol = Protocol(start_seconds=0.0, step=1.0, link_bytes=1.0, fabric_bytes=1.0)
    links = {name: getattr(cluster, name).model_copy(update={"seconds": s}) for name, s in HOPS.items()}
    efficiency = efficiency_of("cuda").model_copy(update={"protocols": (protocol,), "multicast": None})
    network = Network(cluster.model_copy(update=links), efficiency)
    assert network.seconds(ALL_GATHER, Group(16, 8), 1e-9)[0] == pytest.approx(100.0 + 14 * 1.0)
    assert network.seconds(ALL_REDUCE, Group(16, 8), 1e-9)[0] == pytest.approx(2 * (100.0 + 14 * 1.0))


def test_a_switch_that_reduces_halves_a_large_all_reduce_of_eight_and_helps_no_small_one(cluster: Cluster) -> None:
    hopper = efficiency_of("cuda", "h100-sxm")
    with_switch = Network(cluster, hopper)
    without = Network(cluster, hopper.model_copy(update={"multicast": None}))
    large, small = ((ALL_REDUCE, Group(8, 8), num_bytes) for num_bytes in (2**30, 2**16))
    assert with_switch.seconds(*large)[0] < 0.75 * without.seconds(*large)[0]
    assert with_switch.seconds(*small) == without.seconds(*small)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("tier", ["intra_node", "inter_node"])
def test_a_faster_link_is_never_slower(cluster: Cluster, operation: str, group: Group, tier: str) -> None:
    link = getattr(cluster, tier)
    for change in ({"bytes_per_second": 3 * link.bytes_per_second}, {"seconds": link.seconds / 3}):
        faster = cluster.model_copy(update={tier: link.model_copy(update=change)})
        before = Network(cluster, efficiency_of("cuda")).seconds(operation, group, 1e7)[0]
        assert Network(faster, efficiency_of("cuda")).seconds(operation, group, 1e7)[0] <= before


def test_engines_reduce_through_peer_memory_among_eight_ranks_at_most(cluster: Cluster) -> None:
    wide = cluster.model_copy(update={"nodes": 1, "ranks_per_node": 16})
    efficiency = efficiency_of("cuda", "h100-sxm")
    rings, peers = (Network(wide, efficiency, peer_reductions=peer) for peer in (False, True))
    seconds = [[net.seconds(ALL_REDUCE, Group(n, n), 2.0**16)[0] for net in (rings, peers)] for n in (8, 16)]
    assert seconds[0][1] < seconds[0][0]
    assert seconds[1][1] == seconds[1][0]
