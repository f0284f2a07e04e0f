"""Model shapes by the names that published rows use, from `models.yaml`, and GPT shapes typed in the rows."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.fidelity.rows import Row, Skip, count
from meshwright.profiles.documents import Document, read_yaml
from meshwright.profiles.experts import Experts, LatentAttention
from meshwright.profiles.model_parts.hf_config import SlidingWindow
from meshwright.profiles.model_shape import ModelSpec

_REMARK = re.compile(r"\s*\([^)]*\)")
_SUFFIX = re.compile(r"-(instruct|base|chat|hf|fp8|fp4|nvfp4|2507|v0\.\d)$")
_GENERATIONS = (
    (re.compile(r"^(meta-)?llama-?3(\.\d)?-"), "llama-3-"),
    (re.compile(r"^llama-?(2-)?(?=\d+b$)"), "llama-2-"),
    (re.compile(r"^deepseek-?v3(\.\d)?$"), "deepseek-v3"),
    (re.compile(r"^deepseek-?r1$"), "deepseek-v3"),
    (re.compile(r"^qwen3-30b-?3a$"), "qwen3-30b-a3b"),
    (re.compile(r"^qwen3-235b$"), "qwen3-235b-a22b"),
    (re.compile(r"^(qwen2\.5-math|r1-distill-qwen)-"), "qwen2.5-"),
    (re.compile(r"^kimi-?k2(\.\d)?$"), "kimi-k2"),
)
"""Names of one shape: releases of Llama 3 have the same sizes, and so do DeepSeek V3, V3.1 and R1."""

GPT_VOCAB = 51200
"""Megatron's padding of the GPT-2 vocabulary, for rows that do not state one (Narayanan et al., arXiv:2104.04473)."""


class _Experts(Document):
    number: int
    per_token: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    bias: bool = False


class _Latent(Document):
    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


class _Window(Document):
    tokens: int
    every: int = 1


class _Shape(Document):
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    tied: bool = False
    whole_qk_norm: bool = False
    experts: _Experts | None = None
    latent: _Latent | None = None
    window: _Window | None = None


class _Shapes(Document):
    models: dict[str, _Shape]


def model_named(name: str) -> ModelSpec:
    """The model that a row calls `name`; skips a name that is not known."""
    shape = _known().get(shape_key(name))
    if shape is None:
        raise Skip(f"model {name} not known" if name else "model not published")
    return _spec(name, shape)


def is_known(name: str) -> bool:
    """Whether the shape of the model that a row calls `name` is known."""
    return shape_key(name) in _known()


def has_experts(name: str) -> bool:
    """Whether the model that a row calls `name` is known to have experts."""
    shape = _known().get(shape_key(name))
    return shape is not None and shape.experts is not None


def shape_key(name: str) -> str:
    """The name of the shape that a row's spelling means: without owner, remarks, number format and kind of tuning."""
    key = re.sub(r"[\s_]+", "-", _REMARK.sub("", name).lower().rsplit("/", maxsplit=1)[-1])
    while _SUFFIX.search(key):
        key = _SUFFIX.sub("", key)
    for pattern, spelling in _GENERATIONS:
        key = pattern.sub(spelling, key)
    return key


def gpt_of(row: Row) -> ModelSpec:
    """The GPT whose sizes a row states: feed-forward of four times the hidden size, one matrix up and one down."""
    hidden, heads = count(row, "hidden"), count(row, "heads")
    return _spec(
        row["model"],
        _Shape(
            layers=count(row, "layers"),
            hidden=hidden,
            ffn=4 * hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            vocab=count(row, "vocab", GPT_VOCAB),
            gated=False,
            tied=True,
        ),
    )


def with_repeated_keys(model: ModelSpec, tp: int) -> ModelSpec:
    """The model as an engine of more ranks than key heads runs it: every rank has one key head."""
    if model.latent or model.num_kv_heads >= tp or model.num_heads % tp:
        return model
    return replace(model, num_kv_heads=tp)


def _spec(name: str, shape: _Shape) -> ModelSpec:
    routed, latent, window = shape.experts, shape.latent, shape.window
    return ModelSpec(
        name=name,
        architecture="LlamaForCausalLM",
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_size=shape.ffn,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_positions=2**20,
        tied_embeddings=shape.tied,
        activation="silu" if shape.gated else "gelu_tanh",
        norm_epsilon=1e-5,
        gated_mlp=shape.gated,
        whole_qk_norm=shape.whole_qk_norm,
        experts=routed
        and Experts(
            num_experts=routed.number,
            experts_per_token=routed.per_token,
            ffn_size=routed.ffn,
            shared_ffn_size=routed.shared_ffn,
            num_dense_layers=routed.dense_layers,
        ),
        latent=latent and LatentAttention(**latent.model_dump()),
        expert_bias=routed is not None and routed.bias,
        window=window and SlidingWindow(num_tokens=window.tokens, every=window.every),
    )


@cache
def _known() -> dict[str, _Shape]:
    path = Path(__file__).with_name("models.yaml")
    return {name.lower(): shape for name, shape in read_yaml(_Shapes, path, "model shapes").models.items()}
