"""The mapping between Megatron parameters and the tensors of a Hugging Face checkpoint, and their sharding over ranks.

It has only names and arithmetic; no file is read or written. Parameters have Megatron's names, with layers numbered
through the whole model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.profiles.experts import Experts
from meshwright.profiles.layout import chunk_layers
from meshwright.profiles.model_shape import ModelSpec

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
OUTPUT = "output_layer.weight"

_LAYER = re.compile(r"decoder\.layers\.([0-9]+)\.(.+)")
_EXPERT = re.compile(r"(mlp\.experts\.local_experts\.)([0-9]+)\.(linear_fc[12])")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, by its name and whole shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A parameter as a concatenation of stored tensors along their rows."""

    tensors: tuple[StoredTensor, ...]
    axis: int | None
    """The axis along which tensor parallelism shards each stored tensor; None if it is replicated."""
    heads: int = 0
    """Number of KV heads for which query, key and value rows are interleaved in the parameter; 0 if the stored tensors
    are simply concatenated."""
    padded_rows: int = 0
    """Number of rows of the parameter over all ranks if it is padded with zeros; 0 if it is not."""

    def span(self, stored: StoredTensor, tp_rank: int, tp: int) -> tuple[int, int]:
        """The part of `stored` along `axis` that belongs to one tensor-parallel rank; it may end past the tensor."""
        assert self.axis is not None
        size = (self.padded_rows or stored.shape[0]) if self.axis == 0 else stored.shape[self.axis]
        return tp_rank * (size // tp), (tp_rank + 1) * (size // tp)

    def join(self, parts: Sequence[Tensor], tp: int) -> Tensor:
        """One rank's shard of the parameter [rows, ...] from its parts of the stored tensors."""
        if len(parts) == 1:
            return parts[0]
        heads = self.heads // tp or 1
        return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)

    def split(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        """The stored tensors [rows, ...] by name, from the shards of all tensor-parallel ranks in order.

        It is the inverse of `span` and `join`.
        """
        if self.axis is None:
            return {self.tensors[0].name: shards[0]}
        tp = len(shards)
        heads = self.heads // tp or 1
        rows = [(self.padded_rows or stored.shape[0]) // heads for stored in self.tensors]
        rows = [count // tp if self.axis == 0 else count for count in rows]
        by_shard = [shard.unflatten(0, (heads, -1)).split(rows, dim=1) for shard in shards]
        return {
            stored.name: torch.cat([parts[i].flatten(0, 1) for parts in by_shard], dim=self.axis)[: stored.shape[0]]
            for i, stored in enumerate(self.tensors)
        }


def recipe(spec: ModelSpec, parameter: str) -> Recipe:
    """The recipe that makes `parameter` of stored tensors."""
    layer = _LAYER.fullmatch(parameter)
    if layer:
        return _layer_recipe(spec, f"model.layers.{layer[1]}", layer[2])
    if parameter == FINAL_NORM:
        return _whole("model.norm.weight", spec.hidden_size)
    if parameter == OUTPUT and spec.scalar_head:
        return _whole("score.weight", 1, spec.hidden_size)
    assert parameter in {EMBEDDING, OUTPUT}, parameter
    tied = parameter == EMBEDDING or spec.tied_embeddings
    table = StoredTensor("model.embed_tokens.weight" if tied else "lm_head.weight", (spec.vocab_size, spec.hidden_size))
    return Recipe(tensors=(table,), axis=0, padded_rows=spec.padded_vocab_size)


def _layer_recipe(spec: ModelSpec, layer: str, parameter: str) -> Recipe:
    """The recipe of a parameter of one layer; names of its stored tensors start with `layer`."""
    module, kind = parameter.rsplit(".", 1)
    if spec.experts and module.startswith("mlp."):
        return _experts_recipe(spec, spec.experts, layer, module)
    columns = (spec.hidden_size,) if kind == "weight" else ()
    if module == "self_attention.linear_qkv":
        rows = {"q": spec.attention_size, "k": spec.kv_size, "v": spec.kv_size}
        tensors = tuple(
            StoredTensor(f"{layer}.self_attn.{x}_proj.{kind}", (size, *columns)) for x, size in rows.items()
        )
        return Recipe(tensors=tensors, axis=0, heads=spec.num_kv_heads)
    if module == "mlp.linear_fc1":
        tensors = tuple(StoredTensor(f"{layer}.mlp.{x}_proj.{kind}", (spec.ffn_size, *columns)) for x in ("gate", "up"))
        return Recipe(tensors=tensors, axis=0)
    output = {
        "self_attention.linear_proj": ("self_attn.o_proj", spec.attention_size),
        "mlp.linear_fc2": ("mlp.down_proj", spec.ffn_size),
    }
    if module in output and kind == "weight":
        name, size = output[module]
        return Recipe(tensors=(StoredTensor(f"{layer}.{name}.weight", (spec.hidden_size, size)),), axis=1)
    whole = {
        "input_layernorm": ("input_layernorm", spec.hidden_size),
        "pre_mlp_layernorm": ("post_attention_layernorm", spec.hidden_size),
        "self_attention.q_layernorm": ("self_attn.q_norm", spec.head_dim),
        "self_attention.k_layernorm": ("self_attn.k_norm", spec.head_dim),
        "self_attention.linear_proj": ("self_attn.o_proj", spec.hidden_size),
        "mlp.linear_fc2": ("mlp.down_proj", spec.hidden_size),
    }
    name, size = whole[module]
    return _whole(f"{layer}.{name}.{kind}", size)


def _experts_recipe(spec: ModelSpec, experts: Experts, layer: str, module: str) -> Recipe:
    """The recipe of a router's weight, or of one of the two weights of an expert."""
    mixtral = spec.architecture.startswith("Mixtral")
    block = f"{layer}.block_sparse_moe" if mixtral else f"{layer}.mlp"
    if module == "mlp.router":
        return _whole(f"{block}.gate.weight", experts.num_experts, spec.hidden_size)
    match = _EXPERT.fullmatch(module)
    assert match, module
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    expert, wide = f"{block}.experts.{match[2]}", (experts.ffn_size, spec.hidden_size)
    if match[3] == "linear_fc1":
        return Recipe(tensors=tuple(StoredTensor(f"{expert}.{x}.weight", wide) for x in (gate, up)), axis=0)
    return Recipe(tensors=(StoredTensor(f"{expert}.{down}.weight", wide[::-1]),), axis=1)


def _whole(name: str, *shape: int) -> Recipe:
    return Recipe(tensors=(StoredTensor(name, shape),), axis=None)


def parameters_of_stage(spec: ModelSpec, pp: int, stage: int, vpp: int = 1) -> tuple[str, ...]:
    """The parameters that pipeline stage `stage` of `pp` stores in a checkpoint; a tied head is stored as the
    embedding."""
    layer = ["input_layernorm.weight", *_linear("self_attention.linear_qkv", spec.qkv_bias)]
    layer += _linear("self_attention.linear_proj", spec.output_bias)
    if spec.qk_norm:
        layer += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"]
    layer += ["pre_mlp_layernorm.weight"]
    if spec.experts:
        experts = [f"mlp.experts.local_experts.{number}" for number in range(spec.experts.num_experts)]
        layer += ["mlp.router.weight", *(f"{e}.linear_fc{i}.weight" for e in experts for i in (1, 2))]
    else:
        layer += _linear("mlp.linear_fc1", spec.mlp_bias) + _linear("mlp.linear_fc2", spec.mlp_bias)
    numbers = [number for layers in chunk_layers(spec, pp, stage, vpp) for number in layers]
    names = [f"decoder.layers.{number}.{name}" for number in numbers for name in layer]
    if stage == 0:
        names.insert(0, EMBEDDING)
    if stage == pp - 1:
        names.append(FINAL_NORM)
        if spec.scalar_head or not spec.tied_embeddings:
            names.append(OUTPUT)
    return tuple(names)


def starts_at_zero(spec: ModelSpec, parameter: str) -> bool:
    """True for a parameter that is not in the checkpoint and starts at zero: the scalar head of a model initialised
    from a language model, by `spec.architecture`."""
    return parameter == OUTPUT and spec.scalar_head and not spec.architecture.endswith("ForSequenceClassification")


def _linear(module: str, has_bias: bool) -> list[str]:
    return [f"{module}.weight", f"{module}.bias"] if has_bias else [f"{module}.weight"]


def global_name(parameter: str, first_layer: int, first_expert: int = 0) -> str:
    """The name in the whole model of a rank's `parameter`, whose layers and experts are numbered from 0."""
    layer = _LAYER.fullmatch(parameter)
    if not layer:
        return parameter
    named = _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first_expert}.{match[3]}", layer[2])
    return f"decoder.layers.{int(layer[1]) + first_layer}.{named}"


def expert_of(parameter: str) -> int | None:
    """The number of the expert that a parameter belongs to; None if it belongs to no expert."""
    match = _EXPERT.search(parameter)
    return int(match[2]) if match else None
