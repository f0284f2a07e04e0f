"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): projections, and attention over the cache.

A head has a part that is not rotated and one that is. Both are kept in the order in which other models' heads are
rotated: the rotated pairs are the first elements of the two halves of a head, and the others, whose angle is always 0,
follow them. `runtime.model.hf_checkpoint` brings the weights into this order, of which scores do not depend.

In passes without a cache the heads of keys and values are expanded from the latent vector. The cache holds the latent
vector and the rotary key, in the same order, as the only key of a token and once more as its value. Queries are
multiplied by the up-projection of the keys first, and the outputs by that of the values (there: equations 45 to 47).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules, MultiLatentAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from meshwright.profiles.experts import LatentAttention
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.device import host
from meshwright.runtime.model.attention import CoreAttention, Packing

_EPSILON = 1e-6
"""Epsilon of the norms of latent vectors, whatever that of the other norms is, as in transformers."""


class LatentSelfAttention(MultiLatentAttention):
    """Megatron's latent attention with projections to the latent vectors that are whole on every rank.

    Megatron's own have whole ones with Transformer Engine only, and shard them otherwise, gathering their outputs over
    a group of its global state.
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/multi_latent_attention.py#L577
    """

    def __init__(
        self,
        *,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        spec: ModelSpec,
    ) -> None:
        super().__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        assert spec.latent is not None
        self.spec, self.latent, hidden = spec, spec.latent, spec.hidden_size
        queries, expanded = spec.num_heads * spec.head_dim, spec.num_heads * (self.latent.nope_dim + spec.value_dim)
        rank = self.latent.query_rank
        if rank:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, rank)
            self.q_layernorm = submodules.q_layernorm(config, rank, _EPSILON)
            self.linear_q_up_proj = self._columns(rank, queries)
        else:
            self.linear_q_proj = self._columns(hidden, queries)
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, self.latent.vector_size)
        self.kv_layernorm = submodules.kv_layernorm(config, self.latent.kv_rank, _EPSILON)
        self.linear_kv_up_proj = self._columns(self.latent.kv_rank, expanded)

    def _columns(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )

    @property
    def up_weight(self) -> Tensor:
        """The up-projection of the keys and values of this rank's heads, [heads / tp, key + value elements, latent]."""
        weight: Tensor = self.linear_kv_up_proj.weight
        return weight.view(-1, self.latent.nope_dim + self.latent.value_dim, self.latent.kv_rank)

    def forward(self, hidden_states: Tensor, *args: Any, packed_seq_params: Packing, **options: Any) -> Any:
        """The output [S, B, hidden] for hidden states [S, B, hidden], and no bias."""
        if packed_seq_params.cache is None:
            return super().forward(hidden_states, *args, packed_seq_params=packed_seq_params, **options)
        query, latent, rotary_key = self._projections(hidden_states)
        if self.config.sequence_parallel:
            latent = gather_from_sequence_parallel_region(latent, group=self.tp_group)
        vector = cached_vector(latent, rotary_key).unsqueeze(2)
        query = absorb_keys(query, self.up_weight, self.latent)
        attended = self.core_attention(query, vector, vector, packed_seq_params=packed_seq_params)
        return self.linear_proj(self.expand_output(attended))

    def project_into(self, heads: Tensor, hidden: Tensor) -> None:
        """Write the queries of hidden states [B, hidden] for the heads of the cache, and the vector that is cached as
        key and as value, to `heads` [B, 1, heads / tp + 2, latent + rotary]; without sequence parallelism."""
        if self.latent.query_rank:
            compressed = self.q_layernorm(self.linear_q_down_proj(hidden))
            query = F.linear(compressed, self.linear_q_up_proj.weight)
        else:
            query = F.linear(hidden, self.linear_q_proj.weight)
        latent, rotary_key = self.linear_kv_down_proj(hidden).split((self.latent.kv_rank, self.latent.rope_dim), -1)
        query = query.unflatten(-1, (-1, self.spec.head_dim))
        heads[:, 0, :-2] = absorb_keys(query, self.up_weight, self.latent)
        heads[:, 0, -2:] = cached_vector(self.kv_layernorm(latent), rotary_key).unsqueeze(1)

    def expand_output(self, attended: Tensor) -> Tensor:
        """Values [B, heads / tp * value elements] from the output of attention over the cache, [B, heads / tp * (latent
        + rotary)]."""
        by_head = attended.unflatten(-1, (-1, self.latent.vector_size))
        return expand_values(by_head, self.up_weight, self.latent).flatten(-2)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Queries and keys [S, B, heads / tp, D] and values [S, B, heads / tp, value elements], not yet rotated."""
        query, latent, rotary_key = self._projections(hidden_states)
        expanded, _bias = self.linear_kv_up_proj(latent)
        heads = expanded.unflatten(-1, (-1, self.latent.nope_dim + self.latent.value_dim))
        plain, value = heads.split((self.latent.nope_dim, self.latent.value_dim), dim=-1)
        rotary = rotary_key.unsqueeze(2).expand(*plain.shape[:3], -1)
        return query, _by_halves(rotary, plain), value, None, None

    def _projections(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [S, B, heads / tp, D], and the latent vectors [S, B, latent] and rotary keys [S, B, rotary] of
        tokens; with sequence parallelism the latent vectors are those of this rank's tokens."""
        if self.latent.query_rank:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        else:
            query, _ = self.linear_q_proj(hidden)
        latent, rotary_key = self.linear_kv_down_proj(hidden).split((self.latent.kv_rank, self.latent.rope_dim), -1)
        # Each rank's heads give a part of the gradient of the rotary key, which they share.
        if self.config.sequence_parallel:
            rotary_key = gather_from_sequence_parallel_region(rotary_key, group=self.tp_group)
        else:
            rotary_key = copy_to_tensor_model_parallel_region(rotary_key, group=self.tp_group)
        return query.unflatten(-1, (-1, self.spec.head_dim)), self.kv_layernorm(latent), rotary_key


