import pytest

from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import (
    cpu_device,
    device_named,
    device_names,
    local_cluster,
    network_named,
    network_names,
    network_source,
)

WANTED = (
    "a100-40gb a100-80gb a800 h100-sxm h100-pcie h800 h200 h20 l40s l4 rtx-4090 rtx-6000-pro b200 gb200 b300 gb300 "
    "mi300x"
)


@pytest.mark.parametrize("name", WANTED.split())
def test_a_datacentre_device_is_known_with_its_source(name: str) -> None:
    device, intra_node, host = device_named(name)
    assert (device.name, device.kind) == (name, "cuda")
    assert len(device.source) > 40
    assert device.flops_per_second["bf16"] > device.flops_per_second["fp32"] > 1e13
    assert 1e11 < device.memory_bytes_per_second < 1e13
    assert intra_node.bytes_per_second >= host.bytes_per_second or name in ("gb200", "gb300")


def test_no_other_device_is_known() -> None:
    assert set(device_names()) == set(WANTED.split())


def test_published_numbers_are_the_published_numbers() -> None:
    device, intra_node, _ = device_named("a100-80gb")
    assert device.flops_per_second["bf16"] == 312e12
    assert device.memory_bytes == 80 * 2**30
    assert intra_node.bytes_per_second == 300e9
    assert network_named("roce-800-per-node").bytes_per_second == 800e9 / 8 / 8


def test_an_unknown_name_comes_with_a_suggestion() -> None:
    with pytest.raises(BadInput, match="device 'h100' is not known; did you mean 'h100-pcie' or 'h100-sxm'"):
        device_named("h100")
    with pytest.raises(BadInput, match="network 'ib-ndr' is not known; did you mean 'ib-ndr-400'"):
        network_named("ib-ndr")
    with pytest.raises(BadInput, match="device 'abacus' is not known; known: a100-40gb, "):
        device_named("abacus")


def test_this_machine_is_the_same_cluster_twice() -> None:
    assert local_cluster() == local_cluster()
    assert local_cluster().device.kind == "cpu"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_the_machine(ranks: int) -> None:
    one, many = local_cluster(1), local_cluster(ranks)
    assert many.num_ranks == ranks
    assert many.device.memory_bytes == one.device.memory_bytes // ranks
    assert many.device.flops_per_second["fp32"] == pytest.approx(one.device.flops_per_second["fp32"] / ranks)
    assert (many.device.name == one.device.name) == (ranks == 1)


def test_no_ranks_is_refused() -> None:
    with pytest.raises(BadInput, match="ranks=0 is not a number of ranks"):
        local_cluster(0)


def test_more_cores_are_faster_and_half_a_core_launches_at_half_speed() -> None:
    half, two = cpu_device(0.5, 2**30), cpu_device(2, 2**30)
    assert two.flops_per_second["fp32"] == 4 * half.flops_per_second["fp32"]
    assert half.launch_seconds == 2 * two.launch_seconds


def test_every_network_has_a_source() -> None:
    assert "ib-ndr-400" in network_names()
    assert all(len(network_source(name)) > 10 for name in network_names())
