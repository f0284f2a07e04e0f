"""Hugging Face checkpoints: how each Megatron parameter is built from stored tensors and sharded over ranks, and how
headers and slices are read from the safetensors files.

Parameters have Megatron's names, with layers numbered through the whole model.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Experts, LatentAttention
from meshwright.profiles.layout import chunk_layers
from meshwright.profiles.model_parts.linear_attention import LinearAttention
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.untrusted_text import MAX_JSON_BYTES, is_file_name, json_value, read_text, require_file

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
OUTPUT = "output_layer.weight"
SELECTION_BIAS = "mlp.router.selection_bias"
"""What a router adds to the scores by which it selects experts, in each layer that has one; it is not trained."""

SINKS = "self_attention.core_attention.softmax_offset"
"""The sinks of the heads of a layer."""

_LAYER = re.compile(r"decoder\.layers\.([0-9]+)\.(.+)")
_EXPERT = re.compile(r"(mlp\.experts\.local_experts\.)([0-9]+)\.(linear_fc[12])")


class Stacked(NamedTuple):
    """The place of a tensor in a stack of the same tensors of all experts: that of number `expert` of `num_experts`.

    Matrices in the stack are transposed, and their columns are the rows of `num_parts` tensors: one behind the other,
    or if they are `interleaved` a row of each in turn. This tensor is number `part` of them.
    """

    expert: int
    num_experts: int
    part: int = 0
    num_parts: int = 1
    interleaved: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, by its name and shape; or some rows of one, or one of a stack of tensors.

    `shape` is that of the part. Some rows start at `first_row` of a tensor of `total_rows` rows in all; `total_rows` is
    0 for a whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    first_row: int = 0
    total_rows: int = 0
    stacked: Stacked | None = None

    @property
    def num_elements(self) -> int:
        """Number of elements, of these rows only."""
        return math.prod(self.shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the checkpoint."""
        if self.stacked:
            rows, *columns = self.shape
            return (self.stacked.num_experts, *columns, rows * self.stacked.num_parts)
        return (self.total_rows, *self.shape[1:]) if self.total_rows else self.shape


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
    head_order: tuple[int, ...] = ()
    """Row i of a query or key head in the parameter, or of its norm, is row `head_order[i]` of the stored head. Empty
    if the orders are the same."""
    query_order: tuple[int, ...] = ()
    """The order of the queries and gates of a group of heads, like `head_order`; empty if queries have no gates."""

    def span(self, stored: StoredTensor, tp_rank: int, tp: int) -> tuple[int, int]:
        """Start and stop of one tensor-parallel rank's part of `stored` along `axis`.

        With padding, both may lie past the end of the tensor.
        """
        assert self.axis is not None
        size = (self.padded_rows or stored.shape[0]) if self.axis == 0 else stored.shape[self.axis]
        return tp_rank * (size // tp), (tp_rank + 1) * (size // tp)

    def join(self, parts: Sequence[Tensor], tp: int) -> Tensor:
        """One rank's shard of the parameter [rows, ...] from its parts of the stored tensors."""
        parts = [_reordered(part, order) if (order := self._order(index)) else part for index, part in enumerate(parts)]
        if len(parts) == 1:
            return parts[0]
        heads = max(1, self.heads // tp)
        return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)

    def split(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        """The stored tensors [rows, ...] by name, from the shards of all tensor-parallel ranks in order; of a stack of
        tensors, one of them.

        It is the inverse of `span` and `join`.
        """
        if self.is_stacked:
            return {self.tensors[0].name: self._element_of_stack(shards)}
        if self.axis is None:
            return {self.tensors[0].name: _in_stored_order(shards[0], self._order(0))}
        tp = len(shards)
        heads = max(1, self.heads // tp)
        num_shards = tp if self.axis == 0 else 1
        rows_per_head = [(self.padded_rows or stored.shape[0]) // heads // num_shards for stored in self.tensors]
        by_shard = [shard.unflatten(0, (heads, -1)).split(rows_per_head, dim=1) for shard in shards]
        rows_of: dict[str, list[Tensor]] = {}
        for i, stored in enumerate(self.tensors):
            whole = torch.cat([parts[i].flatten(0, 1) for parts in by_shard], dim=self.axis)[: stored.shape[0]]
            rows_of.setdefault(stored.name, []).append(_in_stored_order(whole, self._order(i)))
        return {name: rows[0] if len(rows) == 1 else torch.cat(rows) for name, rows in rows_of.items()}

    @property
    def is_stacked(self) -> bool:
        """True if the stored tensors are stacks over experts."""
        return self.tensors[0].stacked is not None

    def _element_of_stack(self, shards: Sequence[Tensor]) -> Tensor:
        """One expert's element of a stack, from all shards of its parameter."""
        if self.axis is None:
            return shards[0]
        num_parts = len(self.tensors)
        by_shard = [shard.chunk(num_parts) if num_parts > 1 else (shard,) for shard in shards]
        parts = [torch.cat([shard[i] for shard in by_shard], dim=self.axis) for i in range(num_parts)]
        place = self.tensors[0].stacked
        rows = torch.stack(parts, dim=1).flatten(0, 1) if place and place.interleaved else torch.cat(parts)
        return rows.t().contiguous()

    def _order(self, index: int) -> tuple[int, ...]:
        """The order of the rows of tensor `index`: queries, keys and their norms have one; values, the last of three
        tensors, keep that of the checkpoint."""
        if len(self.tensors) > 1 and index == len(self.tensors) - 1:
            return ()
        return self.query_order if index == 0 and self.query_order else self.head_order


def _reordered(rows: Tensor, order: Sequence[int]) -> Tensor:
    """The rows [heads * D, ...] with those of each head in another order."""
    return rows.unflatten(0, (-1, len(order)))[:, list(order)].flatten(0, 1)


def _in_stored_order(rows: Tensor, order: Sequence[int]) -> Tensor:
    """The rows [heads * D, ...] as they were before `_reordered`."""
    return _reordered(rows, sorted(range(len(order)), key=order.__getitem__)) if order else rows


def head_order(spec: ModelSpec) -> tuple[int, ...]:
    """The order of a head's rows in a parameter, as in `Recipe.head_order`; empty if they are stored so.

    The elements of a rotated pair are half a head apart (the order of GPT-NeoX), also where a checkpoint has them side
    by side (that of GPT-J), so that all models rotate in the same way. Scores do not depend on the order, which queries
    and keys share.

    The rows that are not rotated take the places of pairs whose angle is always 0 (`attention.frequencies`).
    """
    rotated, half = spec.num_rotated, spec.head_dim // 2
    if rotated == spec.head_dim and not spec.adjacent_pairs:
        return ()
    first, second = _rotated_pairs(spec, spec.latent.nope_dim if spec.latent else 0)
    rest = range(spec.latent.nope_dim) if spec.latent else range(rotated, spec.head_dim)
    pairs = rotated // 2
    return (*first, *rest[: half - pairs], *second, *rest[half - pairs :])


def _query_order(spec: ModelSpec) -> tuple[int, ...]:
    """The order of the rows of the queries and gates of one KV head, as in `Recipe.query_order`; empty without gates.

    Each query head is stored with its gate. In the parameter all queries come first, and then all gates, whose elements
    are those of the output and keep their order.
    """
    if not spec.attention_gate:
        return ()
    size, starts = spec.head_dim, range(0, 2 * spec.head_dim * (spec.num_heads // spec.num_kv_heads), 2 * spec.head_dim)
    queries = [start + row for start in starts for row in head_order(spec) or range(size)]
    return (*queries, *(start + size + row for start in starts for row in range(size)))


def _rotated_pairs(spec: ModelSpec, start: int) -> tuple[range, range]:
    """The first and second elements of the rotated pairs of a head, whose rotated part begins at `start`."""
    end = start + spec.num_rotated
    if spec.adjacent_pairs:
        return range(start, end, 2), range(start + 1, end, 2)
    return range(start, start + spec.num_rotated // 2), range(start + spec.num_rotated // 2, end)


def recipe(spec: ModelSpec, parameter: str) -> Recipe:
    """The recipe that builds `parameter` from stored tensors."""
    layer = _LAYER.fullmatch(parameter)
    if layer:
        block = f"model.layers.{layer[1]}.self_attn"
        if layer[2] == SINKS:
            return Recipe(tensors=(StoredTensor(f"{block}.sinks", (spec.num_heads,)),), axis=0)
        special: dict[str, Recipe] = {}
        if spec.latent and "attention" in layer[2]:
            special = _latent_recipes(spec, spec.latent, block)
        elif spec.linear and spec.linear_layers_between(int(layer[1]), int(layer[1]) + 1):
            special = _delta_recipes(spec, spec.linear, f"model.layers.{layer[1]}.linear_attn")
        return special.get(layer[2]) or _layer_recipe(spec, int(layer[1]), layer[2])
    if parameter == FINAL_NORM:
        return _whole("model.norm.weight", spec.hidden_size)
    if parameter == OUTPUT and spec.scalar_head:
        return _whole("score.weight", 1, spec.hidden_size)
    assert parameter in {EMBEDDING, OUTPUT}, parameter
    tied = parameter == EMBEDDING or spec.tied_embeddings
    table = StoredTensor("model.embed_tokens.weight" if tied else "lm_head.weight", (spec.vocab_size, spec.hidden_size))
    return Recipe(tensors=(table,), axis=0, padded_rows=spec.padded_vocab_size)


def _layer_recipe(spec: ModelSpec, number: int, parameter: str) -> Recipe:
    """The recipe of a parameter of one layer of the whole model."""
    layer, (module, kind) = f"model.layers.{number}", parameter.rsplit(".", 1)
    if spec.experts and module.startswith("mlp.") and spec.expert_layers_between(number, number + 1):
        return _experts_recipe(spec, spec.experts, layer, parameter)
    columns, mlp = (spec.hidden_size,) if kind == "weight" else (), _mlp_name(spec)
    if module == "self_attention.linear_qkv":
        queries = (1 + spec.attention_gate) * spec.attention_size
        rows = {"q": queries, "k": spec.kv_size, "v": spec.kv_size}
        tensors = tuple(
            StoredTensor(f"{layer}.self_attn.{x}_proj.{kind}", (size, *columns)) for x, size in rows.items()
        )
        if _family(spec) in _FUSED_QKV:
            tensors = _rows_of(f"{layer}.self_attn.qkv_proj.{kind}", tensors)
        return Recipe(
            tensors=tensors,
            axis=0,
            heads=spec.num_kv_heads,
            head_order=head_order(spec),
            query_order=_query_order(spec),
        )
    if module == "mlp.linear_fc1":
        tensors = tuple(
            StoredTensor(f"{layer}.{mlp}.{x}_proj.{kind}", (spec.ffn_size, *columns)) for x in ("gate", "up")
        )
        if _family(spec) in _FUSED_GATES:
            tensors = _rows_of(f"{layer}.{mlp}.gate_up_proj.{kind}", tensors)
        return Recipe(tensors=tensors, axis=0)
    if module in _QK_NORMS:
        heads = (spec.num_kv_heads if "k_" in module else spec.num_heads) if spec.whole_qk_norm else 1
        stored = StoredTensor(f"{layer}.self_attn.{_QK_NORMS[module]}.weight", (heads * spec.head_dim,))
        return Recipe(tensors=(stored,), axis=0 if spec.whole_qk_norm else None, head_order=head_order(spec))
    row_parallel = {
        "self_attention.linear_proj": ("self_attn.o_proj", spec.num_heads * spec.value_dim),
        "mlp.linear_fc2": (f"{mlp}.down_proj", spec.ffn_size),
    }
    if module in row_parallel and kind == "weight":
        name, size = row_parallel[module]
        return Recipe(tensors=(StoredTensor(f"{layer}.{name}.weight", (spec.hidden_size, size)),), axis=1)
    replicated = {
        **{norm: (stored, spec.hidden_size) for norm, stored in _norms(spec).items()},
        "self_attention.linear_proj": ("self_attn.o_proj", spec.hidden_size),
        "mlp.linear_fc2": (f"{mlp}.down_proj", spec.hidden_size),
    }
    name, size = replicated[module]
    return _whole(f"{layer}.{name}.{kind}", size)


def _latent_recipes(spec: ModelSpec, latent: LatentAttention, block: str) -> dict[str, Recipe]:
    """The recipes of the projections and norms of latent attention before its output projection, in the order of the
    layer."""
    queries, expanded = spec.num_heads * spec.head_dim, spec.num_heads * (latent.nope_dim + latent.value_dim)
    query = "q_b_proj" if latent.query_rank else "q_proj"
    wide = StoredTensor(f"{block}.{query}.weight", (queries, latent.query_rank or spec.hidden_size))
    down = StoredTensor(f"{block}.kv_a_proj_with_mqa.weight", (latent.vector_size, spec.hidden_size))
    up = StoredTensor(f"{block}.kv_b_proj.weight", (expanded, latent.kv_rank))
    first, second = _rotated_pairs(spec, latent.kv_rank)
    queries_in_order = Recipe(tensors=(wide,), axis=0, head_order=head_order(spec))
    with_rank = {
        "linear_q_down_proj": _whole(f"{block}.q_a_proj.weight", latent.query_rank, spec.hidden_size),
        "q_layernorm": _whole(f"{block}.q_a_layernorm.weight", latent.query_rank),
        "linear_q_up_proj": queries_in_order,
    }
    recipes = {
        **(with_rank if latent.query_rank else {"linear_q_proj": queries_in_order}),
        "linear_kv_down_proj": Recipe(tensors=(down,), axis=None, head_order=(*range(latent.kv_rank), *first, *second)),
        "kv_layernorm": _whole(f"{block}.kv_a_layernorm.weight", latent.kv_rank),
        "linear_kv_up_proj": Recipe(tensors=(up,), axis=0),
    }
    return {f"self_attention.{module}.weight": recipe for module, recipe in recipes.items()}


def _delta_recipes(spec: ModelSpec, linear: LinearAttention, block: str) -> dict[str, Recipe]:
    """The recipes of a gated delta layer, in the order of its parameters.

    The projections of the input are one parameter, in the order of the key heads; Qwen3-Next stores them in this order
    too, as two tensors.
    """
    hidden, heads = spec.hidden_size, linear.num_key_heads
    keys, values, gates = heads * linear.key_dim, linear.value_size, linear.num_value_heads
    if _family(spec) in _FUSED_BY_KEY_HEAD:
        stored = {"in_proj_qkvz": linear.conv_size + values, "in_proj_ba": 2 * gates}
        projections = [StoredTensor(f"{block}.{name}.weight", (rows, hidden)) for name, rows in stored.items()]
    else:
        wide = [StoredTensor("", (rows, hidden)) for rows in (keys, keys, values)]
        single = {"in_proj_z": values, "in_proj_b": gates, "in_proj_a": gates}
        projections = [
            *_rows_of(f"{block}.in_proj_qkv.weight", wide),
            *(StoredTensor(f"{block}.{name}.weight", (rows, hidden)) for name, rows in single.items()),
        ]
    channels = [StoredTensor("", (rows, 1, linear.conv_kernel)) for rows in (keys, keys, values)]
    convolution = _rows_of(f"{block}.conv1d.weight", channels)
    output = StoredTensor(f"{block}.out_proj.weight", (hidden, values))
    recipes = {
        "linear_in.weight": Recipe(tensors=tuple(projections), axis=0, heads=heads),
        "linear_proj.weight": Recipe(tensors=(output,), axis=1),
        "heads.conv_weight": Recipe(tensors=convolution, axis=0, heads=heads),
        "heads.log_rate": Recipe(tensors=(StoredTensor(f"{block}.A_log", (gates,)),), axis=0),
        "heads.decay_bias": Recipe(tensors=(StoredTensor(f"{block}.dt_bias", (gates,)),), axis=0),
        "out_norm.weight": _whole(f"{block}.norm.weight", linear.value_dim),
    }
    return {f"self_attention.{parameter}": recipe for parameter, recipe in recipes.items()}


_FUSED_BY_KEY_HEAD = ("Qwen3Next",)
"""Families that store the projections of a gated delta layer as two tensors, in the order of the key heads."""

_QK_NORMS = {"self_attention.q_layernorm": "q_norm", "self_attention.k_layernorm": "k_norm"}
_FUSED_QKV = ("Phi3",)
"""Families that store queries, keys and values as one tensor."""
_FUSED_GATES = ("Phi3", "Glm4")
"""Families that store gate and up projection as one tensor."""

_INTERLEAVED_GATES = ("GptOss",)
"""Families in whose stacks of experts the rows of gate and up projection take turns."""

_NAMED_AS_MIXTRAL = ("Mixtral", "MiniMaxM2")
"""Families that store experts under the names of Mixtral."""

_AFTER_ATTENTION, _AFTER_MLP = "self_attn_bda.norm", "mlp_bda.norm"


def _norms(spec: ModelSpec) -> dict[str, str]:
    """The stored names of the norms of a layer, in its order."""
    if spec.norms == "before":
        return {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    if spec.norms == "after":
        return {_AFTER_ATTENTION: "post_attention_layernorm", _AFTER_MLP: "post_feedforward_layernorm"}
    if _family(spec).startswith("Gemma"):
        return {
            "input_layernorm": "input_layernorm",
            _AFTER_ATTENTION: "post_attention_layernorm",
            "pre_mlp_layernorm": "pre_feedforward_layernorm",
            _AFTER_MLP: "post_feedforward_layernorm",
        }
    return {
        "input_layernorm": "input_layernorm",
        _AFTER_ATTENTION: "post_self_attn_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        _AFTER_MLP: "post_mlp_layernorm",
    }


def has_stacks(spec: ModelSpec) -> bool:
    """True if transformers stores the transposed weights of all experts of a layer in stacks."""
    return spec.expert_bias or _family(spec) == "Llama4"


def _mlp_name(spec: ModelSpec) -> str:
    """The name of what follows attention in a layer."""
    return "feed_forward" if _family(spec) == "Llama4" else "mlp"


def _family(spec: ModelSpec) -> str:
    return spec.architecture.removesuffix("ForCausalLM").removesuffix("ForSequenceClassification")


def _rows_of(name: str, parts: Sequence[StoredTensor]) -> tuple[StoredTensor, ...]:
    """The parts as rows of one tensor, one behind the other."""
    ends = [*itertools.accumulate((part.shape[0] for part in parts), initial=0)]
    return tuple(
        StoredTensor(name, part.shape, first_row=first, total_rows=ends[-1])
        for part, first in zip(parts, ends[:-1], strict=True)
    )


def _experts_recipe(spec: ModelSpec, experts: Experts, layer: str, parameter: str) -> Recipe:
    """The recipe of a router's weight or bias, of a weight of the shared experts or their gate, or of one of the two
    weights of an expert."""
    mixtral = _family(spec) in _NAMED_AS_MIXTRAL
    block = f"{layer}.block_sparse_moe" if mixtral else f"{layer}.{_mlp_name(spec)}"
    if has_stacks(spec) and not parameter.startswith("mlp.shared_experts"):
        return _stacked_experts_recipe(spec, experts, block, parameter)
    bias_prefix = block if mixtral else f"{block}.gate"
    shared = f"{block}.shared_expert" if experts.shared_gate or has_stacks(spec) else f"{block}.shared_experts"
    whole = {
        "mlp.router.weight": _whole(f"{block}.gate.weight", experts.num_experts, spec.hidden_size),
        SELECTION_BIAS: _whole(f"{bias_prefix}.e_score_correction_bias", experts.num_experts),
        "mlp.shared_experts.gate_weight": _whole(f"{shared}_gate.weight", 1, spec.hidden_size),
    }
    if parameter in whole:
        return whole[parameter]
    module = parameter.rsplit(".", 1)[0]
    if module.startswith("mlp.shared_experts"):
        wide = (experts.shared_ffn_size, spec.hidden_size)
        if module.endswith("linear_fc1"):
            stored = tuple(StoredTensor(f"{shared}.{x}_proj.weight", wide) for x in ("gate", "up"))
            return Recipe(tensors=stored, axis=0)
        return Recipe(tensors=(StoredTensor(f"{shared}.down_proj.weight", wide[::-1]),), axis=1)
    match = _EXPERT.fullmatch(module)
    assert match, module
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    expert, wide = f"{block}.experts.{match[2]}", (experts.ffn_size, spec.hidden_size)
    if match[3] == "linear_fc1":
        return Recipe(tensors=tuple(StoredTensor(f"{expert}.{x}.weight", wide) for x in (gate, up)), axis=0)
    return Recipe(tensors=(StoredTensor(f"{expert}.{down}.weight", wide[::-1]),), axis=1)


def _stacked_experts_recipe(spec: ModelSpec, experts: Experts, block: str, parameter: str) -> Recipe:
    """The recipe of a router's weight or bias, or of an expert that is stored in stacks over all experts, with the rows
    of gate and up projection in turn (gpt-oss) or all rows of one behind those of the other (Llama 4)."""
    if parameter.startswith("mlp.router"):
        columns = (spec.hidden_size,) if parameter.endswith("weight") else ()
        return _whole(f"{block}.router.{parameter.rsplit('.', 1)[1]}", experts.num_experts, *columns)
    match = _EXPERT.match(parameter)
    assert match, parameter
    index, is_bias = int(match[2]), parameter.endswith("bias")
    suffix = "_bias" if is_bias else ""
    if match[3] == "linear_fc1":
        shape = (experts.ffn_size,) if is_bias else (experts.ffn_size, spec.hidden_size)
        name = f"{block}.experts.gate_up_proj{suffix}"
        is_interleaved = _family(spec) in _INTERLEAVED_GATES
        places = [Stacked(index, experts.num_experts, part, 2, is_interleaved) for part in (0, 1)]
        return Recipe(tensors=tuple(StoredTensor(name, shape, stacked=place) for place in places), axis=0)
    place = Stacked(index, experts.num_experts)
    name, shape = f"{block}.experts.down_proj{suffix}", (spec.hidden_size, experts.ffn_size)
    stored = StoredTensor(name, shape[:1] if is_bias else shape, stacked=place)
    return Recipe(tensors=(stored,), axis=None if is_bias else 1)


def _whole(name: str, *shape: int) -> Recipe:
    return Recipe(tensors=(StoredTensor(name, shape),), axis=None)


def parameters_of_stage(spec: ModelSpec, pp: int, stage: int, vpp: int = 1) -> tuple[str, ...]:
    """The parameters that pipeline stage `stage` of `pp` stores in a checkpoint; a tied head is stored as the
    embedding."""
    numbers = [number for layers in chunk_layers(spec, pp, stage, vpp) for number in layers]
    names = [f"decoder.layers.{number}.{name}" for number in numbers for name in _parameters_of_layer(spec, number)]
    if stage == 0:
        names.insert(0, EMBEDDING)
    if stage == pp - 1:
        names.append(FINAL_NORM)
        if spec.scalar_head or not spec.tied_embeddings:
            names.append(OUTPUT)
    return tuple(names)


def _parameters_of_layer(spec: ModelSpec, number: int) -> list[str]:
    """The parameters and constants that layer `number` of the whole model stores, without its prefix."""
    if spec.linear and spec.linear_layers_between(number, number + 1):
        layer = [*_delta_recipes(spec, spec.linear, "")]
    else:
        layer = _parameters_of_attention(spec)
    layer += [f"{norm}.weight" for norm in _norms(spec)]
    if not spec.experts or not spec.expert_layers_between(number, number + 1):
        return layer + _linear("mlp.linear_fc1", spec.mlp_bias) + _linear("mlp.linear_fc2", spec.mlp_bias)
    experts = [f"mlp.experts.local_experts.{expert}" for expert in range(spec.experts.num_experts)]
    layer += _linear("mlp.router", spec.expert_bias)
    if has_stacks(spec):  # stack by stack
        kinds = ("weight", "bias") if spec.expert_bias else ("weight",)
        layer += [f"{e}.linear_fc{i}.{kind}" for i in (1, 2) for kind in kinds for e in experts]
    else:
        layer += [f"{e}.linear_fc{i}.weight" for e in experts for i in (1, 2)]
    if spec.experts.router == "sigmoid":
        layer += [SELECTION_BIAS]
    if spec.experts.shared_ffn_size:
        layer += [f"mlp.shared_experts.{name}.weight" for name in ("linear_fc1", "linear_fc2")]
    if spec.experts.shared_gate:
        layer += ["mlp.shared_experts.gate_weight"]
    return layer


def _parameters_of_attention(spec: ModelSpec) -> list[str]:
    names = (
        [*_latent_recipes(spec, spec.latent, "")]
        if spec.latent
        else _linear("self_attention.linear_qkv", spec.qkv_bias)
    )
    names += _linear("self_attention.linear_proj", spec.output_bias)
    if spec.attention_sinks:
        names += [SINKS]
    if spec.qk_norm or spec.whole_qk_norm:
        names += [f"{norm}.weight" for norm in _QK_NORMS]
    return names


def starts_at_zero(spec: ModelSpec, parameter: str) -> bool:
    """True for a parameter that is not in the checkpoint and starts at zero: the scalar head of a model initialised
    from a language model, as `spec.architecture` says."""
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


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_MAX_BYTES = 2**42
"""Largest file that is opened; only the requested slices are read."""


class Header(NamedTuple):
    """The header of one tensor in a file."""

    shape: tuple[int, ...]
    dtype: str  # F32, BF16 and so on


_LANGUAGE_MODELS = {"model.language_model.": "model.", "language_model.": ""}
"""Prefixes of the names of a language model's tensors in a model of images and text, with what the names have in their
place in a model of text; the second is that of Llama 4."""


def _as_in_text_model(name: str) -> str:
    prefix = next((prefix for prefix in _LANGUAGE_MODELS if name.startswith(prefix)), "")
    return _LANGUAGE_MODELS.get(prefix, "") + name.removeprefix(prefix)


_PER_EXPERT = re.compile(r"(.+\.experts)\.([0-9]+)\.(gate|up|down)_proj\.weight")
_STACKS = {"gate": ("gate_up_proj", 0, 2), "up": ("gate_up_proj", 1, 2), "down": ("down_proj", 0, 1)}
"""For each weight of an expert: the stack that may hold it, its place among the weights of an expert in this stack, and
their number."""


class _ExpertInStack(NamedTuple):
    """The place of a weight of expert `number` in a stack: `place` of `num_weights` of each expert."""

    stack: str
    number: int
    place: int
    num_weights: int


def _in_stack(name: str) -> _ExpertInStack | None:
    """The place where a weight of an expert is stored if the experts are in stacks; None for any other tensor."""
    match = _PER_EXPERT.fullmatch(name)
    if not match:
        return None
    stack, place, num_weights = _STACKS[match[3]]
    return _ExpertInStack(f"{match[1]}.{stack}", int(match[2]), place, num_weights)


def unstack_experts(headers: Mapping[str, Header]) -> dict[str, Header]:
    """The headers, with one header for each weight of each expert in place of those of stacks."""
    unstacked = dict(headers)
    for name, (shape, dtype) in headers.items():
        block, _, kind = name.rpartition(".")
        weights = [weight for weight, (stack, _, _) in _STACKS.items() if stack == kind]
        if weights and block.endswith(".experts") and len(shape) == _STACK_AXES and not shape[1] % len(weights):
            del unstacked[name]
            header = Header((shape[1] // len(weights), shape[2]), dtype)
            unstacked |= {f"{block}.{n}.{weight}_proj.weight": header for n in range(shape[0]) for weight in weights}
    return unstacked


_STACK_AXES = 3
"""Axes of a stack: experts, rows and columns."""


class _Place(NamedTuple):
    """Where a tensor is stored: the name of the file, and its own name there."""

    file: str
    name: str


class TensorFiles:
    """A Hugging Face directory of safetensors, one file or several.

    In a model of images and text, the tensors of the language model have the names that they have in a model of text
    alone. Experts that are stored in stacks over all of them can be read one by one too.
    """

    def __init__(self, directory: Path, model: str) -> None:
        self._directory, self._model = directory, model
        self._open: dict[str, Any] = {}
        self._files = ExitStack()
        self._places = self._list_tensors()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, stored: StoredTensor, *, axis: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """The slice of `stored` [rows, ...] from `start` to `stop` along `axis`, shorter if the tensor ends before.

        Raises BadInput if there is no such tensor, or if it has another shape.
        """
        if stored.name not in self._places and (expert := _in_stack(stored.name)) and expert.stack in self._places:
            return self._read_expert(stored, expert, axis, start, stop)
        view = self._view(stored.name)
        shape = tuple(view.get_shape())
        if shape != stored.whole_shape:
            raise self._wrong_shape(stored.name, shape, stored.whole_shape)
        if stored.stacked:
            return _from_stack(view, stored, axis, start, stop)
        if stored.total_rows:
            assert axis == 0, stored
            start, stop = start + stored.first_row, stored.first_row + (stored.shape[0] if stop is None else stop)
        if len(shape) == 1:  # safetensors needs one slice per axis
            tensor: Tensor = view[start:stop]
        else:
            tensor = view[start:stop] if axis == 0 else view[:, start:stop]
        return tensor

    def _read_expert(
        self, stored: StoredTensor, expert: _ExpertInStack, axis: int, start: int, stop: int | None
    ) -> Tensor:
        """The slice of a weight [rows, columns] of one expert in a stack [experts, rows of all weights, columns]."""
        view, (rows, columns) = self._view(expert.stack), stored.shape
        shape = tuple(view.get_shape())
        needed = (max(expert.number + 1, shape[0]), expert.num_weights * rows, columns)
        if shape != needed:
            raise self._wrong_shape(expert.stack, shape, needed)
        first, number = expert.place * rows, expert.number
        if axis == 0:
            part: Tensor = view[number : number + 1, first + start : first + (rows if stop is None else stop)]
        else:
            part = view[number : number + 1, first : first + rows, start:stop]
        return part[0]

    def _view(self, name: str) -> Any:
        if name not in self._places:
            raise BadInput(
                f"checkpoint {self._directory} has no tensor {name!r}, which model {self._model} needs; "
                "give the weights that belong to its config.json."
            )
        place = self._places[name]
        return self._file(place.file).get_slice(place.name)

    def _wrong_shape(self, name: str, shape: tuple[int, ...], needed: tuple[int, ...]) -> BadInput:
        return BadInput(
            f"checkpoint {self._directory}: tensor {name!r} has shape {shape} and model {self._model} "
            f"needs {needed}; give the weights that belong to its config.json."
        )

    def headers(self) -> dict[str, Header]:
        """The header of every tensor in the files, by name; only headers are read.

        Raises BadInput for a file that cannot be read, and if the index names a tensor that its file does not have.
        """
        headers = {}
        for name in sorted({place.file for place in self._places.values()}):
            file = self._file(name)
            for tensor in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                view = file.get_slice(tensor)
                headers[_as_in_text_model(tensor)] = Header(tuple(view.get_shape()), view.get_dtype())
        for tensor, place in self._places.items():
            if tensor not in headers:
                raise BadInput(
                    f"checkpoint {self._directory}: {INDEX} says that {place.file} holds {place.name!r} and it does "
                    "not; give the files that belong together."
                )
        return headers

    def _list_tensors(self) -> dict[str, _Place]:
        """The place of each tensor, by its name in a model of text."""
        index = self._directory / INDEX
        if index.exists():
            stored = _read_index(index)
        elif (self._directory / SINGLE).exists():
            stored = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise BadInput(_no_weights(self._directory))
        places: dict[str, _Place] = {}
        for tensor, file in stored.items():
            name = _as_in_text_model(tensor)
            if name in places:
                raise BadInput(
                    f"checkpoint {self._directory} holds {places[name].name!r} and {tensor!r}, two tensors for one "
                    "parameter; remove the one that is not the model's."
                )
            places[name] = _Place(file, tensor)
        return places

    def _file(self, name: str) -> Any:
        if name not in self._open:
            require_file(self._directory / name, "checkpoint file", _MAX_BYTES)
            try:
                handle = self._files.enter_context(safe_open(self._directory / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise BadInput(f"checkpoint file {self._directory / name} cannot be read: {error}.") from None
            self._open[name] = handle
        return self._open[name]


def _from_stack(view: Any, stored: StoredTensor, axis: int, start: int, stop: int | None) -> Tensor:
    """The slice of one element of a stack [experts, (columns,) rows of all parts]."""
    assert stored.stacked is not None
    index, _, number, num_parts, interleaved = stored.stacked
    stop = stored.shape[axis] if stop is None else stop
    first, end = (start, stop) if axis == 0 else (0, stored.shape[0])  # of the rows
    if interleaved:
        columns, step = slice(num_parts * first, num_parts * end), num_parts
    else:
        columns, step = slice(number * stored.shape[0] + first, number * stored.shape[0] + end), 1
    if len(stored.shape) == 1:
        part: Tensor = view[index : index + 1, columns]
    elif axis == 0:
        part = view[index : index + 1, :, columns]
    else:
        part = view[index : index + 1, start:stop, columns]
    return part[0, ..., (number if interleaved else 0) :: step].t()


def _read_index(index: Path) -> dict[str, str]:
    """The file of each tensor from an index."""
    try:
        weight_map = json_value(read_text(index, "checkpoint index", MAX_JSON_BYTES), "it")["weight_map"]
        if not all(is_file_name(name) for name in weight_map.values()):
            raise ValueError("weight_map names a file outside its directory")
    except (BadInput, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).rstrip(".")
        raise BadInput(f"checkpoint index {index} cannot be read: {reason}; write the checkpoint again.") from None
    return dict(weight_map)


def _no_weights(directory: Path) -> str:
    if any(directory.glob("pytorch_model*.bin")):
        return (
            f"{directory} holds its weights as pytorch_model.bin, which can run code when it is read; save them as "
            "safetensors, with save_pretrained of transformers."
        )
    return (
        f"{directory} holds no weights: neither {SINGLE} nor {INDEX} is there; give a Hugging Face directory saved as "
        "safetensors."
    )
