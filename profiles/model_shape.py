"""The shape of a decoder model, read from its Hugging Face config, and the reasons why a model can be planned but not
run.

This file reads no weights and knows nothing of parallelism except the sizes of a tensor-parallel shard. An architecture
that it does not know is refused with one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.experts import (
    EXPERT_FAMILIES,
    RUN_EXPERT_FAMILIES,
    Balance,
    Experts,
    LatentAttention,
    experts_from_config,
    latent_from_config,
)
from meshwright.profiles.model_parts.adapter import ATTENTION_LINEARS, MLP_LINEARS, Adapter
from meshwright.profiles.model_parts.family_keys import FAMILIES
from meshwright.profiles.model_parts.hf_config import (
    RopeScaling,
    SlidingWindow,
    activation_of,
    complete_config,
    flag,
    number,
    required_size,
    rope_from_config,
    size_or,
    window_from_config,
)
from meshwright.profiles.untrusted_text import json_value, read_text

MAX_CONFIG_BYTES = 2**20
"""Maximum size of a config.json; typical ones have a few thousand bytes."""

VOCAB_MULTIPLE = 64
"""Embedding rows are padded to this multiple so that every tp up to it divides them."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The sizes of a decoder-only transformer. `name` appears in messages only; no cost depends on it.

    A model with `experts` has the plain MLP of `ffn_size` in its first `experts.num_dense_layers` layers only.
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
    activation: str  # "silu" | "gelu_tanh"
    norm_epsilon: float
    norm_offset: float = 0.0  # 1.0 when the stored norm weight is relative to one (Gemma)
    embedding_scale: float = 1.0  # Gemma multiplies embeddings by sqrt(hidden_size)
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    planned_rope: str = ""  # a rope type that can be planned (no cost depends on it) but not run, e.g. "yarn"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True  # gate, up and down projections; False: up and down only (GPT)
    qk_norm: bool = False
    scalar_head: bool = False  # one number per token instead of logits over the vocabulary (reward, critic)
    vocab_multiple: int = VOCAB_MULTIPLE  # 1 for a shard, because rows are padded before sharding
    experts: Experts | None = None
    latent: LatentAttention | None = None
    adapter: Adapter | None = None  # trained in place of the weights
    window: SlidingWindow | None = None  # sliding-window attention in some or all layers
    attention_sinks: bool = False  # one learned logit per head in the softmax (gpt-oss)
    expert_bias: bool = False  # biases of the router and of both matrices of each expert (gpt-oss)

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
        if self.adapter and self.experts and not {*self.adapter.targets}.isdisjoint(MLP_LINEARS):
            raise BadInput(
                f"model {self.name} has experts, which are not adapted; set the adapter's targets to "
                f"{' and '.join(ATTENTION_LINEARS)}."
            )
        if self.adapter and self.latent:
            raise BadInput(
                f"model {self.name} has latent attention, whose projections are not adapted; train it without adapter."
            )

    def with_balance(self, balance: Balance | None) -> ModelSpec:
        """The model whose experts are kept even as stated. Raises BadInput for a model without experts."""
        if balance is None:
            return self
        if self.experts is None:
            raise BadInput(f"model {self.name} has no experts, and balance={balance} is about them; remove it.")
        return replace(self, experts=replace(self.experts, balance=balance))

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
    def up_size(self) -> int:
        """Output width of the first linear of the MLP: gate and up projections together, or up alone."""
        return (1 + self.gated_mlp) * self.ffn_size

    @property
    def num_dense_layers(self) -> int:
        """Number of layers with a plain MLP; they are the first layers."""
        return min(self.num_layers, self.experts.num_dense_layers) if self.experts else self.num_layers

    @property
    def num_window_layers(self) -> int:
        """Number of layers with sliding-window attention."""
        return self.window.num_layers(0, self.num_layers) if self.window else 0

    @property
    def expert_layers_share(self) -> float:
        """Fraction of the layers that have experts, 0 to 1."""
        return 1 - self.num_dense_layers / self.num_layers

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
        return (self.hidden_size, self.attention_size + 2 * self.kv_size), (self.attention_size, self.hidden_size)

    @property
    def adapted_linears(self) -> tuple[tuple[int, int], ...]:
        """(input size, output size) of each linear that has an adapter, in the order of the layer."""
        if self.adapter is None:
            return ()
        hidden = self.hidden_size
        sizes = {
            "linear_qkv": (hidden, self.attention_size + 2 * self.kv_size),
            "linear_proj": (self.attention_size, hidden),
            "linear_fc1": (hidden, self.up_size),
            "linear_fc2": (self.ffn_size, hidden),
        }
        return tuple(sizes[name] for name in sizes if name in self.adapter.targets)

    @property
    def adapter_layer_params(self) -> int:
        """Adapter parameters in one decoder layer; 0 without an adapter."""
        rank = self.adapter.rank if self.adapter else 0
        return sum(rank * (inner + outer) for inner, outer in self.adapted_linears)

    @property
    def attention_elements(self) -> int:
        """Elements per token of queries, keys, values and attention output in one layer."""
        if self.latent:
            return 2 * self.num_heads * (self.head_dim + self.latent.value_dim)
        return 2 * (self.attention_size + self.kv_size)

    @property
    def cached_elements(self) -> int:
        """Elements per token in the KV cache of one layer."""
        return self.latent.cached_size if self.latent else 2 * self.kv_size

    @property
    def layer_params(self) -> float:
        """Parameters of one decoder layer: attention, MLP, norms, biases; the mean over layers if some have experts."""
        if not self.experts:
            return self.params_between(0, 1)
        return self.params_between(0, self.num_layers) / self.num_layers

    @cached_property
    def active_layer_params(self) -> tuple[int, ...]:
        """Active matrix parameters per token of each decoder layer: only the experts that a token is routed to."""
        attention = sum(inner * outer for inner, outer in self.attention_linears)
        dense = attention + self.hidden_size * (self.up_size + self.ffn_size)
        if not self.experts:
            return (dense,) * self.num_layers
        routed = attention + self.experts.active_params(self.hidden_size)
        return (dense,) * self.num_dense_layers + (routed,) * (self.num_layers - self.num_dense_layers)

    @property
    def active_head_params(self) -> int:
        """Parameters of the output head, including those shared with the embedding."""
        return self.hidden_size if self.scalar_head else self.embedding_params

    def params_between(self, first: int, last: int) -> int:
        """Parameters of layers `first` to `last` - 1."""
        return self._params(max(0, min(last, self.num_dense_layers) - first), last - first)

    def expert_params_between(self, first: int, last: int) -> int:
        """Parameters of the routed experts in layers `first` to `last` - 1."""
        if not self.experts:
            return 0
        num_layers = last - first - max(0, min(last, self.num_dense_layers) - first)
        return num_layers * self.experts.routed_params(self.hidden_size, has_bias=self.expert_bias)

    def _params(self, num_dense: int, num_layers: int) -> int:
        """Parameters of `num_layers` layers, of which `num_dense` have a plain MLP and the others experts."""
        attention = sum(inner * outer for inner, outer in self.attention_linears)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        norms += self.latent.norm_params if self.latent else 0
        biases = (self.attention_size + 2 * self.kv_size) * self.qkv_bias + self.hidden_size * self.output_bias
        plain = self.hidden_size * (self.up_size + self.ffn_size) + (self.up_size + self.hidden_size) * self.mlp_bias
        biases += self.num_heads * self.attention_sinks
        routed = self.experts.params(self.hidden_size, has_bias=self.expert_bias) if self.experts else 0
        return num_layers * (attention + norms + biases) + num_dense * plain + (num_layers - num_dense) * routed

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
        """All parameters without those of an adapter."""
        layers = self.params_between(0, self.num_layers)
        return layers + self.embedding_params + self.head_params + self.hidden_size

    @property
    def trainable_params(self) -> int:
        """Number of trained parameters: those of the adapter if the model has one, else all."""
        return self.num_layers * self.adapter_layer_params if self.adapter else self.num_params

    def shard(self, tp: int) -> ModelSpec:
        """The shard of the model on one of `tp` tensor-parallel ranks: heads, KV heads, MLP and vocabulary are divided.

        Norms, routers, the down-projections of latent attention and the scalar head are replicated, so `num_params` of
        the shard counts all that one rank holds. Raises BadInput if tp does not divide a size.
        """
        sizes = {name: getattr(self, name) for name in ("num_heads", "num_kv_heads", "ffn_size", "padded_vocab_size")}
        if self.experts:
            sizes |= {"expert_ffn_size": self.experts.ffn_size, "shared_ffn_size": self.experts.shared_ffn_size}
        for field, size in sizes.items():
            if size % tp:
                raise BadInput(f"tp={tp} does not divide {field}={size} of model {self.name}.")
        return replace(
            self,
            num_heads=self.num_heads // tp,
            num_kv_heads=self.num_kv_heads // tp,
            ffn_size=self.ffn_size // tp,
            vocab_size=self.padded_vocab_size // tp,
            vocab_multiple=1,
            experts=self.experts.shard(tp) if self.experts else None,
        )


