"""The cluster of a job, by name or typed in."""

from __future__ import annotations

import pytest

from meshwright.planner.job.sections import ClusterSpec
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import Device, Link, cpu_links, local_cluster

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
