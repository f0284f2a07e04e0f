"""Model families: the keys of a Hugging Face config that shape a model, their defaults, and the parts that no key
changes.

The keys are those of the configuration classes of transformers 5.23, which `profiles/` does not import; a test keeps
both equal. Keys that a family does not list do not affect its shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from meshwright.profiles.model_parts import family_defaults as defaults

NormPlaces: TypeAlias = Literal["before", "after", "both"]
"""Where the norms of a layer stand: before attention and MLP, after each of them, or both."""

Mixer: TypeAlias = Literal["attention", "gated delta", "mamba"]
"""The part of a layer that mixes the tokens of a sequence."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a family that its class fixes; a value that a key of the config has is not listed here."""

    norms: NormPlaces = "before"
    norm_offset: float = 0.0
    """1.0 if the stored norm weight is relative to one."""
    scales_embedding: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""
    qk_norm: bool = False
    """Queries and keys are normalised in every head, by one norm for all heads."""
    whole_qk_norm: bool = False
    """Queries and keys are normalised over all heads together."""
    rotated_norm: bool = False
    """Queries and keys may be normalised after they are rotated, without a weight, where the config says so."""
    qkv_bias: bool = False
    """The projections of queries, keys and values always have a bias."""
    output_bias: bool = True
    """`attention_bias` adds a bias to the output projection too."""
    adjacent_pairs: bool = False
    """The rotary embedding rotates pairs of adjacent elements of a head, not of its two halves."""
    attention_gate: bool = False
    """A gate of its own projection multiplies the output of attention."""
    latent: bool = False
    """Multi-head latent attention."""
    sinks: bool = False
    """One learned logit per head in the softmax."""
    gated_mlp: bool = True
    mixers: tuple[Mixer, ...] = ("attention",)
    """All that mix tokens in some layers of the family."""
    other_layers: Literal["sliding_attention", "chunked_attention", "linear_attention"] = "sliding_attention"
    """The kind of the layers that do not attend to all tokens."""
    full_every: int | str = 0
    """Every layer of this number attends to all tokens; a key of the config that says it, or 0 for other rules."""
    has_experts: bool = False
    shared_gate: bool = False
    """A gate weights the shared experts."""
    normalizes_experts: bool = True
    """The weights of a token's experts sum to one, unless a key of the config says otherwise."""
    sigmoid_router: bool = False
    """The score of an expert is a sigmoid, and a bias of its own decides with it which are selected."""
    grouped_softmax: bool = False
    """Routers compute a softmax over all experts in fp32, and may select groups of experts first."""
    scales_inputs: bool = False
    """Routers multiply the inputs of experts, by a sigmoid, and not their outputs."""
    expert_bias: bool = False
    """The router and both matrices of each expert have biases."""
    expert_size: str = "moe_intermediate_size"
    """The key of the width of an expert."""
    rope_types: tuple[str, ...] = ()
    """The types of the rotary embedding that the family has, if it has fewer than others."""
    layer_rope: bool = False
    """Layers with a sliding window have a rotary embedding of their own."""
    local_rope_theta: float = 10000.0
    """The rotary base of these layers if the config has none."""
    planned: tuple[str, ...] = ()
    """Parts that shape no parameter or cost and cannot be run, as they are called in a message."""


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
    rope: Mapping[str, Any] = field(default_factory=dict)
    """The parameters of the rotary embedding, besides its base, if the config has none."""
    original_positions: int | None = None
    """The default of the original length of a scaled rotary embedding, if the family's class has this key."""
    added: frozenset[str] = frozenset()
    """Keys with a default here that are not fields of the class but are read by it or its model."""
    parts: Parts = Parts()
    activation_key: str = "hidden_act"
    epsilon_key: str = "rms_norm_eps"
    required: frozenset[str] = frozenset()
    """Keys without which, or with null for which, transformers builds no model."""
    other_types: frozenset[str] = frozenset()
    """Other values of model_type whose models have the same class."""
    score_class: str = ""
    """The class of text models with a scalar head, if it is not named as those of other families."""

    def may_be_null(self, key: str) -> bool:
        return key in self.nullable or (self.defaults[key] is None and key not in self.added)


_HEADS, _WINDOW = "num_key_value_heads", "sliding_window"
_HEAD_DIM = frozenset({"head_dim"})
_UNREAD = "a checkpoint of an architecture that is not loaded"
_PARTIAL = frozenset({"partial_rotary_factor"})
_DELTA_KEYS = frozenset({"partial_rotary_factor", "full_attention_interval"})

