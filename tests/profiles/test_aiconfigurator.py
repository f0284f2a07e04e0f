"""The installed package is read as it is; what it has not measured is refused with the nearest name."""

from __future__ import annotations

import pytest

from meshwright.profiles.aiconfigurator import (
    ENGINES,
    PACKAGE,
    SYSTEMS,
    Attention,
    Gemm,
    HeadCounts,
    Message,
    Operators,
    RoutedExperts,
    device_of,
    has_operators,
    package_version,
    read_configs,
    read_experts,
    read_operators,
)
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import device_names

pytest.importorskip("pyarrow")
if package_version() is None:
    pytest.skip(f"{PACKAGE} is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def operators() -> Operators:
    return read_operators("l40s")


def test_every_system_has_a_device_of_ours() -> None:
    assert set(SYSTEMS) <= set(device_names())


def test_operators_come_with_the_versions_that_they_were_measured_in(operators: Operators) -> None:
    assert (operators.device, operators.system) == ("l40s", "l40s")
    assert operators.versions == {PACKAGE: package_version(), "vllm": "0.24.0", "nccl": "2.27.3"}


def test_seconds_are_positive_and_plausible_for_the_device(operators: Operators) -> None:
    """4096 cubed is 137 GFLOP; an L40S has a peak of 362 TFLOP/s in bf16."""
    assert 137e9 / 362e12 < operators.gemms[Gemm(4096, 4096, 4096)] < 5 * 137e9 / 362e12
    heads = HeadCounts(32, 8, 128)
    assert (
        operators.prefill_attention[heads][Attention(1, 1024)] < operators.prefill_attention[heads][Attention(1, 4096)]
    )
    assert (
        operators.decode_attention[heads][Attention(64, 1023)] < operators.decode_attention[heads][Attention(64, 8191)]
    )
    measured = (
        *operators.gemms.values(),
        *operators.collectives.values(),
        *(
            seconds
            for known in (operators.prefill_attention, operators.decode_attention)
            for of in known.values()
            for seconds in of.values()
        ),
    )
    assert min(measured) > 0


def test_attention_of_a_device_that_was_measured_before_windows_were_told_is_read() -> None:
    """It used to end in a KeyError."""
    heads = HeadCounts(32, 8, 128)
    a100 = read_operators("a100-80gb")
    assert a100.prefill_attention[heads][Attention(1, 1024)] > 0 < a100.decode_attention[heads][Attention(64, 1023)]


@pytest.mark.parametrize("engine", ENGINES)
def test_products_in_fp8_of_an_engine_leave_out_what_casts_their_inputs(engine: str) -> None:
    """8192 x 8192 weights are 67 MB, which an H200 reads in 14 us; its peak in fp8 is 1979 TFLOP/s."""
    fp8, bf16 = (read_operators("h200", engine=engine, precision=name) for name in ("fp8", "bf16"))
    assert 14e-6 < fp8.gemms[Gemm(1, 8192, 8192)] < 0.7 * bf16.gemms[Gemm(1, 8192, 8192)]
    assert 2 * 8192**3 / 1979e12 < fp8.gemms[Gemm(8192, 8192, 8192)] < 0.7 * bf16.gemms[Gemm(8192, 8192, 8192)]
    assert min(fp8.gemms.values()) > 0
    heads = HeadCounts(8, 1, 128)
    assert fp8.decode_attention[heads][Attention(64, 8191)] < bf16.decode_attention[heads][Attention(64, 8191)]
    assert list(fp8.versions)[1] == engine


def test_an_engine_reduces_through_peers_where_that_is_quicker() -> None:
    alone, peers = (
        read_operators("h200", engine="trtllm", custom_all_reduce=with_peers) for with_peers in (False, True)
    )
    small, large = Message("all_reduce", 8, 2**16), Message("all_gather", 8, 2**29)
    assert peers.collectives[small] < 0.5 * alone.collectives[small]
    assert peers.collectives[large] == alone.collectives[large]


def test_a_precision_that_a_device_was_not_measured_in_is_refused() -> None:
    with pytest.raises(BadInput, match=r"has no data/a100_sxm/quantize/.*; profile the device itself"):
        read_operators("a100-80gb", precision="fp8")


def test_a_collective_is_keyed_by_the_bytes_of_the_whole_tensor(operators: Operators) -> None:
    """512 MiB over PCIe 4.0 x16 take a ring of two at least 512 MiB / 32 GB/s."""
    assert operators.collectives[Message("all_reduce", 2, 2**29)] > 2**29 / 32e9
    assert {message.operation for message in operators.collectives} == {"all_reduce", "all_gather", "reduce_scatter"}


@pytest.mark.parametrize("device", SYSTEMS)
def test_a_device_is_found_by_either_name(device: str) -> None:
    assert device_of(device) == device_of(SYSTEMS[device]) == device
    assert has_operators(device)


@pytest.mark.parametrize(("name", "hint"), [("h20_sxm", "'h200_sxm'"), ("H200", "'h200'"), ("tpu", "known: a100-80gb")])
def test_a_name_that_is_not_known_gets_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(BadInput, match=f"--device '{name}' has no operators in {PACKAGE}; .*{hint}"):
        device_of(name)


def test_configs_of_quantised_models_are_left_out() -> None:
    configs = read_configs()
    assert configs["meta-llama/Meta-Llama-3.1-8B"]["hidden_size"] == 4096
    assert not any("FP8" in name or "NVFP4" in name for name in configs)


def test_experts_are_read_by_their_sizes_and_loads() -> None:
    """Qwen3-235B: 16384 tokens take 4.9 TFLOP, which an H100 does not do in less than 5 ms; one reads 8 experts."""
    known = read_experts("h100-sxm", engine="trtllm")
    many, one = (known[RoutedExperts(tokens, 4096, 1536, 8, 128, 1, 1, "balanced")] for tokens in (16384, 1))
    assert 5e-3 < many < 15e-3
    assert 8 * 3 * 4096 * 1536 * 2 / 3.35e12 < one < 3e-4
    assert min(known.values()) > 0
    assert {key.distribution for key in known} == {"balanced", "power_law_1.01", "power_law_1.2"}