_QK_NORM = ("Qwen3", "Qwen3Moe")
_LATENT = ("DeepseekV2", "DeepseekV3")
_HEADS = {"ForCausalLM": False, "ForSequenceClassification": True}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ARCHITECTURES = tuple(family + head for family in FAMILIES for head in _HEADS)


def read_model(path: Path, *, scalar_head: bool | None = None) -> ModelSpec:
    """Read the model shape from a Hugging Face directory or a `config.json` file.

    `scalar_head` overrides the architecture's head (e.g. for a critic initialised from a language model).
    Raises BadInput if the file is missing, is not JSON, or describes an unknown architecture.
    """
    config_path = path / "config.json" if path.is_dir() else path
    if not config_path.exists():
        raise BadInput(f"model {path}: there is no {config_path}; give a Hugging Face directory or a config.json.")
    config = json_value(read_text(config_path, "model config", MAX_CONFIG_BYTES), f"model config {config_path}")
    if not isinstance(config, dict):
        raise BadInput(f"model config {config_path} holds {type(config).__name__}; a JSON object is needed.")
    name = (path if path.is_dir() else path.parent).absolute().name or path.stem
    return model_from_config(config, name=name, scalar_head=scalar_head)


def model_from_config(config: Mapping[str, Any], *, name: str, scalar_head: bool | None = None) -> ModelSpec:
    """Return the model shape that the keys of a Hugging Face config describe; see `read_model`.

    Raises BadInput for a missing key or a value that is not supported.
    """
    architecture, family, has_scalar_head = _architecture(config, name)
    original_config, config = config, complete_config(config, family, name)

    def need(key: str) -> int:
        return required_size(config, key, name)

    activation = activation_of(original_config, family)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise BadInput(f"model {name}: activation {activation!r} is not known; known: {', '.join(_ACTIVATIONS)}.")
    heads = need("num_attention_heads")
    hidden = need("hidden_size")
    if config.get("head_dim") is None and hidden % heads and family not in _LATENT:
        raise BadInput(f"model {name}: {heads} attention heads do not divide hidden_size={hidden}; give head_dim.")
    attention_bias = flag(config, "attention_bias", name)
    rope = rope_from_config(original_config, need("max_position_embeddings"), family, name)
    is_costed_only = family in EXPERT_FAMILIES and family not in RUN_EXPERT_FAMILIES
    experts = experts_from_config(config, family, name) if family in EXPERT_FAMILIES else None
    latent = latent_from_config(config, name) if family in _LATENT else None
    head_dim = latent.nope_dim + latent.rope_dim if latent else size_or(config, "head_dim", hidden // heads, name)
    return ModelSpec(
        name=name,
        architecture=architecture,
        num_layers=need("num_hidden_layers"),
        hidden_size=hidden,
        ffn_size=experts.ffn_size if experts and not experts.num_dense_layers else need("intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads if latent else size_or(config, "num_key_value_heads", heads, name),
        head_dim=head_dim,
        vocab_size=need("vocab_size"),
        max_positions=need("max_position_embeddings"),
        tied_embeddings=flag(config, "tie_word_embeddings", name),
        activation=_ACTIVATIONS[activation],
        norm_epsilon=number(config, "rms_norm_eps", name),
        norm_offset=1.0 if family == "Gemma" else 0.0,
        embedding_scale=float(hidden) ** 0.5 if family == "Gemma" else 1.0,
        rope_theta=rope.theta,
        rope_scaling=None if is_costed_only else rope.scaling,
        planned_rope="" if is_costed_only else rope.planned_type,
        qkv_bias=family == "Qwen2" or flag(config, "qkv_bias", name) or attention_bias,
        output_bias=attention_bias,
        mlp_bias=flag(config, "mlp_bias", name),
        qk_norm=family in _QK_NORM,
        scalar_head=has_scalar_head if scalar_head is None else scalar_head,
        experts=experts,
        latent=latent,
        window=window_from_config(config, family, name),
        attention_sinks=family == "GptOss",
        expert_bias=family == "GptOss",
    )


def _architecture(config: Mapping[str, Any], name: str) -> tuple[str, str, bool]:
    """Return (architecture, family, has a scalar head).

    A config with only `model_type` is a language model, as in transformers.
    """
    listed, model_type = config.get("architectures"), config.get("model_type")
    families = {known.model_type: family for family, known in FAMILIES.items()}
    if not listed and isinstance(model_type, str):
        if model_type not in families:
            raise BadInput(f"model {name}: model_type {model_type!r} is not known; {suggestion('', families)}")
        listed = [families[model_type] + "ForCausalLM"]
    architecture = listed[0] if isinstance(listed, list) and listed else listed
    if not isinstance(listed, list) or not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise BadInput(f"model {name}: architecture {architecture!r} is not known; {_nearest(str(architecture))}")
    head = next(h for h in _HEADS if architecture.endswith(h))
    family = architecture.removesuffix(head)
    if model_type is not None and model_type != FAMILIES[family].model_type:
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


def run_violations(spec: ModelSpec) -> Iterator[str]:
    """One sentence per reason why a model that can be planned cannot be run; none if it can."""
    if spec.experts and not spec.architecture.startswith(RUN_EXPERT_FAMILIES):
        yield (
            f"model {spec.name} has experts, which can be planned and simulated but not run in {spec.architecture}; "
            f"use {' or '.join(RUN_EXPERT_FAMILIES)}, or a dense model."
        )
    if spec.window:
        yield (
            f"model {spec.name} has sliding windows of {spec.window.num_tokens} tokens, which can be planned and "
            "simulated but not run; set sliding_window to null."
        )
    if spec.planned_rope:
        yield (
            f"model {spec.name} has rope type {spec.planned_rope!r}, which can be planned and simulated but not run; "
            "give a model whose rope_type is default or llama3."
        )
    if spec.experts and spec.experts.normalized and spec.experts.experts_per_token == 1:
        yield (
            f"model {spec.name} has one expert per token with normalised weights, so that its router would learn "
            "nothing: it can be planned and simulated but not run; give a model with two or more experts per token, or "
            "with norm_topk_prob=false."
        )
