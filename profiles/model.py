"""What is known of a model: the shape of a dense decoder, read from a Hugging Face config.

This file knows no weights and no parallelism. It refuses architectures it does not know in one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.profiles.errors import BadInput, suggestion

VOCAB_MULTIPLE = 64
"""Embedding rows are padded to this multiple so that every tp up to it divides them."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies (Llama 3 report, arXiv:2407.21783, section 3.4.2)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A dense decoder-only transformer, by its sizes. `name` is for messages; costs never depend on it."""

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
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True  # two matrices up and one down; False: one up, one down (GPT)
    qk_norm: bool = False
    scalar_head: bool = False  # one number per token instead of a vocabulary (reward, critic)
    vocab_multiple: int = VOCAB_MULTIPLE  # 1 for a shard, whose rows were padded before they were divided

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
            if getattr(self, field) < 1:
                raise BadInput(f"model {self.name}: {field}={getattr(self, field)} must be 1 or more.")
        if self.num_heads % self.num_kv_heads:
            raise BadInput(
                f"model {self.name}: num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}."
            )

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
        """Width of what the first half of the MLP makes: gate and up side by side, or up alone."""
        return (1 + self.gated_mlp) * self.ffn_size

    @property
    def layer_params(self) -> int:
        """Parameters of one decoder layer: attention, MLP, norms, biases."""
        attention = self.hidden_size * (2 * self.attention_size + 2 * self.kv_size)
        mlp = self.hidden_size * (self.up_size + self.ffn_size)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        biases = (self.attention_size + 2 * self.kv_size) * self.qkv_bias + self.hidden_size * self.output_bias
        biases += (self.up_size + self.hidden_size) * self.mlp_bias
        return attention + mlp + norms + biases

    @property
    def embedding_params(self) -> int:
        return self.padded_vocab_size * self.hidden_size

    @property
    def head_params(self) -> int:
        """Parameters of the output head that are not shared with the embedding."""
        if self.scalar_head:
            return self.hidden_size
        return 0 if self.tied_embeddings else self.embedding_params

    @property
    def num_params(self) -> int:
        return self.num_layers * self.layer_params + self.embedding_params + self.head_params + self.hidden_size

    def shard(self, tp: int) -> ModelSpec:
        """The model that one of `tp` tensor-parallel ranks holds: heads, KV heads, feed-forward and vocabulary divided.

        Norms and the scalar head stay whole on every rank, so `num_params` is what the rank really holds.
        Raises BadInput when a size does not divide.
        """
        for field in ("num_heads", "num_kv_heads", "ffn_size", "padded_vocab_size"):
            if getattr(self, field) % tp:
                raise BadInput(f"tp={tp} does not divide {field}={getattr(self, field)} of model {self.name}.")
        return replace(
            self,
            num_heads=self.num_heads // tp,
            num_kv_heads=self.num_kv_heads // tp,
            ffn_size=self.ffn_size // tp,
            vocab_size=self.padded_vocab_size // tp,
            vocab_multiple=1,
        )


_QKV_BIAS_BY_DEFAULT = {"Qwen2": True}
_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma")
_HEADS = {"ForCausalLM": False, "ForSequenceClassification": True}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ARCHITECTURES = tuple(family + head for family in _FAMILIES for head in _HEADS)


def read_model(path: Path, *, scalar_head: bool | None = None) -> ModelSpec:
    """The model described by a Hugging Face directory or a `config.json` file.

    `scalar_head` overrides what the architecture says (a critic made from a language model).
    Raises BadInput when the file is missing, is not JSON, or describes a shape that is not known here.
    """
    config_path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(
            f"model {path}: there is no {config_path}; give a Hugging Face directory or a config.json."
        ) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"model config {config_path} cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise BadInput(f"model config {config_path} holds {type(config).__name__}; a JSON object is needed.")
    name = path.name if path.is_dir() else path.parent.name or path.stem
    return model_from_config(config, name=name, scalar_head=scalar_head)


def model_from_config(config: Mapping[str, Any], *, name: str, scalar_head: bool | None = None) -> ModelSpec:
    """The model described by the keys of a Hugging Face config; see `read_model`."""
    architecture, family, has_scalar_head = _architecture(config, name)

    def need(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadInput(f"model {name}: config key {key!r} is {value!r}; it must be a positive integer.")
        return value

    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        if family != "Gemma" or activation != "gelu":
            raise BadInput(f"model {name}: activation {activation!r} is not known; known: {', '.join(_ACTIVATIONS)}.")
        activation = "gelu_pytorch_tanh"  # early Gemma configs say "gelu" and mean the tanh form
    heads = need("num_attention_heads")
    hidden = need("hidden_size")
    if not config.get("head_dim") and hidden % heads:
        raise BadInput(f"model {name}: {heads} attention heads do not divide hidden_size={hidden}; give head_dim.")
    attention_bias = bool(config.get("attention_bias", _QKV_BIAS_BY_DEFAULT.get(family, False)))
    rope_theta, rope_scaling = _rope(config, name)
    return ModelSpec(
        name=name,
        architecture=architecture,
        num_layers=need("num_hidden_layers"),
        hidden_size=hidden,
        ffn_size=need("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=need("vocab_size"),
        max_positions=need("max_position_embeddings"),
        tied_embeddings=bool(config.get("tie_word_embeddings", family == "Gemma")),
        activation=_ACTIVATIONS[activation],
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        norm_offset=1.0 if family == "Gemma" else 0.0,
        embedding_scale=float(hidden) ** 0.5 if family == "Gemma" else 1.0,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=family == "Qwen2" or attention_bias,
        output_bias=attention_bias and family != "Qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "Qwen3",
        scalar_head=has_scalar_head if scalar_head is None else scalar_head,
    )


def _architecture(config: Mapping[str, Any], name: str) -> tuple[str, str, bool]:
    """(architecture, family, has a scalar head) as the config names them."""
    listed = config.get("architectures") or [None]
    architecture = listed[0]
    if architecture not in ARCHITECTURES:
        hint = suggestion(str(architecture), ARCHITECTURES)
        raise BadInput(f"model {name}: architecture {architecture!r} is not known; {hint}")
    head = next(h for h in _HEADS if architecture.endswith(h))
    family = architecture.removesuffix(head)
    window = config.get("sliding_window") if config.get("use_sliding_window", family == "Mistral") else None
    if window and window < config.get("max_position_embeddings", 0):
        raise BadInput(f"model {name}: sliding_window={window} is not supported; set it to null.")
    return architecture, family, _HEADS[head]


def _rope(config: Mapping[str, Any], name: str) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from the old keys (`rope_theta`, `rope_scaling`) or the new `rope_parameters`."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise BadInput(f"model {name}: rope type {kind!r} is not known; known: default, llama3.")
    return theta, RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(rope["original_max_position_embeddings"]),
    )
