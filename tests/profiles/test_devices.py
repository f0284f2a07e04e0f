import pytest

from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import (
    cpu_device,
    device_name,
    device_named,
    device_names,
    device_nicknames,
    local_cluster,
    network_named,
    network_names,
    network_source,
    usual_network,
)

WANTED = (
    "a100-40gb a100-80gb a800 h100-sxm h100-pcie h800 h200 gh200 h20 l40s l4 rtx-4090 rtx-6000-pro b200 gb200 b300 "
    "gb300 mi300x"
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
    with pytest.raises(BadInput, match="device 'A100' is not known; did you mean 'a100-40gb' or 'a100-80gb'"):
        device_named("A100")
    with pytest.raises(BadInput, match="device 'h100-nvl' is not known; did you mean 'h100-sxm'"):
        device_named("h100-nvl")
    with pytest.raises(BadInput, match="network 'ib-nd' is not known; did you mean 'ib-ndr-400'"):
        network_named("ib-nd")
    with pytest.raises(BadInput, match="device 'H101' is not known; did you mean 'h100-sxm'"):
        device_named("H101")
    with pytest.raises(BadInput, match="device 'abacus' is not known; known: a100-40gb, "):
        device_named("abacus")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100", "h100-sxm"),
        ("H100-PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("a100_80g", "a100-80gb"),
        ("H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_device_is_known_in_any_case_by_nickname_and_as_nvidia_smi_prints_it(text: str, name: str) -> None:
    assert device_named(text) == device_named(name)


def test_a_nickname_names_one_device_and_no_other_ones_name() -> None:
    nicknames = [nickname for name in device_names() for nickname in device_nicknames(name)]
    assert len(set(nicknames)) == len(nicknames)
    assert set(nicknames).isdisjoint(device_names())
    assert [device_name(nickname.upper()) for name in device_names() for nickname in device_nicknames(name)] == [
        name for name in device_names() for _ in device_nicknames(name)
    ]


def test_a_network_is_known_in_any_case_and_by_nickname() -> None:
    assert network_named("NDR") == network_named("IB-NDR-400") == network_named("ib-ndr-400")


@pytest.mark.parametrize("name", device_names())
def test_every_device_has_a_usual_network(name: str) -> None:
    assert usual_network(name) in network_names()


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
