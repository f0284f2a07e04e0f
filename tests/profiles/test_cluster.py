"""Ranks are numbered through the parts of a cluster, and a group of them crosses a link."""

from collections.abc import Callable

import pytest

from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import (
    Cluster,
    Link,
    MixedCluster,
    cpu_device,
    device_named,
    max_usable_bytes,
    replicas_of_parts,
    require_uniform,
)

NEAR, FAR = Link(seconds=1e-6, bytes_per_second=1e11), Link(seconds=1e-5, bytes_per_second=1e10)


@pytest.fixture
def nodes() -> Callable[..., Cluster]:
    """Nodes of four ranks."""

    def of(number: int, memory_bytes: int = 2**30, *, kind: str = "cpu") -> Cluster:
        device = cpu_device(1, memory_bytes).model_copy(update={"kind": kind})
        return Cluster(
            nodes=number,
            ranks_per_node=4,
            device=device,
            intra_node=NEAR,
            inter_node=FAR,
            host=NEAR,
            host_memory_bytes=2**40,
        )

    return of


def test_ranks_within_a_node_talk_over_its_links_and_more_over_the_fabric(nodes: Callable[..., Cluster]) -> None:
    cluster = nodes(3)
    assert cluster.num_ranks == 12
    assert [cluster.link(number) for number in (1, 4, 5)] == [NEAR, NEAR, FAR]


def test_ranks_are_numbered_through_the_parts(nodes: Callable[..., Cluster]) -> None:
    mixed = MixedCluster(parts=(nodes(2), nodes(1, 2**31)), between=FAR)
    assert (mixed.num_ranks, mixed.nodes, mixed.ranks_per_node) == (12, 3, 4)
    assert mixed.first_ranks == (0, 8)
    assert [mixed.part_of(rank) for rank in (0, 7, 8, 11)] == [0, 0, 1, 1]
    assert [mixed.usable_bytes(rank) for rank in (7, 8)] == [2**30, 2**31]
    assert max_usable_bytes(mixed) == 2**31
    assert mixed.name == "8 x cpu, 1 cores + 4 x cpu, 1 cores"


def test_behind_the_parts_come_the_pairs_of_two_neighbours(nodes: Callable[..., Cluster]) -> None:
    mixed = MixedCluster(parts=(nodes(2), nodes(1), nodes(1)), between=FAR)
    pools = (range(0, 8), range(8, 12), range(0, 12), range(8, 16))
    assert [mixed.part_of_pool(ranks) for ranks in pools] == [0, 1, 3, 4]
    assert [mixed.parts_of(part) for part in (1, 3, 4)] == [mixed.parts[1:2], mixed.parts[:2], mixed.parts[1:]]
    assert replicas_of_parts(mixed, 3, 2) == (4, 2)


def test_a_cluster_of_one_kind_is_its_only_part(nodes: Callable[..., Cluster]) -> None:
    cluster = nodes(2)
    assert cluster.parts == (cluster,)
    assert (cluster.first_ranks, cluster.part_of(5), cluster.part_of_pool(range(8))) == ((0,), 0, 0)
    assert cluster.parts_of(0) == cluster.parts
    assert require_uniform(cluster, "--sizes") is cluster


def test_what_takes_one_kind_of_node_refuses_several(nodes: Callable[..., Cluster]) -> None:
    mixed = MixedCluster(parts=(nodes(1), nodes(1)), between=FAR)
    with pytest.raises(BadInput, match=r"--sizes takes a cluster of one kind, and this one is 4 x .* give it one of"):
        require_uniform(mixed, "--sizes")


@pytest.mark.parametrize(
    ("change", "says"), [({"ranks_per_node": 8}, "differ in ranks_per_node .4, 8"), ({}, "differ in kind .cpu, cuda")]
)
def test_parts_are_alike_in_what_a_pool_needs_alike(
    nodes: Callable[..., Cluster], change: dict[str, int], says: str
) -> None:
    other = nodes(1, kind="cpu" if change else "cuda").model_copy(update=change)
    with pytest.raises(ValueError, match=says):
        MixedCluster(parts=(nodes(1), other), between=FAR)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_cluster_is_read_back_as_the_kind_that_it_is(nodes: Callable[..., Cluster], mixed: bool) -> None:
    cluster = MixedCluster(parts=(nodes(1), nodes(2)), between=FAR) if mixed else nodes(2)
    assert parse(type(cluster), canonical_json(cluster), "cluster") == cluster


def test_a_plan_may_not_fill_what_driver_and_libraries_keep() -> None:
    device, _, _ = device_named("a100-80gb")
    assert 0.85 * device.memory_bytes < device.usable_bytes < 0.95 * device.memory_bytes
    assert cpu_device(1, 2**30).usable_bytes == 2**30
