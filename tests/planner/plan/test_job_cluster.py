"""The cluster of a job, by name or typed in."""

from __future__ import annotations

import pytest

from meshwright.planner.job.sections import ClusterSpec
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import (
    DEFAULT_NETWORK,
    Device,
    Link,
    cpu_links,
    device_named,
    local_cluster,
    network_named,
)

TCP = Link(seconds=50e-6, bytes_per_second=1.25e9)


def test_several_machines_like_this_one_differ_from_it_in_the_network_between_them_alone() -> None:
    here, several = local_cluster(1), ClusterSpec(nodes=3, ranks_per_node=1, network=TCP).resolve()
    assert several == here.model_copy(update={"nodes": 3, "inter_node": TCP})
    assert several.link(1) == here.intra_node
    assert several.link(2) == TCP


def test_the_network_between_machines_like_this_one_is_not_guessed() -> None:
    with pytest.raises(BadInput, match=r"cluster.nodes=2: local .* give cluster.network, by name or"):
        ClusterSpec(nodes=2).resolve()


def test_a_typed_cpu_has_the_links_of_processes_and_not_of_a_graphics_card() -> None:
    cpu = Device(
        name="host",
        kind="cpu",
        memory_bytes=10**9,
        memory_bytes_per_second=1e10,
        flops_per_second={"fp32": 1e11},
        launch_seconds=1e-5,
        source="typed",
    )
    cluster = ClusterSpec(device=cpu, nodes=2, ranks_per_node=1, network=TCP).resolve()
    assert (cluster.intra_node, cluster.host) == cpu_links()
    card = ClusterSpec(device=cpu.model_copy(update={"kind": "cuda"}), ranks_per_node=1).resolve()
    assert card.intra_node != cluster.intra_node


def test_a_job_without_a_network_gets_that_of_its_device() -> None:
    """Every job without a network had InfiniBand of 200 Gb/s, whatever its device."""
    assert ClusterSpec(device="H100", nodes=2).resolve().inter_node == network_named("ib-ndr-400")
    assert ClusterSpec(device="a100-80gb", nodes=2).resolve().inter_node == network_named("ib-hdr-200")
    typed_in = device_named("h100-sxm")[0]
    assert ClusterSpec(device=typed_in).resolve().inter_node == network_named(DEFAULT_NETWORK)
