"""Model shapes by the names that published rows use, from `models.yaml`, and GPT shapes typed in the rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from benchmarks.fidelity.rows import Row, Skip, count
from meshwright.profiles.documents import Document, read_yaml
from meshwright.profiles.experts import Experts
from meshwright.profiles.model_shape import ModelSpec

_SPELLINGS = {
    "llama-3.1 8b": "Llama-3-8B",
    "llama-3 8b": "Llama-3-8B",
    "llama3_8b": "Llama-3-8B",
    "llama3.1_8b": "Llama-3-8B",
    "nvidia/llama-3.1-8b-instruct-fp8": "Llama-3-8B",
    "llama-3 70b": "Llama-3-70B",
    "llama-3.1 70b": "Llama-3-70B",
    "llama-3.3 70b": "Llama-3-70B",
    "llama3_70b": "Llama-3-70B",
    "meta-llama/llama-3.1-70b": "Llama-3-70B",
    "llama-3.1 405b": "Llama-3-405B",
    "llama3.1_405b": "Llama-3-405B",
    "mistral 7b": "Mistral-7B",
    "llama 7b": "Llama-2-7B",
    "llama-2 13b": "Llama-2-13B",
    "llama 70b": "Llama-2-70B",
    "gpt-j 6b": "GPT-J-6B",
    "gpt-3 5b": "GPT-3-5B",
    "gpt-3 20b": "GPT-3-20B",
    "gpt-3 175b": "GPT-3-175B",
    "falcon 180b": "Falcon-180B",
    "qwen3-32b": "Qwen3-32B",
    "qwen/qwen3-32b": "Qwen3-32B",
    "qwen3-30b3a": "Qwen3-30B-A3B",
    "qwen3-235b": "Qwen3-235B-A22B",
    "qwen2.5-math-7b": "Qwen2.5-7B",
    "qwen/qwen3-0.6b": "Qwen3-0.6B",
    "qwen/qwen3-4b-instruct-2507": "Qwen3-4B",
    "qwen/qwen3-30b-a3b-instruct-2507": "Qwen3-30B-A3B",
    "qwen/qwen3-235b-a22b-instruct-2507": "Qwen3-235B-A22B",
}

GPT_VOCAB = 51200
"""Megatron's padding of the GPT-2 vocabulary, for rows that do not state one (Narayanan et al., arXiv:2104.04473)."""


class _Experts(Document):
    number: int
    per_token: int
    ffn: int


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
    experts: _Experts | None = None


class _Shapes(Document):
    models: dict[str, _Shape]


def model_named(name: str) -> ModelSpec:
    """The model that a row calls `name`; skips a name that is not known."""
    shapes = _known()
    key = _SPELLINGS.get(name.lower(), name)
    if key not in shapes:
        raise Skip(f"model {name} not known")
    shape = shapes[key]
    return _spec(name, shape)


def has_experts(name: str) -> bool:
    """Whether the model that a row calls `name` is known to have experts."""
    shape = _known().get(_SPELLINGS.get(name.lower(), name))
    return shape is not None and shape.experts is not None


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
        ),
    )


def _spec(name: str, shape: _Shape) -> ModelSpec:
    routed = shape.experts
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
        tied_embeddings=shape.tied or not shape.gated,
        activation="silu" if shape.gated else "gelu_tanh",
        norm_epsilon=1e-5,
        gated_mlp=shape.gated,
        experts=routed and Experts(num_experts=routed.number, experts_per_token=routed.per_token, ffn_size=routed.ffn),
    )


@cache
def _known() -> dict[str, _Shape]:
    path = Path(__file__).with_name("models.yaml")
    return read_yaml(_Shapes, path, "model shapes").models
