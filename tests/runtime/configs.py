"""Configs of tiny models with keys left out, given twice and contradicting each other, and weights that fit them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from meshwright.profiles.model_parts.family_keys import FAMILIES

ABSENT = "absent"
"""The value of a key that is left out."""

_BASE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 3e-5,
    "tie_word_embeddings": False,
    "rope_theta": 700.0,
}
_GEMMA: dict[str, Any] = {key: value for key, value in _BASE.items() if key != "hidden_act"} | {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 24,
    "sliding_window": 6,
}
_LATENT: dict[str, Any] = _BASE | {
    "num_key_value_heads": 8,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
_DELTA: dict[str, Any] = _BASE | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama": _BASE | {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "Mistral": _BASE | {"sliding_window": None, "head_dim": 16},
    "Qwen2": _BASE | {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1, "layer_types": None},
    "Qwen3": _BASE | {"head_dim": 16, "attention_bias": True, "use_sliding_window": False, "sliding_window": 4},
    "Gemma": _BASE | {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "Mixtral": _BASE | {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": None, "head_dim": 16},
    "Qwen3Moe": _BASE
    | {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "head_dim": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": 4,
    },
    "Qwen2Moe": _BASE
    | {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": True,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    },
    "Glm4Moe": _BASE
    | {
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "head_dim": 16,
    },
    "DeepseekV2": _LATENT
    | {
        "q_lora_rank": None,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "mlp_bias": False,
    },
    "DeepseekV3": _LATENT | {"q_lora_rank": 24, "n_shared_experts": 2, "norm_topk_prob": True, "rope_interleave": True},
    "GptOss": _BASE
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "head_dim": 16,
        "sliding_window": 6,
        "attention_bias": True,
        "swiglu_limit": 0.3,
        "swiglu_alpha": 1.5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Llama4": _BASE
    | {
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "head_dim": 16,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 6,
        "attn_temperature_tuning": True,
        "floor_scale": 3,
        "attn_scale": 0.3,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "MiniMaxM2": _BASE | {"num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8},
    "Olmo2": _BASE | {"attention_bias": True, "head_dim": 16},
    "Phi3": _BASE | {"sliding_window": None, "partial_rotary_factor": 0.5, "head_dim": 16},
    "Granite": _BASE
    | {
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 3.0,
    },
    "Glm4": _BASE | {"attention_bias": True, "head_dim": 16, "partial_rotary_factor": 0.25},
    "SmolLM3": _BASE | {"no_rope_layer_interval": 2, "attention_bias": True, "use_sliding_window": False},
    "Ministral": _BASE | {"sliding_window": 64, "head_dim": 16, "layer_types": None},
    "Gemma2": _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Gemma3": _GEMMA | {"rope_local_base_freq": 90.0, "sliding_window_pattern": 2},
    "Olmo3": _BASE | {"sliding_window": 6, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "Qwen3_5": _DELTA,
    "Qwen3Next": _DELTA
    | {
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""Configs as older versions of transformers wrote them, `rope_theta` at the top."""

