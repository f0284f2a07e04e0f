"""The keys of a Hugging Face config that shape a model, with their defaults, for each model family.

They are copied from the configuration classes of transformers 5.23, which `profiles/` does not import; a test keeps
both equal. Keys that a family does not list here do not affect its shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Family:
    """The configuration class of a model family."""

    model_type: str
    defaults: Mapping[str, Any]
    """Default of each key; None if the class derives the value from others."""
    nullable: frozenset[str] = frozenset()
    """Keys that may be null in addition to those whose default is None."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative names that transformers accepts for a key."""
    rope_theta: float = 10000.0
    """The rotary base if the config has none."""
    added: frozenset[str] = frozenset()
    """Keys with a default here that are not fields of the class but are read by its model."""

    def may_be_null(self, key: str) -> bool:
        return key in self.nullable or (self.defaults[key] is None and key not in self.added)


_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}
_QWEN2: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_QWEN2_MOE: dict[str, Any] = _QWEN2 | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
    "qkv_bias": True,
}
_QWEN3_MOE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}
_DEEPSEEK_V2: dict[str, Any] = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
    "norm_topk_prob": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_DEEPSEEK_V3: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
}
_GPT_OSS: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": None,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
}
_GEMMA: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
_MIXTRAL: dict[str, Any] = _MISTRAL | {
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}

_HEADS, _WINDOW = "num_key_value_heads", "sliding_window"

FAMILIES: Mapping[str, Family] = {
    "Llama": Family(model_type="llama", defaults=_LLAMA),
    "Mistral": Family(model_type="mistral", defaults=_MISTRAL, nullable=frozenset({_WINDOW})),
    "Qwen2": Family(
        model_type="qwen2", defaults=_QWEN2, nullable=frozenset({_HEADS, _WINDOW}), added=frozenset({"head_dim"})
    ),
    "Qwen3": Family(
        model_type="qwen3",
        defaults=_QWEN2 | {"head_dim": 128, "attention_bias": False},
        nullable=frozenset({_HEADS, _WINDOW}),
    ),
    "Gemma": Family(model_type="gemma", defaults=_GEMMA),
    "Mixtral": Family(
        model_type="mixtral", defaults=_MIXTRAL, aliases={"num_experts": "num_local_experts"}, rope_theta=1_000_000.0
    ),
    "Qwen2Moe": Family(
        model_type="qwen2_moe",
        defaults=_QWEN2_MOE,
        nullable=frozenset({_HEADS, _WINDOW}),
        added=frozenset({"head_dim"}),
    ),
    "Qwen3Moe": Family(
        model_type="qwen3_moe",
        defaults=_QWEN3_MOE,
        nullable=frozenset({_WINDOW}),
        aliases={"num_local_experts": "num_experts"},
        added=frozenset({"head_dim"}),
    ),
    "DeepseekV2": Family(
        model_type="deepseek_v2",
        defaults=_DEEPSEEK_V2,
        nullable=frozenset({"q_lora_rank", "norm_topk_prob"}),
        aliases={"num_experts": "n_routed_experts"},
    ),
    "DeepseekV3": Family(
        model_type="deepseek_v3",
        defaults=_DEEPSEEK_V3,
        nullable=frozenset(
            {"q_lora_rank", "norm_topk_prob", "first_k_dense_replace", "num_experts_per_tok", "v_head_dim"}
        ),
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "GptOss": Family(
        model_type="gpt_oss",
        defaults=_GPT_OSS,
        nullable=frozenset({_WINDOW}),
        aliases={"num_experts": "num_local_experts"},
        rope_theta=150_000.0,
    ),
}
"""Families by the prefix of their architecture names."""
