"""The shape of a decoder model, read from its Hugging Face config, and the reasons why a model can be planned but not
run.

This file reads no weights and knows nothing of parallelism except the sizes of a tensor-parallel shard. An architecture
that it does not know is refused with one sentence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.experts import (
    RUN_EXPERT_FAMILIES,
    Balance,
    Experts,
    LatentAttention,
    experts_from_config,
    latent_from_config,
)
from meshwright.profiles.model_parts.adapter import ATTENTION_LINEARS, COLUMN_PARALLEL, MLP_LINEARS, Adapter, Linear
from meshwright.profiles.model_parts.family_keys import FAMILIES, Family, NormPlaces
from meshwright.profiles.model_parts.hf_config import (
    LongScaling,
    QueryGrowth,
    Rope,
    RotaryScaling,
    SlidingWindow,
    activation_of,
    complete_config,
    flag,
    number,
    query_growth_from_config,
    required_size,
    rope_from_config,
    size_or,
    unrotated_layers_from_config,
    window_from_config,
)
from meshwright.profiles.model_parts.image_encoder import ImageEncoder, encoder_from_config, text_config_of
from meshwright.profiles.model_parts.layer_kinds import LayerKind, layer_kinds_from_config
from meshwright.profiles.model_parts.linear_attention import (
    LinearAttention,
    delta_from_config,
    mamba_from_config,
)
from meshwright.profiles.untrusted_text import json_value, read_text

MAX_CONFIG_BYTES = 2**20
"""Maximum size of a config.json; typical ones have a few thousand bytes."""

VOCAB_MULTIPLE = 64
"""Embedding rows are padded to this multiple so that every tp up to it divides them."""


class CachedHeads(NamedTuple):
    """The keys and values that a KV cache holds for a token of one layer: the number of key heads, the queries that
    share one of them, and the elements of a key and of a value."""

    num_keys: int
    queries_per_key: int
    size: int


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The sizes of a decoder-only transformer. `name` appears in messages only; no cost depends on it.

    A model with `experts` has the plain MLP of `ffn_size` in its first `experts.num_dense_layers` layers only, unless
    `layer_kinds` lists what each layer has. A layer with a state is one of linear attention or Mamba (`linear`), which
    keeps one state per sequence instead of a KV cache.
    """

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    activation: str  # "silu" | "gelu_tanh" | "relu2"
    norm_epsilon: float
    norms: NormPlaces = "before"  # norms are before attention and MLP, after (OLMo 2), or both (Gemma 2, GLM 4)
    norm_offset: float = 0.0  # 1.0 when the stored norm weight is relative to one (Gemma)
    embedding_scale: float = 1.0  # Gemma multiplies embeddings by sqrt(hidden_size)
    residual_scale: float = 1.0  # multiplies the outputs of attention and MLP (Granite)
    logits_scale: float = 1.0  # multiplies the logits (Granite)
    attention_scale: float | None = None  # multiplies the scores; None: 1 / sqrt(head_dim)
    attention_cap: float = 0.0  # scores are cap * tanh(score / cap) (Gemma 2); 0: they are not capped
    logits_cap: float = 0.0  # as `attention_cap`, for the logits
    rope_theta: float = 10000.0
    local_rope_theta: float = 0.0  # unscaled rotary base of layers with a sliding window; 0: as in the others
    rotary_share: float = 1.0  # the first part of a head, or of the rotary part of a latent head, that is rotated
    adjacent_pairs: bool = False  # a head is rotated in pairs of adjacent elements (GLM 4), not of its two halves
    unrotated_layers: tuple[int, ...] = ()  # layers whose attention has no rotary embedding (SmolLM3)
    rope_scaling: RotaryScaling | None = None
    planned_rope: str = ""  # a rope type that can be planned (no cost depends on it) but not run, e.g. "dynamic"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True  # gate, up and down projections; False: up and down only (GPT)
    qk_norm: bool = False
    whole_qk_norm: bool = False  # queries and keys are normalised over all heads together (OLMo 2)
    rotated_norm: bool = False  # queries and keys of rotated layers are normalised, without a weight (Llama 4)
    query_growth: QueryGrowth | None = None  # of layers without rotary embedding (Llama 4)
    attention_gate: bool = False  # a gate of its own projection multiplies the output of attention (Qwen3-Next)
    scalar_head: bool = False  # one number per token instead of logits over the vocabulary (reward, critic)
    vocab_multiple: int = VOCAB_MULTIPLE  # 1 for a shard, because rows are padded before sharding
    experts: Experts | None = None
    latent: LatentAttention | None = None
    adapter: Adapter | None = None  # trained in place of the weights
    window: SlidingWindow | None = None  # sliding-window attention in some or all layers
    attention_sinks: bool = False  # one learned logit per head in the softmax (gpt-oss)
    expert_bias: bool = False  # biases of the router and of both matrices of each expert (gpt-oss)
    linear: LinearAttention | None = None  # in the layers whose kind says so, in place of attention
    layer_kinds: tuple[LayerKind, ...] = ()  # one for each layer; empty: attention, and experts after dense layers
    image_encoder: ImageEncoder | None = None  # frozen, and not among `num_params`
    planned_parts: tuple[str, ...] = ()  # parts on which no size or cost depends, and which cannot be run

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of a few sizes only: searches look models up in dictionaries millions of times."""
        return hash((self.num_layers, self.hidden_size, self.num_heads, self.ffn_size, self.vocab_size))

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
            if getattr(self, field) < 1:
                raise BadInput(f"model {self.name}: {field}={getattr(self, field)} must be 1 or more.")
        if self.num_heads % self.num_kv_heads:
            raise BadInput(
                f"model {self.name}: num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}."
            )
        if self.experts and self.experts.experts_per_token > self.experts.num_experts:
            raise BadInput(
                f"model {self.name}: experts_per_token={self.experts.experts_per_token} is more than "
                f"num_experts={self.experts.num_experts}."
            )
        long_rope = self.rope_scaling if isinstance(self.rope_scaling, LongScaling) else None
        if long_rope and {len(long_rope.short_factors), len(long_rope.long_factors)} != {self.num_rotated // 2}:
            raise BadInput(
                f"model {self.name}: rope type longrope has {len(long_rope.short_factors)} short and "
                f"{len(long_rope.long_factors)} long factors; it needs one for each of the {self.num_rotated // 2} "
                "rotated pairs of a head."
            )
        if self.layer_kinds and len(self.layer_kinds) != self.num_layers:
            raise BadInput(
                f"model {self.name}: {len(self.layer_kinds)} layer_kinds are not one for each of {self.num_layers} "
                "layers."
            )
        if self.adapter and self.linear:
            raise BadInput(
                f"model {self.name} has layers with a state, whose projections are not adapted; train it without "
                "adapter."
            )
        if self.adapts_experts and self.expert_bias:
            raise BadInput(
                f"model {self.name} has experts with biases, which are not adapted; set the adapter's targets to "
                f"{' and '.join(ATTENTION_LINEARS)}."
            )
        if self.adapter and self.latent:
            raise BadInput(
                f"model {self.name} has latent attention, whose projections are not adapted; train it without adapter."
            )

    def with_balance(self, balance: Balance | None) -> ModelSpec:
        """The model with this way of balancing the load of its experts; None changes nothing.

        Raises BadInput for a model without experts.
        """
        if balance is None:
            return self
        if self.experts is None:
            raise BadInput(f"model {self.name} has no experts, and balance={balance} is about them; remove it.")
        return replace(self, experts=replace(self.experts, balance=balance))

    def for_sequences(self, longest: int) -> ModelSpec:
        """The model in a job whose sequences have at most `longest` tokens; it differs only in the choice of the rotary
        factors of LongRoPE."""
        if not isinstance(self.rope_scaling, LongScaling):
            return self
        is_long = longest > self.rope_scaling.original_max_positions
        return replace(self, rope_scaling=replace(self.rope_scaling, is_long=is_long))

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def attention_size(self) -> int:
        """Width of the concatenated query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the concatenated key heads (and of the value heads)."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_rotated(self) -> int:
        """Elements of a head that are rotated: its last ones in latent attention, else its first ones."""
        return int((self.latent.rope_dim if self.latent else self.head_dim) * self.rotary_share)

    @property
    def value_dim(self) -> int:
        """Size of a value head."""
        return self.latent.value_dim if self.latent else self.head_dim

    def cached_heads(self, tp: int = 1) -> CachedHeads:
        """The heads of this project's KV cache on one of `tp` tensor-parallel ranks.

        Of latent attention every rank caches the latent vector and the rotary key, as the only key and once more as its
        value; the queries are brought to its size (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
        """
        if self.latent:
            return CachedHeads(1, self.num_heads // tp, self.latent.vector_size)
        return CachedHeads(self.num_kv_heads // tp, self.num_heads // self.num_kv_heads, self.head_dim)

    @property
    def up_size(self) -> int:
        """Output width of the first linear of the MLP: gate and up projections together, or up alone."""
        return (1 + self.gated_mlp) * self.ffn_size

    @property
    def num_dense_layers(self) -> int:
        """Number of layers with a plain MLP."""
        return self.dense_layers_between(0, self.num_layers)

    def dense_layers_between(self, first: int, last: int) -> int:
        """Number of layers with a plain MLP among `first` to `last` - 1."""
        if self.layer_kinds:
            return sum(kind.mlp == "dense" for kind in self.layer_kinds[first:last])
        return max(0, min(last, self.experts.num_dense_layers) - first) if self.experts else last - first

    def expert_layers_between(self, first: int, last: int) -> int:
        """Number of layers with experts among `first` to `last` - 1."""
        if self.layer_kinds:
            return sum(kind.mlp == "experts" for kind in self.layer_kinds[first:last])
        return last - first - self.dense_layers_between(first, last)

    def linear_layers_between(self, first: int, last: int) -> int:
        """Number of layers with a state among `first` to `last` - 1."""
        return sum(kind.mixer == "linear" for kind in self.layer_kinds[first:last])

    def attention_layers_between(self, first: int, last: int) -> int:
        """Number of layers with attention, with or without a sliding window, among `first` to `last` - 1."""
        if self.layer_kinds:
            return sum(kind.mixer == "attention" for kind in self.layer_kinds[first:last])
        return last - first

    @property
    def num_window_layers(self) -> int:
        """Number of layers with sliding-window attention."""
        return self.window.num_layers(0, self.num_layers) if self.window else 0

    @property
    def num_full_layers(self) -> int:
        """Number of layers with attention to all tokens."""
        return self.attention_layers_between(0, self.num_layers) - self.num_window_layers

    @property
    def dense_layers_share(self) -> float:
        """Fraction of the layers that have a plain MLP, 0 to 1."""
        return self.num_dense_layers / self.num_layers

    @property
    def expert_layers_share(self) -> float:
        """Fraction of the layers that have experts, 0 to 1."""
        return self.expert_layers_between(0, self.num_layers) / self.num_layers

    @property
    def linear_layers_share(self) -> float:
        """Fraction of the layers that have a state, 0 to 1."""
        return self.linear_layers_between(0, self.num_layers) / self.num_layers

    @property
    def attention_layers_share(self) -> float:
        """Fraction of the layers that have attention, 0 to 1."""
        return self.attention_layers_between(0, self.num_layers) / self.num_layers

    @property
    def blocks_per_layer(self) -> float:
        """Mean number of blocks (attention or state, MLP or experts) of a layer; 2 except in Nemotron-H."""
        return sum(kind.num_blocks for kind in self.layer_kinds) / self.num_layers if self.layer_kinds else 2.0

    def active_ffn_size(self, imbalance: float = 1.0) -> float:
        """MLP width that one token passes through in the widest layer.

        `imbalance` is the load of the rank's experts over the mean load of all ranks.
        """
        dense = self.ffn_size if self.num_dense_layers else 0
        return max(dense, self.experts.active_ffn_size(imbalance)) if self.experts else dense

    @property
    def attention_linears(self) -> tuple[tuple[int, int], ...]:
        """(input size, output size) of each linear of the attention block."""
        if self.latent:
            return self.latent.linears(self.hidden_size, self.num_heads)
        projected = (1 + self.attention_gate) * self.attention_size + 2 * self.kv_size
        return (self.hidden_size, projected), (self.attention_size, self.hidden_size)

    @property
    def adapted_linears(self) -> tuple[tuple[int, int], ...]:
        """(input size, output size) of each linear that has an adapter, in the order of a layer with a plain MLP."""
        return self.adapted_attention + self.adapted_mlp(self.ffn_size)

    @property
    def adapted_attention(self) -> tuple[tuple[int, int], ...]:
        """(input size, output size) of each linear of the attention that has an adapter."""
        sizes: dict[Linear, tuple[int, int]] = {
            "linear_qkv": (self.hidden_size, self.attention_size + 2 * self.kv_size),
            "linear_proj": (self.attention_size, self.hidden_size),
        }
        return tuple(size for name, size in sizes.items() if self.adapter and name in self.adapter.targets)

    def adapted_mlp(self, width: int) -> tuple[tuple[int, int], ...]:
        """(input size, output size) of each linear with an adapter in an MLP or an expert of this width; none in one of
        width 0."""
        sizes: dict[Linear, tuple[int, int]] = {
            "linear_fc1": (self.hidden_size, (1 + self.gated_mlp) * width),
            "linear_fc2": (width, self.hidden_size),
        }
        return tuple(size for name, size in sizes.items() if width and self.adapter and name in self.adapter.targets)

    @property
    def adapts_experts(self) -> bool:
        """True if the adapter is on linears of experts."""
        targets = self.adapter.targets if self.adapter else ()
        return self.experts is not None and not {*targets}.isdisjoint(MLP_LINEARS)

    @property
    def adapter_exchanges(self) -> tuple[float, float]:
        """Linears of a layer, on average, whose low-rank activations tensor parallelism exchanges: column-parallel and
        row-parallel ones. Those of routed experts are not among them."""
        if not self.adapter:
            return 0.0, 0.0
        shared = self.expert_layers_share if self.experts and self.experts.shared_ffn_size else 0.0
        share = self.dense_layers_share + shared
        counted = {name: share if name in MLP_LINEARS else 1.0 for name in self.adapter.targets}
        columns = sum(counted[name] for name in counted if name in COLUMN_PARALLEL)
        return columns, sum(counted.values()) - columns

    @property
    def adapter_layer_params(self) -> float:
        """Adapter parameters in one decoder layer, the mean over layers if they differ; 0 without an adapter."""
        if not self.experts and not self.layer_kinds:
            return self.adapter_params_between(0, 1)
        return self.adapter_params_between(0, self.num_layers) / self.num_layers

    def adapter_params_between(self, first: int, last: int) -> int:
        """Adapter parameters in layers `first` to `last` - 1, those of routed experts included."""
        shared = self.experts.shared_ffn_size if self.experts else 0
        blocks = (
            (self.adapted_attention, self.attention_layers_between(first, last)),
            (self.adapted_mlp(self.ffn_size), self.dense_layers_between(first, last)),
            (self.adapted_mlp(shared), self.expert_layers_between(first, last)),
        )
        rank = self.adapter.rank if self.adapter else 0
        plain = sum(number * rank * (inner + outer) for linears, number in blocks for inner, outer in linears)
        return plain + round(self.adapter_expert_params_between(first, last))

    def adapter_expert_params_between(self, first: int, last: int, folded: int = 1) -> float:
        """Adapter parameters of the routed experts in layers `first` to `last` - 1.

        Of a shard of tp = `folded` ranks that hold experts whole, it is the share of one rank: each of its experts has
        all of A and B, and it has fewer experts.
        """
        if not self.experts or not self.adapter:
            return 0
        linears = self.adapted_mlp(self.experts.ffn_size)
        replicated = self.hidden_size * len(linears)  # the matrix at the hidden state, which tp does not shard
        sharded = sum(inner + outer for inner, outer in linears) - replicated
        of_expert = self.adapter.rank * (sharded + replicated / folded)
        return self.expert_layers_between(first, last) * self.experts.num_experts * of_expert

    @property
    def attention_elements(self) -> int:
        """Elements per token of queries, keys, values and attention output in one layer."""
        if self.latent:
            return 2 * self.num_heads * (self.head_dim + self.latent.value_dim)
        return (2 + self.attention_gate) * self.attention_size + 2 * self.kv_size

    @property
    def mixed_elements(self) -> float:
        """Mean over layers of the elements per token: `attention_elements`, or those of a layer with a state."""
        linear = self.linear.elements * self.linear_layers_share if self.linear else 0.0
        return self.attention_elements * self.attention_layers_share + linear

    @property
    def cached_elements(self) -> int:
        """Elements per token in the KV cache of one layer."""
        return self.latent.cached_size if self.latent else 2 * self.kv_size

    @property
    def layer_params(self) -> float:
        """Parameters of one decoder layer: attention, MLP, norms, biases; the mean over layers if they differ."""
        if not self.experts and not self.layer_kinds:
            return self.params_between(0, 1)
        return self.params_between(0, self.num_layers) / self.num_layers

    @cached_property
    def active_layer_params(self) -> tuple[int, ...]:
        """Active matrix parameters per token of each decoder layer: only the experts that a token is routed to.

        The products of a layer with a state count as parameters, since their number does not depend on other tokens.
        """
        attention = sum(inner * outer for inner, outer in self.attention_linears)
        linear = self.linear.work + self._linear_matrices if self.linear else 0
        dense = self.hidden_size * (self.up_size + self.ffn_size)
        routed = self.experts.active_params(self.hidden_size) if self.experts else 0
        if not self.layer_kinds:
            num_experts = self.num_layers - self.num_dense_layers
            return (attention + dense,) * self.num_dense_layers + (attention + routed,) * num_experts
        mixers = {"attention": attention, "linear": linear, "none": 0}
        mlps = {"dense": dense, "experts": routed, "none": 0}
        return tuple(mixers[kind.mixer] + mlps[kind.mlp] for kind in self.layer_kinds)

    @property
    def _linear_matrices(self) -> int:
        """Parameters of the projections of a layer with a state."""
        linears = self.linear.linears(self.hidden_size) if self.linear else ()
        return sum(inner * outer for inner, outer in linears)

    @property
    def active_head_params(self) -> int:
        """Parameters of the output head, including those shared with the embedding."""
        return self.hidden_size if self.scalar_head else self.embedding_params

    def params_between(self, first: int, last: int) -> int:
        """Parameters of layers `first` to `last` - 1."""
        num_attention, num_linear = self.attention_layers_between(first, last), self.linear_layers_between(first, last)
        num_dense, num_experts = self.dense_layers_between(first, last), self.expert_layers_between(first, last)
        linear = self._linear_matrices + self.linear.small_params if self.linear else 0
        dense = self.hidden_size * (self.up_size + self.ffn_size) + (self.up_size + self.hidden_size) * self.mlp_bias
        routed = self.experts.params(self.hidden_size, has_bias=self.expert_bias) if self.experts else 0
        num_blocks = num_attention + num_linear + num_dense + num_experts
        norms = num_blocks * self.hidden_size * (2 if self.norms == "both" else 1)
        mixers = num_attention * self._attention_params + num_linear * linear
        return norms + mixers + num_dense * dense + num_experts * routed

    def expert_params_between(self, first: int, last: int) -> int:
        """Parameters of the routed experts in layers `first` to `last` - 1."""
        if not self.experts:
            return 0
        routed = self.experts.routed_params(self.hidden_size, has_bias=self.expert_bias)
        return self.expert_layers_between(first, last) * routed

    @property
    def _attention_params(self) -> int:
        """Parameters of the attention of one layer, with the norms inside it and without those around it."""
        matrices = sum(inner * outer for inner, outer in self.attention_linears)
        norms = 2 * self.head_dim if self.qk_norm else 0
        norms += self.attention_size + self.kv_size if self.whole_qk_norm else 0
        norms += self.latent.norm_params if self.latent else 0
        queries = (1 + self.attention_gate) * self.attention_size
        biases = (queries + 2 * self.kv_size) * self.qkv_bias + self.hidden_size * self.output_bias
        return matrices + norms + biases + self.num_heads * self.attention_sinks

    @property
    def embedding_params(self) -> int:
        return self.padded_vocab_size * self.hidden_size

    @property
    def head_params(self) -> int:
        """Parameters of the output head, without those shared with the embedding."""
        if self.scalar_head:
            return self.hidden_size
        return 0 if self.tied_embeddings else self.embedding_params

    @property
    def num_params(self) -> int:
        """Number of all parameters, without those of an adapter."""
        layers = self.params_between(0, self.num_layers)
        return layers + self.embedding_params + self.head_params + self.hidden_size

    @property
    def trainable_params(self) -> int:
        """Number of trained parameters: if the model has an adapter, those of the adapter and of a scalar head, else
        all."""
        if self.adapter is None:
            return self.num_params
        return self.adapter_params_between(0, self.num_layers) + self.trained_head_params

    @property
    def trained_head_params(self) -> int:
        """Parameters of the head that are trained beside an adapter: those of a scalar head, which the language model
        that a critic starts from lacks."""
        return self.hidden_size if self.scalar_head else 0

    def shard(self, tp: int) -> ModelSpec:
        """The shard of the model on one of `tp` tensor-parallel ranks: heads, KV heads, MLP and vocabulary are divided.

        Norms, routers, the down-projections of latent attention and the scalar head are replicated, so `num_params` of
        the shard counts all that one rank holds. Raises BadInput if tp does not divide a size.
        """
        return _shard(self, tp)


@lru_cache(maxsize=1024)  # many layouts of a search have the same shard
def _shard(model: ModelSpec, tp: int) -> ModelSpec:
    sizes = {name: getattr(model, name) for name in ("num_heads", "num_kv_heads", "ffn_size", "padded_vocab_size")}
    if model.experts:
        sizes |= {"expert_ffn_size": model.experts.ffn_size, "shared_ffn_size": model.experts.shared_ffn_size}
    if model.linear:
        sizes |= {"num_key_heads": model.linear.num_key_heads, "num_value_heads": model.linear.num_value_heads}
    for field, size in sizes.items():
        if size % tp:
            raise BadInput(f"tp={tp} does not divide {field}={size} of model {model.name}.")
    return replace(
        model,
        num_heads=model.num_heads // tp,
        num_kv_heads=model.num_kv_heads // tp,
        ffn_size=model.ffn_size // tp,
        vocab_size=model.padded_vocab_size // tp,
        vocab_multiple=1,
        experts=model.experts.shard(tp) if model.experts else None,
        linear=model.linear.shard(tp) if model.linear else None,
    )


_HEADS = {"ForCausalLM": False, "ForSequenceClassification": True}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
_OF_SCORE_CLASSES = {
    known.score_class: f"{family}ForSequenceClassification" for family, known in FAMILIES.items() if known.score_class
}
ARCHITECTURES = tuple(family + head for family in FAMILIES for head in _HEADS)


def score_class(architecture: str) -> str:
    """Return the class of transformers for models of this architecture with a scalar head."""
    family = next(architecture.removesuffix(head) for head in _HEADS if architecture.endswith(head))
    return FAMILIES[family].score_class or f"{family}ForSequenceClassification"


def read_model(path: Path, *, scalar_head: bool | None = None) -> ModelSpec:
    """Read the model shape from a Hugging Face directory or a `config.json` file.

    `scalar_head` overrides the architecture's head (e.g. for a critic initialised from a language model).
    Raises BadInput if the file is missing, is not JSON, or describes an unknown architecture.
    """
    config_path = path / "config.json" if path.is_dir() else path
    if not config_path.exists():
        raise BadInput(
            f"model {path}: there is no {config_path}; give a Hugging Face directory or a config.json that is on this "
            "machine (`hf download NAME --local-dir DIR` fetches one)."
        )
    config = json_value(read_text(config_path, "model config", MAX_CONFIG_BYTES), f"model config {config_path}")
    if not isinstance(config, dict):
        raise BadInput(f"model config {config_path} holds {type(config).__name__}; a JSON object is needed.")
    name = (path if path.is_dir() else path.parent).absolute().name or path.stem
    return model_from_config(config, name=name, scalar_head=scalar_head)


def model_from_config(config: Mapping[str, Any], *, name: str, scalar_head: bool | None = None) -> ModelSpec:
    """Return the model shape that the keys of a Hugging Face config describe; see `read_model`.

    A model of images and text is its text model with an image encoder. Raises BadInput for a missing key or a value
    that is not supported.
    """
    text_config = text_config_of(config, name)
    if text_config is not None:
        text = model_from_config(text_config, name=name, scalar_head=scalar_head)
        return replace(text, image_encoder=encoder_from_config(config, text.hidden_size, name))
    architecture, family, has_scalar_head = _architecture(config, name)
    known = FAMILIES[family]
    original_config, config, parts = config, complete_config(config, family, name), known.parts
    experts = experts_from_config(_with_layers(config), family, name) if parts.has_experts else None
    layer_kinds = layer_kinds_from_config(config, family, experts, name)
    if layer_kinds:
        config = config | {"num_hidden_layers": len(layer_kinds)}
        if all(kind.mlp != "experts" for kind in layer_kinds):
            experts = None
    _require_supported(config, known, experts, name)

    def need(key: str) -> int:
        return required_size(config, key, name)

    def multiplier(key: str, default: float) -> float:
        return number(config, key, name) if config.get(key) is not None else default

    activation = activation_of(original_config, family)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise BadInput(f"model {name}: activation {activation!r} is not known; known: {', '.join(_ACTIVATIONS)}.")
    heads = need("num_attention_heads")
    hidden = need("hidden_size")
    if config.get("head_dim") is None and hidden % heads and not parts.latent:
        raise BadInput(f"model {name}: {heads} attention heads do not divide hidden_size={hidden}; give head_dim.")
    attention_bias = flag(config, "attention_bias", name)
    rope = rope_from_config(original_config, need("max_position_embeddings"), family, name)
    is_costed_only = parts.has_experts and family not in RUN_EXPERT_FAMILIES
    latent = latent_from_config(config, name) if parts.latent else None
    if latent and size_or(config, "num_key_value_heads", heads, name) != heads:
        raise BadInput(
            f"model {name}: config key 'num_key_value_heads' is {config['num_key_value_heads']}, and latent attention "
            f"has a key for each of its {heads} heads; set it to {heads}."
        )
    head_dim = latent.nope_dim + latent.rope_dim if latent else size_or(config, "head_dim", hidden // heads, name)
    scale = parts.scales_embedding and float(hidden) ** 0.5
    return ModelSpec(
        name=name,
        architecture=architecture,
        num_layers=need("num_hidden_layers"),
        hidden_size=hidden,
        ffn_size=_ffn_size(config, experts, layer_kinds, name),
        num_heads=heads,
        num_kv_heads=heads if latent else size_or(config, "num_key_value_heads", heads, name),
        head_dim=head_dim,
        vocab_size=need("vocab_size"),
        max_positions=need("max_position_embeddings"),
        tied_embeddings=flag(config, "tie_word_embeddings", name),
        activation=_ACTIVATIONS[activation],
        norm_epsilon=number(config, known.epsilon_key, name),
        norms=parts.norms,
        norm_offset=parts.norm_offset,
        embedding_scale=scale or multiplier("embedding_multiplier", 1.0),
        residual_scale=multiplier("residual_multiplier", 1.0),
        logits_scale=1 / (multiplier("logits_scaling", 1.0) or 1.0),
        attention_scale=_latent_scale(rope, head_dim) if latent else _attention_scale(config, name),
        attention_cap=multiplier("attn_logit_softcapping", 0.0),
        logits_cap=multiplier("final_logit_softcapping", 0.0),
        rope_theta=rope.theta,
        local_rope_theta=rope.local_theta,
        rotary_share=rope.share,
        rope_scaling=None if is_costed_only else rope.scaling,
        planned_rope="" if is_costed_only else rope.planned_type,
        qkv_bias=parts.qkv_bias or flag(config, "qkv_bias", name) or attention_bias,
        output_bias=attention_bias and parts.output_bias,
        mlp_bias=flag(config, "mlp_bias", name),
        gated_mlp=parts.gated_mlp,
        qk_norm=parts.qk_norm or (flag(config, "use_qk_norm", name) and not parts.rotated_norm),
        rotated_norm=parts.rotated_norm and flag(config, "use_qk_norm", name),
        query_growth=query_growth_from_config(config, name),
        whole_qk_norm=parts.whole_qk_norm,
        attention_gate=parts.attention_gate,
        adjacent_pairs=parts.adjacent_pairs or bool(config.get("rope_interleave")),
        unrotated_layers=unrotated_layers_from_config(config, name),
        scalar_head=has_scalar_head if scalar_head is None else scalar_head,
        experts=experts,
        latent=latent,
        window=window_from_config(config, family, name),
        attention_sinks=parts.sinks,
        expert_bias=parts.expert_bias,
        linear=_linear_from_config(config, known, name),
        layer_kinds=layer_kinds,
        planned_parts=parts.planned,
    )


def _with_layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with its number of layers, which is the length of the list of blocks if the config has only that."""
    listed = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if config.get("num_hidden_layers") is None and isinstance(listed, list | str):
        return {**config, "num_hidden_layers": len(listed)}
    return config


def _require_supported(config: Mapping[str, Any], known: Family, experts: Experts | None, name: str) -> None:
    """Raises BadInput for a key that changes the models of the family in a way that `ModelSpec` cannot express."""
    keys = ["use_bias", "moe_latent_size", *(["mlp_bias"] if experts or known.parts.latent else [])]
    for key in keys:
        if config.get(key) and key in known.defaults:
            raise BadInput(
                f"model {name}: config key {key!r} is {config[key]!r}, which is not supported in {known.model_type} "
                "models; plan a model without it."
            )


def _ffn_size(config: Mapping[str, Any], experts: Experts | None, layer_kinds: tuple[LayerKind, ...], name: str) -> int:
    """Width of the plain MLP, or that of an expert in a model without one."""
    has_dense = (experts and experts.num_dense_layers) or any(kind.mlp == "dense" for kind in layer_kinds)
    if experts and not has_dense:
        return experts.ffn_size
    return required_size(
        config, "intermediate_size_mlp" if "intermediate_size_mlp" in config else "intermediate_size", name
    )


def _attention_scale(config: Mapping[str, Any], name: str) -> float | None:
    """Factor of the scores, from either key that gives one."""
    if config.get("query_pre_attn_scalar") is not None:
        return 1 / math.sqrt(required_size(config, "query_pre_attn_scalar", name))
    return number(config, "attention_multiplier", name) if "attention_multiplier" in config else None


def _latent_scale(rope: Rope, head_dim: int) -> float | None:
    """Factor of the scores in latent attention if its rotary scaling changes it."""
    return None if rope.latent_score_factor == 1.0 else rope.latent_score_factor / math.sqrt(head_dim)


def _linear_from_config(config: Mapping[str, Any], known: Family, name: str) -> LinearAttention | None:
    if "gated delta" in known.parts.mixers:
        return delta_from_config(config, name)
    return mamba_from_config(config, name) if "mamba" in known.parts.mixers else None


def _architecture(config: Mapping[str, Any], name: str) -> tuple[str, str, bool]:
    """Return (architecture, family, has a scalar head).

    A config with only `model_type` is a language model, as in transformers.
    """
    if isinstance(config.get("text_config"), dict):
        kind = config["text_config"].get("model_type")
        raise BadInput(
            f"model {name} reads images and text; to plan its text model, write its text_config as a config.json with "
            f"{f'model_type {kind!r}' if kind else 'the model_type of its language model'}."
        )
    listed, model_type = config.get("architectures"), config.get("model_type")
    families = {kind: family for family, known in FAMILIES.items() for kind in (known.model_type, *known.other_types)}
    if not listed and isinstance(model_type, str):
        if model_type not in families:
            raise BadInput(f"model {name}: model_type {model_type!r} is not known; {suggestion('', families)}")
        listed = [families[model_type] + "ForCausalLM"]
    architecture = listed[0] if isinstance(listed, list) and listed else listed
    if isinstance(architecture, str):
        architecture = _OF_SCORE_CLASSES.get(architecture, architecture)
    if not isinstance(listed, list) or not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise BadInput(f"model {name}: architecture {architecture!r} is not known; {_nearest(str(architecture))}")
    head = next(h for h in _HEADS if architecture.endswith(h))
    family = architecture.removesuffix(head)
    if model_type is not None and model_type not in (FAMILIES[family].model_type, *FAMILIES[family].other_types):
        raise BadInput(
            f"model {name}: model_type {model_type!r} is not that of architecture {architecture!r}, which is "
            f"{FAMILIES[family].model_type!r}; correct the one that does not match the weights."
        )
    return architecture, family, _HEADS[head]


def _nearest(architecture: str) -> str:
    """The clause "did you mean X?" for an architecture that differs in case or underscores only, else the known ones.

    A name that is close by edit distance is usually a different model, so it is not suggested.
    """
    respelled = [known for known in ARCHITECTURES if known.lower() == architecture.replace("_", "").lower()]
    if respelled:
        return f"did you mean {respelled[0]!r}?"
    return f"known: {', '.join(FAMILIES)}, each with {' or '.join(_HEADS)}."


_WITHOUT_SCALAR_HEAD = ("Granite", "Glm4Moe", "MiniMaxM2", "Qwen3_5Moe", "Llama4")
"""Families that run as language models and have no class with a scalar head in transformers."""


def run_violations(spec: ModelSpec) -> Iterator[str]:
    """One sentence per reason why a model that can be planned cannot be run; none if it can."""
    if spec.image_encoder:
        yield (
            f"model {spec.name} reads images: it can be planned and simulated, and running models of images is future "
            "work; give a model of text."
        )
    if spec.experts and not spec.architecture.startswith(RUN_EXPERT_FAMILIES):
        yield (
            f"model {spec.name} has experts, which can be planned and simulated but not run in {spec.architecture}; "
            f"use {' or '.join(RUN_EXPERT_FAMILIES)}, or a dense model."
        )
    if spec.scalar_head and spec.architecture.startswith(_WITHOUT_SCALAR_HEAD):
        yield (
            f"model {spec.name} has a scalar head, and transformers has no sequence classification for "
            f"{spec.architecture}; start it from another family."
        )
    if parts := _planned_parts(spec):
        yield (
            f"model {spec.name} has {_listed(parts)}, which can be planned and simulated but not run; give a model "
            "without."
        )
    if spec.planned_rope:
        yield (
            f"model {spec.name} has rope type {spec.planned_rope!r}, which can be planned and simulated but not run; "
            "give a model whose rope_type is default, linear, llama3, yarn or longrope."
        )
    if spec.experts and spec.experts.normalized and spec.experts.experts_per_token == 1:
        yield (
            f"model {spec.name} has one expert per token with normalised weights, so that its router would learn "
            "nothing: it can be planned and simulated but not run; give a model with two or more experts per token, or "
            "with norm_topk_prob=false."
        )


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def _planned_parts(spec: ModelSpec) -> list[str]:
    """Parts of the model that can be planned but not run, except those with a sentence of their own."""
    named = {
        f"the activation {spec.activation}": spec.activation not in ("silu", "gelu_tanh"),
        "an odd number of rotated elements of a head": spec.num_rotated % 2 == 1,
        "latent attention of odd sizes": bool(spec.latent and (spec.latent.nope_dim % 2 or spec.latent.kv_rank % 2)),
        "values that are larger than keys": spec.value_dim > spec.head_dim,
        "Mamba layers": spec.linear is not None and spec.linear.rule == "mamba",
        "an indexer of tokens": spec.latent is not None and spec.latent.indexer is not None,
    }
    return [*(part for part, is_present in named.items() if is_present), *spec.planned_parts]