_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
_LONGROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.2],
    "long_factor": [1.5, 3.0, 2.0, 2.5],
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A config: that of a family with changes; its weights are made for it, with other changes where they are given."""

    family: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    made_for: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        found = {
            "architectures": [f"{self.family}ForCausalLM"],
            "model_type": FAMILIES[self.family].model_type,
            "pad_token_id": 0,  # the default of some families is above the small vocabulary
            **SHAPES[self.family],
            **self.changes,
        }
        # Transformers writes into the rotary parameters that it is given.
        return deepcopy({key: value for key, value in found.items() if value is not ABSENT})

    @property
    def name(self) -> str:
        """The changes, short enough to be read."""
        told = " ".join(f"{key}={json.dumps(value)}" for key, value in self.changes.items()) or "as it is"
        return f"{self.family}: {told}"


def left_out(family: str) -> Iterator[Case]:
    """The config as it is, and without each of its keys."""
    yield Case(family=family)
    for key in ("architectures", "model_type", *SHAPES[family]):
        yield Case(family=family, changes={key: ABSENT})
    yield Case(family=family, changes={"tie_word_embeddings": True}, made_for={"tie_word_embeddings": False})


def given_twice(family: str) -> Iterator[Case]:
    """Keys that say the same thing twice, or two things, or one that the family does not compute."""
    yield from _turned(family)
    yield from _contradicting(family)
    yield from (case for case in _of_families() if case.family == family)


def _turned(family: str) -> Iterator[Case]:
    """Rotary embeddings by old and new keys, one or both of them."""
    new: dict[str, Any] = {"rope_type": "default", "rope_theta": 90.0}
    for changes in (
        {"rope_theta": ABSENT, "rope_parameters": new},
        {"rope_theta": 90.0, "rope_parameters": new},
        {"rope_parameters": new},  # beside another base at the top
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": _LLAMA3},
        {"rope_scaling": {**_LLAMA3, "rope_theta": 90.0}},
        {"rope_parameters": _LLAMA3},
        {"rope_scaling": _LLAMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
        {"rope_scaling": _LLAMA3, "rope_parameters": _LLAMA3},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": _LLAMA3},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        {"rope_scaling": _YARN},
        {"rope_scaling": {**_YARN, "truncate": False, "attention_factor": 1.3}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"factor": 2.0}},
        {"rope_scaling": {"type": "llama3"} | {key: _LLAMA3[key] for key in _LLAMA3 if key != "rope_type"}},
        {"rope_scaling": {"type": "linear"} | _LLAMA3},
        {"rope_scaling": {key: _LLAMA3[key] for key in _LLAMA3 if key != "original_max_position_embeddings"}},
        {"rope_theta": ABSENT, "rope_scaling": _LLAMA3, "rope_parameters": new},
        {"rope_parameters": {**new, "rope_theta": 700.0, "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5},
        {"rope_theta": 0},
        {"rope_theta": None},
    ):
        if not (family == "Phi3" and "yarn" in str(changes)):  # which is longrope there, with other keys
            yield Case(family=family, changes=changes)


def _contradicting(family: str) -> Iterator[Case]:
    other = "Qwen2" if family == "Llama" else "Llama"
    for changes in (
        {"rms_norm_eps": 0.0},
        {"model_type": "granite", "embedding_multiplier": 2.0, "logits_scaling": 3.0},
        {"model_type": FAMILIES[other].model_type},
        {"architectures": None},
        {"architectures": []},
        {"hidden_activation": "gelu_pytorch_tanh"},
        {"hidden_activation": "silu"},
        {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": ABSENT},
        {"hidden_act": "gelu"},
        {"hidden_act": None},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"attention_bias": True},
        {"attention_bias": False},
        {"mlp_bias": True},
        {"num_key_value_heads": None},
        {"head_dim": None},
        {"head_dim": ABSENT, "num_key_value_heads": ABSENT},
        {"sliding_window": 4},
        {"sliding_window": 4, "use_sliding_window": True},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"layer_types": ["full_attention", "full_attention"]},
        {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 4},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 1, "norm_topk_prob": False},
        {"norm_topk_prob": False},
        {"num_experts": 4, "num_local_experts": 4},
        {"num_experts": 4, "num_local_experts": 2},
        {"num_experts": ABSENT, "num_local_experts": 4},
        {"tie_word_embeddings": None},
        {"tie_word_embeddings": "false"},
        {"query_pre_attn_scalar": None, "final_logit_softcapping": None},
    ):
        yield Case(family=family, changes=changes)
    yield Case(family=family, changes={"tie_word_embeddings": False}, made_for={"tie_word_embeddings": True})


def _of_families() -> Iterator[Case]:
    """What one family has and others have not."""
    yield Case(family="Gemma", changes={"hidden_act": "gelu"})
    yield Case(family="Gemma", changes={"hidden_act": "gelu", "hidden_activation": None})
    yield Case(family="Gemma", changes={"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"})
    yield Case(family="Gemma", changes={"use_bidirectional_attention": True})
    yield Case(family="Llama", changes={"attention_bias": ABSENT, "mlp_bias": ABSENT, "head_dim": ABSENT})
    yield Case(family="Qwen2", changes={"qkv_bias": False})
    yield Case(family="Qwen2", changes={"head_dim": 16})
    yield Case(family="Qwen3Moe", changes={"shared_expert_intermediate_size": 32})
    yield Case(family="Qwen3Moe", changes={"mlp_only_layers": [0]})
    yield Case(family="Qwen3Moe", changes={"decoder_sparse_step": 2})
    yield Case(family="Mixtral", changes={"shared_expert_intermediate_size": 32})
    yield Case(family="Mixtral", changes={"n_shared_experts": 1})
    yield Case(family="Mixtral", changes={"sliding_window": 5})
    yield Case(family="Glm4Moe", changes={"first_k_dense_replace": 0})
    yield Case(family="Glm4Moe", changes={"first_k_dense_replace": 2})
    yield Case(family="Glm4Moe", changes={"n_group": 1, "topk_group": 1})
    yield Case(family="Glm4Moe", changes={"n_group": 4})
    yield Case(family="Glm4Moe", changes={"n_group": 6})
    yield Case(family="Glm4Moe", changes={"topk_group": 4})
    yield Case(family="Glm4Moe", changes={"topk_group": 1})
    yield Case(family="Glm4Moe", changes={"use_qk_norm": False, "attention_bias": True})
    yield Case(family="Glm4Moe", changes={"n_shared_experts": 2, "partial_rotary_factor": 1.0})
    for family in ("Qwen3_5", "Qwen3Next"):
        yield Case(family=family, changes={"layer_types": ["full_attention", "linear_attention"] * 2})
        yield Case(family=family, changes={"layer_types": ["full_attention"] * 4})
        yield Case(family=family, changes={"full_attention_interval": 1})
        yield Case(family=family, changes={"linear_num_value_heads": 2})
        yield Case(family=family, changes={"linear_num_value_heads": 3})
        yield Case(family=family, changes={"linear_conv_kernel_dim": 1})
        yield Case(family=family, changes={"linear_key_head_dim": 0})
    yield Case(family="Qwen3Next", changes={"mlp_only_layers": [0]})
    yield Case(family="Qwen3Next", changes={"decoder_sparse_step": 2})
    yield Case(family="Qwen3Next", changes={"norm_topk_prob": False})
    for family in ("DeepseekV2", "DeepseekV3"):
        yield Case(family=family, changes={"rope_scaling": {**_YARN, "mscale_all_dim": 0}})
        yield Case(family=family, changes={"rope_scaling": {**_YARN, "mscale": 1.2}})
        yield Case(family=family, changes={"n_group": 1, "topk_group": 1})
        yield Case(family=family, changes={"n_group": None, "topk_group": None})
        yield Case(family=family, changes={"n_group": 6})
        yield Case(family=family, changes={"v_head_dim": 24})
        yield Case(family=family, changes={"v_head_dim": 32})
        yield Case(family=family, changes={"qk_nope_head_dim": 14})
        yield Case(family=family, changes={"kv_lora_rank": 18})
        yield Case(family=family, changes={"first_k_dense_replace": 2})
        yield Case(family=family, changes={"first_k_dense_replace": 0})
        yield Case(family=family, changes={"q_lora_rank": 16})
        yield Case(family=family, changes={"q_lora_rank": None})
    original = "original_max_position_embeddings"
    for changes in (
        {original: 16, "rope_scaling": _LONGROPE},  # rows of 17 tokens are longer
        {original: 17, "rope_scaling": _LONGROPE},
        {"rope_scaling": _LONGROPE},
        {original: 17, "rope_theta": ABSENT, "rope_parameters": {**_LONGROPE, "factor": 3.0, "rope_theta": 90.0}},
        {original: 16, "rope_scaling": {**_LONGROPE, "attention_factor": 1.7}},
        {original: 16, "rope_scaling": {**_LONGROPE, original: 17}},
        {original: 16, "rope_scaling": {**_LONGROPE, "type": "yarn"}},
        {"rope_scaling": {**_LONGROPE, "long_factor": [1.5]}},
        {"rope_scaling": {"type": "longrope", "short_factor": _LONGROPE["short_factor"]}},
        {"rope_scaling": {**_LONGROPE, "short_factor": [0.0] * 4}},
    ):
        # The class of Phi 3 checks the number of factors without the size of a head.
        yield Case(family="Phi3", changes={"head_dim": ABSENT, "partial_rotary_factor": 1.0, **changes})
    longest = {**_LONGROPE, "short_factor": [1.1] * 8, "long_factor": [1.5, 3.0, 2.0, 2.5] * 2}
    yield Case(family="Llama", changes={"rope_scaling": {**longest, original: 16}})
    yield Case(family="Llama", changes={"rope_scaling": longest})
    yield Case(family="Llama", changes={original: 20, "rope_scaling": _LLAMA3})
    yield Case(family="Llama", changes={original: 20, "rope_scaling": {**_YARN, original: 16}})
    yield Case(family="GptOss", changes={"swiglu_limit": 0.0})
    yield Case(family="GptOss", changes={"swiglu_limit": 7.0})
    yield Case(family="GptOss", changes={"swiglu_alpha": 0.5})
    yield Case(family="GptOss", changes={"layer_types": None})
    yield Case(family="GptOss", changes={"attention_bias": False})
    yield Case(family="GptOss", changes={"rope_theta": ABSENT})
    yield Case(family="GptOss", changes={"num_local_experts": ABSENT, "num_experts": 4})
    yield Case(family="Llama4", changes={"num_experts_per_tok": 2})
    yield Case(family="Llama4", changes={"use_qk_norm": False})
    yield Case(family="Llama4", changes={"attn_temperature_tuning": False})
    yield Case(family="Llama4", changes={"attn_temperature_tuning": 4})
    yield Case(family="Llama4", changes={"floor_scale": 0})
    yield Case(family="Llama4", changes={"attn_scale": 0.0})
    yield Case(family="Llama4", changes={"attention_chunk_size": 64})
    yield Case(family="Llama4", changes={"no_rope_layers": [1, 1]})
    yield Case(family="Llama4", changes={"no_rope_layers": [0, 1]})
    yield Case(family="Llama4", changes={"no_rope_layers": []})
    yield Case(family="Llama4", changes={"layer_types": ["full_attention", "chunked_attention"]})
    yield Case(family="Llama4", changes={"moe_layers": [0]})
    yield Case(family="Llama4", changes={"moe_layers": []})
    yield Case(family="Llama4", changes={"interleave_moe_layer_step": 1})
    yield Case(family="DeepseekV2", changes={"topk_method": "greedy"})
    yield Case(family="DeepseekV2", changes={"topk_method": None})
    yield Case(family="DeepseekV2", changes={"topk_method": "noaux_tc"})
    yield Case(family="DeepseekV2", changes={"norm_topk_prob": True})
    yield Case(family="DeepseekV3", changes={"kv_lora_rank": 19})
    yield Case(family="DeepseekV3", changes={"qk_nope_head_dim": 15})
    yield Case(family="DeepseekV3", changes={"rope_interleave": False})
    yield Case(family="DeepseekV3", changes={"rope_interleave": None})
    yield Case(family="DeepseekV3", changes={"topk_method": "noaux_tc"})
    yield Case(family="Gemma2", changes={"attn_logit_softcapping": None, "final_logit_softcapping": None})
    yield Case(family="Gemma2", changes={"layer_types": ["sliding_attention", "sliding_attention"]})
    yield Case(family="Gemma3", changes={"attn_logit_softcapping": 2.0})
    yield Case(family="Gemma3", changes={"final_logit_softcapping": 2.0})
    yield Case(family="Gemma3", changes={"sliding_window": None})
    yield Case(family="Gemma3", changes={"sliding_window": 99})  # never reached, and its layers have their own base
    yield Case(family="Gemma3", changes={"sliding_window_pattern": 1})
    yield Case(family="Gemma3", changes={"rope_scaling": {"rope_type": "linear", "factor": 4.0}})
    for local in ({"rope_theta": 90.0}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 90.0}, None):
        of_layers = {"full_attention": {"rope_type": "default", "rope_theta": 700.0}, "sliding_attention": local}
        for family in ("Gemma3", "Olmo3"):
            yield Case(family=family, changes={"rope_parameters": of_layers, "rope_local_base_freq": ABSENT})


def write(case: Case, directory: Path) -> Path:
    """Saves random weights for the config beside it. Raises whatever transformers does of a config that it refuses."""
    directory.mkdir(parents=True)
    model_class = getattr(transformers, f"{case.family}ForCausalLM")
    model = model_class(model_class.config_class.from_dict({**case.config, **case.made_for}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Small embeddings, so that the epsilon of the first norm counts.
            is_gemma = case.family.startswith("Gemma")
            centre = 1.0 if name.endswith("norm.weight") and not is_gemma else 0.0
            spread = 0.005 if "embed_tokens" in name and not is_gemma else 0.1
            parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(case.config))
    return directory