_GEMMA = Parts(norm_offset=1.0, scales_embedding=True)
_DEEPSEEK = Parts(latent=True, has_experts=True, sigmoid_router=True)
_DELTA = Parts(
    norm_offset=1.0,
    qk_norm=True,
    attention_gate=True,
    mixers=("attention", "gated delta"),
    other_layers="linear_attention",
    full_every="full_attention_interval",
)
_GATED_EXPERTS = Parts(has_experts=True, shared_gate=True)

FAMILIES: Mapping[str, Family] = {
    "Llama": Family(model_type="llama", defaults=defaults.LLAMA),
    "Mistral": Family(model_type="mistral", defaults=defaults.MISTRAL, nullable=frozenset({_WINDOW})),
    "Qwen2": Family(
        model_type="qwen2",
        defaults=defaults.QWEN2,
        nullable=frozenset({_HEADS, _WINDOW}),
        added=_HEAD_DIM,
        parts=Parts(qkv_bias=True),
    ),
    "Qwen3": Family(
        model_type="qwen3",
        defaults=defaults.QWEN2 | {"head_dim": 128, "attention_bias": False},
        nullable=frozenset({_HEADS, _WINDOW}),
        parts=Parts(qk_norm=True),
    ),
    "Gemma": Family(model_type="gemma", defaults=defaults.GEMMA, parts=_GEMMA),
    "Mixtral": Family(
        model_type="mixtral",
        defaults=defaults.MIXTRAL,
        aliases={"num_experts": "num_local_experts"},
        rope_theta=1_000_000.0,
        parts=Parts(has_experts=True, expert_size="intermediate_size"),
    ),
    "Qwen2Moe": Family(
        model_type="qwen2_moe",
        defaults=defaults.QWEN2_MOE,
        nullable=frozenset({_HEADS, _WINDOW}),
        added=_HEAD_DIM,
        required=frozenset({_HEADS}),
        parts=replace(_GATED_EXPERTS, full_every=2),
    ),
    "Qwen3Moe": Family(
        model_type="qwen3_moe",
        defaults=defaults.QWEN3_MOE,
        nullable=frozenset({_WINDOW}),
        aliases={"num_local_experts": "num_experts"},
        added=_HEAD_DIM,
        parts=Parts(qk_norm=True, has_experts=True),
    ),
    "DeepseekV2": Family(
        model_type="deepseek_v2",
        defaults=defaults.DEEPSEEK_V2,
        nullable=frozenset({"q_lora_rank", "norm_topk_prob", "topk_method"}),
        aliases={"num_experts": "n_routed_experts"},
        parts=Parts(latent=True, has_experts=True, grouped_softmax=True, normalizes_experts=False, adjacent_pairs=True),
    ),
    "DeepseekV3": Family(
        model_type="deepseek_v3",
        defaults=defaults.DEEPSEEK_V3,
        nullable=frozenset(
            {
                "q_lora_rank",
                "norm_topk_prob",
                "first_k_dense_replace",
                "num_experts_per_tok",
                "v_head_dim",
                "n_group",
                "topk_group",
                "rope_interleave",
                _HEADS,
            }
        ),
        aliases={"num_local_experts": "n_routed_experts"},
        parts=_DEEPSEEK,
        other_types=frozenset({"kimi_k2"}),
    ),
    "DeepseekV32": Family(
        model_type="deepseek_v32",
        defaults=defaults.DEEPSEEK_V32,
        aliases={"num_local_experts": "n_routed_experts"},
        parts=_DEEPSEEK,
    ),
    "GptOss": Family(
        model_type="gpt_oss",
        defaults=defaults.GPT_OSS,
        nullable=frozenset({_WINDOW}),
        aliases={"num_experts": "num_local_experts"},
        rope_theta=150_000.0,
        rope=defaults.GPT_OSS_ROPE,
        parts=Parts(sinks=True, expert_bias=True, has_experts=True, expert_size="intermediate_size", full_every=2),
    ),
    "Gemma2": Family(
        model_type="gemma2",
        defaults=defaults.GEMMA_2,
        nullable=frozenset({_WINDOW, "final_logit_softcapping", "attn_logit_softcapping"}),
        parts=replace(_GEMMA, norms="both", full_every=2),
        activation_key="hidden_activation",
    ),
    "Gemma3": Family(
        model_type="gemma3_text",
        defaults=defaults.GEMMA_3,
        nullable=frozenset({_WINDOW}),
        rope_theta=1_000_000.0,
        added=frozenset({"sliding_window_pattern", "rope_local_base_freq"}),
        parts=replace(_GEMMA, norms="both", qk_norm=True, full_every="sliding_window_pattern", layer_rope=True),
        activation_key="hidden_activation",
        score_class="Gemma3TextForSequenceClassification",
    ),
    "Olmo2": Family(
        model_type="olmo2",
        defaults=defaults.OLMO_2,
        added=_HEAD_DIM,
        parts=Parts(norms="after", whole_qk_norm=True),
    ),
    "Olmo3": Family(
        model_type="olmo3",
        defaults=defaults.OLMO_3,
        nullable=frozenset({_WINDOW}),
        rope_theta=500_000.0,
        added=_HEAD_DIM,
        parts=Parts(norms="after", whole_qk_norm=True, full_every=4, layer_rope=True, local_rope_theta=500_000.0),
    ),
    "Phi3": Family(
        model_type="phi3",
        defaults=defaults.PHI_3,
        original_positions=4096,
        added=_HEAD_DIM | _PARTIAL,
        parts=Parts(rope_types=("default", "longrope", "yarn")),
    ),
    "Glm4": Family(
        model_type="glm4",
        defaults=defaults.GLM_4,
        added=_PARTIAL,
        parts=Parts(norms="both", output_bias=False, adjacent_pairs=True),
    ),
    "Glm4Moe": Family(
        model_type="glm4_moe",
        defaults=defaults.GLM_4_MOE,
        aliases={"num_local_experts": "n_routed_experts"},
        added=_HEAD_DIM | _PARTIAL,
        parts=Parts(output_bias=False, has_experts=True, sigmoid_router=True),
    ),
    "Qwen3Next": Family(
        model_type="qwen3_next",
        defaults=defaults.QWEN3_NEXT,
        added=_DELTA_KEYS,
        parts=replace(_DELTA, has_experts=True, shared_gate=True),
    ),
    "Qwen3_5": Family(
        model_type="qwen3_5_text",
        defaults=defaults.QWEN3_5,
        added=_DELTA_KEYS,
        parts=_DELTA,
        score_class="Qwen3_5TextForSequenceClassification",
    ),
    "Qwen3_5Moe": Family(
        model_type="qwen3_5_moe_text",
        defaults=defaults.QWEN3_5_MOE,
        added=_DELTA_KEYS,
        parts=replace(_DELTA, has_experts=True, shared_gate=True),
    ),
    "MiniMaxM2": Family(
        model_type="minimax_m2",
        defaults=defaults.MINIMAX_M2,
        aliases={"num_experts": "num_local_experts"},
        rope_theta=5_000_000.0,
        added=_PARTIAL | {"rotary_dim"},
        parts=Parts(whole_qk_norm=True, has_experts=True, expert_size="intermediate_size", sigmoid_router=True),
    ),
    "Granite": Family(model_type="granite", defaults=defaults.GRANITE, added=_HEAD_DIM),
    "SmolLM3": Family(
        model_type="smollm3",
        defaults=defaults.SMOLLM_3,
        nullable=frozenset({_HEADS}),
        rope_theta=2_000_000.0,
        added=_HEAD_DIM,
    ),
    "Ministral": Family(
        model_type="ministral",
        defaults=defaults.MINISTRAL,
        nullable=frozenset({_WINDOW}),
        required=_HEAD_DIM,
    ),
    "Ministral3": Family(model_type="ministral3", defaults=defaults.MINISTRAL_3, parts=Parts(planned=(_UNREAD,))),
    "Llama4": Family(
        model_type="llama4_text",
        defaults=defaults.LLAMA_4,
        nullable=frozenset({"attention_chunk_size"}),
        rope_theta=500_000.0,
        parts=Parts(
            has_experts=True,
            expert_size="intermediate_size",
            normalizes_experts=False,
            scales_inputs=True,
            adjacent_pairs=True,
            rotated_norm=True,
            other_layers="chunked_attention",
        ),
    ),
    "NemotronH": Family(
        model_type="nemotron_h",
        defaults=defaults.NEMOTRON_H,
        aliases={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
        added=frozenset({"hybrid_override_pattern", "num_hidden_layers"}),
        parts=Parts(
            gated_mlp=False,
            mixers=("attention", "mamba"),
            has_experts=True,
            planned=("layers of one block each", "attention without positions"),
        ),
        activation_key="mlp_hidden_act",
        epsilon_key="layer_norm_epsilon",
    ),
}
"""Families by the prefix of their architecture names."""