class LatentCoreAttention(CoreAttention):
    """Attention whose values have fewer elements than its keys: kernels are given values of the same size."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Packing, **__: Any
    ) -> Tensor:
        """The output [S, 1, heads * value elements] for query and key [S, 1, heads, D] and value [S, 1, heads, value
        elements]."""
        size, value_size = query.shape[-1], value.shape[-1]
        padded = F.pad(value, (0, size - value_size))
        attended = super().forward(query, key, padded, packed_seq_params=packed_seq_params)
        return attended.unflatten(-1, (-1, size))[..., :value_size].flatten(2)


class ReplicatedLinear(nn.Module):
    """A linear without bias whose weight is whole on every tensor-parallel rank.

    With sequence parallelism a rank passes its tokens through it, and Megatron sums the gradients over the ranks.
    """

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=host.device(), dtype=config.params_dtype))
        config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs [..., outputs] for inputs [..., inputs]."""
        return F.linear(inputs, self.weight)


def absorb_keys(query: Tensor, up_weight: Tensor, latent: LatentAttention) -> Tensor:
    """Queries [..., heads, key elements + rotary] for the heads of the cache, [..., heads, latent + rotary].

    They are multiplied by the up-projection of the keys, in `up_weight` [heads, key + value elements, latent], and
    scaled so that scores over the square root of the new size are those of heads of the old one.
    """
    rotary, plain = _from_halves(query, latent.rope_dim)
    absorbed = torch.einsum("...hn,hnr->...hr", plain, up_weight[:, : latent.nope_dim])
    return _by_halves(rotary, absorbed) * math.sqrt(latent.vector_size / query.shape[-1])


def cached_vector(vector: Tensor, rotary_key: Tensor) -> Tensor:
    """The cached vectors of tokens: [..., latent + rotary] from their latent vector [..., latent] and rotary key [...,
    rotary]."""
    return _by_halves(rotary_key, vector)


def expand_values(attended: Tensor, up_weight: Tensor, latent: LatentAttention) -> Tensor:
    """Heads [..., heads, value elements] of the output of attention over the cache [..., heads, latent + rotary], by
    the up-projection of the values in `up_weight` [heads, key + value elements, latent]."""
    _, vector = _from_halves(attended, latent.rope_dim)
    return torch.einsum("...hr,hvr->...hv", vector, up_weight[:, latent.nope_dim :])


def _by_halves(rotary: Tensor, plain: Tensor) -> Tensor:
    """Heads [..., rotary + plain elements] in the order in which they are rotated."""
    (first, second), (low, high) = rotary.chunk(2, dim=-1), plain.chunk(2, dim=-1)
    return torch.cat((first, low, second, high), dim=-1)


def _from_halves(heads: Tensor, num_rotary: int) -> tuple[Tensor, Tensor]:
    """The rotary part and the other one of heads [..., rotary + plain elements]; the inverse of `_by_halves`."""
    low, high = heads.chunk(2, dim=-1)
    pairs = num_rotary // 2
    return torch.cat((low[..., :pairs], high[..., :pairs]), -1), torch.cat((low[..., pairs:], high[..., pairs:]), -1)
