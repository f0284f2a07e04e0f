"""Linears in 8-bit floats are those of the layers, and are refused where they cannot be or where nothing is gained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Experts
from meshwright.profiles.frameworks import EngineName
from meshwright.profiles.hardware import Cluster, device_named, local_cluster
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_parts.fp8_weights import (
    fp8_shape_violations,
    linear_shapes,
    linears_of,
    require_quantisable,
)
from meshwright.profiles.model_shape import ModelSpec, model_from_config

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


@pytest.fixture
def small() -> ModelSpec:
    return model_from_config(CONFIG, name="small")


def on(name: str) -> Cluster:
    """A machine of one device of this name."""
    device, link, host = device_named(name)
    local = local_cluster(1)
    return local.model_copy(update={"device": device, "intra_node": link, "inter_node": link, "host": host})


def test_linears_are_all_of_a_layer_but_norms_and_biases(small: ModelSpec) -> None:
    found, (queries, output, up, down) = linears_of(small), linear_shapes(small)
    assert (queries, output, up, down) == ((64, 128), (64, 64), (64, 192), (96, 64))
    norms_and_biases = 2 * 64 + 128
    assert found.num_weights == small.layer_params - norms_and_biases
    assert (found.num_inputs, found.num_outputs) == (64 + 64 + 64 + 96, 128 + 64 + 192 + 64)


def test_ranks_of_tensor_parallelism_hold_every_weight_once(small: ModelSpec) -> None:
    assert 2 * linears_of(small.shard(2)).num_weights == linears_of(small).num_weights


@pytest.mark.parametrize(
    ("change", "where", "engine", "says"),
    [
        ({}, ("a100-80gb", "bf16"), "vllm", "a100-80gb does not multiply 8-bit floats; leave generation_weights out"),
        ({}, ("h100-sxm", "fp32"), "vllm", "has bf16 products on a GPU, and precision is fp32; use bf16"),
        ({}, ("h100-sxm", "bf16"), "sglang", "not supported by engine sglang .* use meshwright-eager or .* or vllm"),
        (
            {"experts": Experts(num_experts=4, experts_per_token=2, ffn_size=32)},
            ("h100-sxm", "bf16"),
            "vllm",
            "for dense models, and small has experts",
        ),
        ({"adapter": Adapter(rank=4, alpha=8.0)}, ("h100-sxm", "bf16"), "vllm", "is for actors without an adapter"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(
    small: ModelSpec, change: dict[str, Any], where: tuple[str, str], engine: EngineName, says: str
) -> None:
    device, precision = where
    with pytest.raises(BadInput, match=says):
        require_quantisable(replace(small, **change), on(device), precision, engine)


@pytest.mark.parametrize("device", ["h100-sxm", "h200", "b200", "l40s"])
def test_newer_gpus_multiply_8_bit_floats(small: ModelSpec, device: str) -> None:
    require_quantisable(small, on(device), "bf16", "meshwright-graph")


def test_a_cpu_may_store_8_bit_floats_in_any_precision(small: ModelSpec) -> None:
    for precision in ("fp32", "bf16"):
        require_quantisable(small, local_cluster(2), precision, "meshwright-eager")


def test_a_gpu_multiplies_in_multiples_of_sixteen(small: ModelSpec) -> None:
    assert fp8_shape_violations(small, 1) == fp8_shape_violations(small, 2) == ()
    (sentence,) = fp8_shape_violations(replace(small, ffn_size=88), 1)
    assert sentence.startswith("tp=1 leaves a linear of small with a side of 88, and a GPU multiplies 8-bit floats")
