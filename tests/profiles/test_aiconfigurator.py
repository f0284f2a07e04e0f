"""The installed package is read as it is; what it has not measured is refused with the nearest name."""

from __future__ import annotations

import pytest

from meshwright.profiles.aiconfigurator import (
    PACKAGE,
    SYSTEMS,
    Attention,
    Gemm,
    HeadCounts,
    Message,
    Operators,
    device_of,
    knows,
    package_version,
    read_configs,
    read_operators,
)
from meshwright.profiles.devices import device_names
from meshwright.profiles.errors import BadInput

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
    assert operators.prompts[heads][Attention(1, 1024)] < operators.prompts[heads][Attention(1, 4096)]
    assert operators.decoding[heads][Attention(64, 1023)] < operators.decoding[heads][Attention(64, 8191)]
    measured = (
        *operators.gemms.values(),
        *operators.collectives.values(),
        *(
            seconds
            for known in (operators.prompts, operators.decoding)
            for of in known.values()
            for seconds in of.values()
        ),
    )
    assert min(measured) > 0


def test_a_collective_is_keyed_by_the_bytes_of_the_whole_tensor(operators: Operators) -> None:
    """512 MiB over PCIe 4.0 x16 take a ring of two at least 512 MiB / 32 GB/s."""
    assert operators.collectives[Message("all_reduce", 2, 2**29)] > 2**29 / 32e9
    assert {message.operation for message in operators.collectives} == {"all_reduce", "all_gather", "reduce_scatter"}


@pytest.mark.parametrize("device", SYSTEMS)
def test_a_device_is_found_by_either_name(device: str) -> None:
    assert device_of(device) == device_of(SYSTEMS[device]) == device
    assert knows(device)


@pytest.mark.parametrize(("name", "hint"), [("h20_sxm", "'h200_sxm'"), ("H200", "'h200'"), ("tpu", "known: a100-80gb")])
def test_a_name_that_is_not_known_gets_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(BadInput, match=f"--device '{name}' has no operators in {PACKAGE}; .*{hint}"):
        device_of(name)


def test_configs_of_quantised_models_are_left_out() -> None:
    configs = read_configs()
    assert configs["meta-llama/Meta-Llama-3.1-8B"]["hidden_size"] == 4096
    assert not any("FP8" in name or "NVFP4" in name for name in configs)
