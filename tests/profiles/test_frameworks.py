"""Frameworks and families of devices by name."""

import pytest

from meshwright.profiles.devices import device_named, device_names
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import framework_named


@pytest.mark.parametrize("name", ["runtime", "megatron-core", "megatron-deepspeed", "tensorrt-llm", "vllm", "nemo-rl"])
def test_a_framework_is_known_with_its_source(name: str) -> None:
    assert len(framework_named(name).source) > 20


def test_a_server_is_its_engine_with_a_busier_host() -> None:
    engine, server = framework_named("tensorrt-llm"), framework_named("tensorrt-llm-serve")
    assert server.row_seconds > engine.row_seconds == 0
    same = {"round_seconds", "row_seconds", "source"}
    assert server.model_dump(exclude=same) == engine.model_dump(exclude=same)


def test_an_unknown_framework_or_kind_is_refused() -> None:
    with pytest.raises(BadInput, match=r"framework 'megatron' is not known; did you mean 'megatron-2021' or"):
        framework_named("megatron")
    with pytest.raises(BadInput, match="device kind 'tpu' is not known; use cuda or cpu"):
        efficiency_of("tpu")


@pytest.mark.parametrize("name", device_names())
def test_every_device_has_a_family_with_dated_constants(name: str) -> None:
    device, _, _ = device_named(name)
    efficiency = efficiency_of(device.kind, name)
    assert efficiency.date >= "2026-11-21"
    assert len(efficiency.source) > 40
    assert device.num_processors > 50


def test_a_device_that_is_not_listed_takes_the_constants_of_its_kind() -> None:
    assert efficiency_of("cuda", "my own") is efficiency_of("cuda", "h100-sxm")
    assert efficiency_of("cuda", "a100-80gb") is not efficiency_of("cuda", "h100-sxm")
    assert not efficiency_of("cpu").overlaps_launch
