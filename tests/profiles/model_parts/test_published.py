"""Published models have the parameters of the module that transformers builds, and its cache."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_shape import ModelSpec, model_from_config, run_violations
from meshwright.profiles.packing import row_work
from tests.profiles.model_parts.published import PUBLISHED

MODELS = pytest.mark.parametrize("name", PUBLISHED)
RUN = {
    *(
        "olmo-2-7b",
        "olmo-2-32b",
        "phi-3-mini-4k",
        "phi-4",
        "phi-4-mini",
        "glm-4-9b-0414",
        "granite-3.3-8b",
        "granite-3.3-2b",
    ),
    *("gemma-2-2b", "gemma-2-27b", "gemma-3-1b", "gemma-3-27b-text", "olmo-3-7b", "smollm3-3b", "ministral-8b"),
    *("glm-4.5", "glm-4.5-air", "minimax-m2", "deepseek-v3", "kimi-k2", "llama-4-scout-text", "llama-4-maverick-text"),
    *("qwen3-next-80b-a3b", "qwen3.5-9b-text", "qwen3.5-35b-a3b-text"),
}
BUILT_TYPES = {"kimi_k2": "deepseek_v3"}
"""Types of published configs that transformers builds as another."""


def spec(name: str) -> ModelSpec:
    """The model without padded rows of the vocabulary."""
    return replace(model_from_config(PUBLISHED[name], name=name), vocab_multiple=1)


@cache
def built(name: str) -> Mapping[str, torch.Size]:
    """Shapes of the parameters of the module that transformers builds, by name, without memory."""
    config = {key: value for key, value in PUBLISHED[name].items() if key not in ("architectures", "model_type")}
    kind = PUBLISHED[name]["model_type"]
    config = deepcopy(config)  # transformers writes into its rotary parameters
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(BUILT_TYPES.get(kind, kind), **config))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


@MODELS
def test_parameters_are_those_of_the_module_layer_by_layer(name: str) -> None:
    model, counts = spec(name), {key: shape.numel() for key, shape in built(name).items()}
    assert model.num_params == sum(counts.values())
    for number in range(model.num_layers):
        own = {key: count for key, count in counts.items() if f".layers.{number}." in key}
        experts = sum(count for key, count in own.items() if ".experts." in key)
        assert model.params_between(number, number + 1) == sum(own.values()), number
        assert model.expert_params_between(number, number + 1) == experts, number


@MODELS
def test_a_token_passes_every_matrix_once_and_those_of_its_experts(name: str) -> None:
    """Two FLOPs per weight of a matrix, and those of attention and states: half of them are multiply-adds."""
    model, passed = spec(name), 0.0
    for key, shape in built(name).items():
        is_matrix = len(shape) > 1 and "embed" not in key and "conv1d" not in key
        share = 1.0
        if ".experts." in key:
            assert model.experts is not None
            share = model.experts.experts_per_token / model.experts.num_experts
        passed += shape.numel() * share * is_matrix
    if model.tied_embeddings:
        passed += model.vocab_size * model.hidden_size
    states = model.linear.work * model.linear_layers_between(0, model.num_layers) if model.linear else 0
    assert sum(model.active_layer_params) + model.active_head_params == round(passed) + states
    [work] = row_work(model, [1])
    heads = model.num_heads * (model.head_dim + (model.latent.value_dim if model.latent else model.head_dim))
    index = model.latent.indexer if model.latent else None
    scored = index.num_heads * index.head_dim if index else 0
    attended = (heads + scored) * (model.num_full_layers + model.num_window_layers)
    assert work == round(passed) + states + attended


CACHES = {
    "gemma-2-2b": (2 * 4 * 256, 13, 13, 0),
    "gemma-3-1b": (2 * 1 * 256, 4, 22, 0),
    "gemma-3-27b-text": (2 * 16 * 128, 10, 52, 0),
    "olmo-2-7b": (2 * 32 * 128, 32, 0, 0),
    "olmo-3-7b": (2 * 32 * 128, 8, 24, 0),
    "phi-3-mini-4k": (2 * 32 * 96, 0, 32, 0),
    "phi-4": (2 * 10 * 128, 40, 0, 0),
    "glm-4-9b-0414": (2 * 2 * 128, 40, 0, 0),
    "glm-4.5": (2 * 8 * 128, 92, 0, 0),
    "qwen3-next-80b-a3b": (2 * 2 * 256, 12, 0, 36),
    "qwen3.5-9b-text": (2 * 4 * 256, 8, 0, 24),
    "deepseek-v3": (512 + 64, 61, 0, 0),
    "deepseek-v3.2": (512 + 64 + 128, 61, 0, 0),
    "minimax-m2": (2 * 8 * 128, 62, 0, 0),
    "granite-3.3-8b": (2 * 8 * 128, 40, 0, 0),
    "smollm3-3b": (2 * 4 * 128, 36, 0, 0),
    "ministral-8b": (2 * 8 * 128, 9, 27, 0),
    "llama-4-scout-text": (2 * 8 * 128, 12, 36, 0),
    "nemotron-h-8b": (2 * 8 * 128, 4, 0, 24),
}
"""Elements per token and layer, and the layers that keep all tokens, those of a window, and a state."""


@pytest.mark.parametrize("name", CACHES)
def test_the_cache_is_that_of_transformers(name: str) -> None:
    model = spec(name)
    layers = model.num_full_layers, model.num_window_layers, model.linear_layers_between(0, model.num_layers)
    assert (model.cached_elements, *layers) == CACHES[name]


@pytest.mark.parametrize(
    ("name", "state_bytes"),
    [
        # 32 value heads of 128 x 128 in fp32; 2 x 16 key heads and 32 value heads of 128, 4 tokens, in bf16
        ("qwen3-next-80b-a3b", 32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 4 * 2),
        # 128 heads of 64 x 128 in fp32; 2 x 8 groups of 128 and 128 heads of 64, 4 tokens, in bf16
        ("nemotron-h-8b", 128 * 64 * 128 * 4 + (2 * 8 * 128 + 128 * 64) * 4 * 2),
    ],
)
def test_a_state_has_the_same_bytes_for_any_length(name: str, state_bytes: int) -> None:
    linear = spec(name).linear
    assert linear is not None
    assert linear.state_bytes(2) == state_bytes
    assert sum(linear.shard(4).state_bytes(2) for _ in range(4)) == state_bytes


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b"])
def test_a_state_of_transformers_has_these_elements(name: str) -> None:
    """A model of the same family with few small layers keeps what is counted for them."""
    small = {"hidden_size": 32, "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    small |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4} if "qwen" in name else {"mamba_num_heads": 4}
    small |= {"num_hidden_layers": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_groups": 2}
    config = {key: value for key, value in (PUBLISHED[name] | small).items() if key in PUBLISHED[name]}
    if "hybrid_override_pattern" in config:
        config["hybrid_override_pattern"] = "ME*M"
    model = model_from_config(config, name="small")
    kind = config.pop("model_type")
    built_model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **deepcopy(config)))
    cache = built_model(torch.arange(9)[None], use_cache=True).past_key_values
    assert model.linear is not None
    for number, layer in enumerate(cache.layers):
        if model.linear_layers_between(number, number + 1):
            assert layer.recurrent_states[0].numel() == model.linear.state_elements
            assert layer.recurrent_states[0].dtype == torch.float32
            assert layer.conv_states[0].numel() == model.linear.conv_elements
        elif model.attention_layers_between(number, number + 1):
            assert layer.keys.numel() + layer.values.numel() == 9 * model.cached_elements


@MODELS
def test_the_rotary_embedding_is_that_of_transformers(name: str) -> None:
    model, given = spec(name), deepcopy(PUBLISHED[name])
    kind = given.pop("model_type")
    if kind == "nemotron_h":  # without positions
        return
    theirs = AutoConfig.for_model(BUILT_TYPES.get(kind, kind), **given).rope_parameters
    full = theirs.get("full_attention", theirs)
    assert model.rope_theta == full["rope_theta"]
    assert model.rotary_share == full.get("partial_rotary_factor", 1.0)
    if "sliding_attention" in theirs:
        assert model.local_rope_theta == theirs["sliding_attention"]["rope_theta"]


@MODELS
def test_what_cannot_be_run_is_named_in_a_sentence(name: str) -> None:
    sentences = [*run_violations(spec(name))]
    assert bool(sentences) is (name not in RUN)
    assert all(sentence.endswith(".") for sentence in sentences)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("deepseek-v3.2", "has an indexer of tokens, which can be planned"),
        ("nemotron-h-8b", "the activation relu2, Mamba layers, layers of one block each"),
    ],
)
def test_a_sentence_names_the_parts_that_are_not_run(name: str, part: str) -> None:
    assert any(part in sentence for sentence in run_violations(spec(name)))


def test_key_heads_of_a_gated_delta_layer_serve_equally_many_value_heads() -> None:
    with pytest.raises(BadInput, match="linear_num_key_heads=16 does not divide linear_num_value_heads=24; correct"):
        model_from_config(PUBLISHED["qwen3.5-9b-text"] | {"linear_num_value_heads": 24}, name="m")


def test_a_granite_model_has_no_scalar_head_to_run() -> None:
    critic = model_from_config(PUBLISHED["granite-3.3-2b"], name="granite", scalar_head=True)
    [sentence] = run_violations(critic)
    assert "transformers has no sequence classification for GraniteForCausalLM" in sentence
