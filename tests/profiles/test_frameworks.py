"""Frameworks, what generates with them, and families of devices by name."""

from typing import get_args

import pytest

from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import (
    OWN_ENGINES,
    EngineName,
    engine_named,
    framework_named,
    own_engine,
    own_framework,
    require_graph_support,
)
from meshwright.profiles.hardware import device_named, device_names


@pytest.mark.parametrize(
    "name", ["runtime", "runtime-cuda", "megatron-core", "megatron-deepspeed", "tensorrt-llm", "vllm", "nemo-rl"]
)
def test_a_framework_is_known_with_its_source(name: str) -> None:
    assert len(framework_named(name).source) > 20


def test_a_server_is_its_engine_with_a_busier_host() -> None:
    engine, server = framework_named("tensorrt-llm"), framework_named("tensorrt-llm-serve")
    assert server.row_seconds > engine.row_seconds == 0
    same = {"round_seconds", "row_seconds", "source"}
    assert server.model_dump(exclude=same) == engine.model_dump(exclude=same)


def test_an_unknown_framework_or_kind_is_refused() -> None:
    with pytest.raises(
        BadInput,
        match=r"framework 'megatron' is not known; did you mean 'megatron-2021', 'megatron-bridge', 'megatron-core' or",
    ):
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


@pytest.mark.parametrize("name", get_args(EngineName))
def test_an_engine_is_known_with_its_source_and_passes_of_a_framework(name: EngineName) -> None:
    engine = engine_named(name)
    assert len(engine.source) > 40
    assert len(engine.framework_on("cuda").source) > 40


def test_ours_take_weights_where_they_are_read_and_the_others_through_a_loader() -> None:
    assert {name for name in get_args(EngineName) if engine_named(name).refit.in_place} == set(OWN_ENGINES)


def test_ours_differ_on_a_gpu_in_how_the_layers_of_a_decode_step_start_alone() -> None:
    eager, graph = (engine_named(name).framework_on("cuda") for name in OWN_ENGINES)
    differing = {name for name in type(eager).model_fields if getattr(eager, name) != getattr(graph, name)}
    assert differing == {"recorded_kernels", "start_share", "source"}


def test_ours_has_kernels_of_its_own_on_a_gpu_and_other_engines_are_what_they_are() -> None:
    assert own_framework("cuda") is framework_named("runtime-cuda")
    assert own_framework("cpu") is framework_named("runtime")
    assert all(engine_named(name).framework_on("cpu") is engine_named(name).framework_on("cuda") for name in others())


def others() -> list[EngineName]:
    return [name for name in get_args(EngineName) if name not in OWN_ENGINES]


def test_run_records_decode_steps_on_a_gpu_and_not_with_experts() -> None:
    found = [own_engine(kind, has_experts=experts) for kind in ("cuda", "cpu") for experts in (False, True)]
    assert found == ["meshwright-graph", "meshwright-eager", "meshwright-eager", "meshwright-eager"]


def test_steps_that_cannot_be_recorded_are_refused_with_the_reason() -> None:
    require_graph_support("meshwright-graph", "cuda", has_experts=False)
    with pytest.raises(BadInput, match=r"^engine=meshwright-graph .* a CPU has no graphs; use meshwright-eager\.$"):
        require_graph_support("meshwright-graph", "cpu", has_experts=False)
    with pytest.raises(BadInput, match="the host routes tokens to experts; use meshwright-eager"):
        require_graph_support("meshwright-graph", "cuda", has_experts=True)


def test_an_unknown_engine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(BadInput, match=r"^engine 'vlm' is not known; did you mean 'vllm'\?$"):
        engine_named("vlm")
