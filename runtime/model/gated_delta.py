"""A gated delta layer (Qwen3-Next): projections, a convolution, the gated delta rule, and a norm with an output gate.

Megatron-core 0.16.1 has such a module, which needs flash-linear-attention to be built at all, and takes neither packed
rows nor a state to continue from.
https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/ssm/gated_delta_net.py

Tensor parallelism shards the key heads, each with the value heads that it serves. All projections of the input are one
linear, whose outputs are in the order of the key heads: query, key, and the values, output gates, step sizes and decays
of the value heads of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from meshwright.profiles.model_parts.linear_attention import LinearAttention
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.device import host
from meshwright.runtime.model.attention import Packing, shards_of_heads
from meshwright.runtime.model.delta_rule import (
    DeltaInputs,
    apply_in_chunks,
    apply_to_next,
    convolve_next,
    convolve_rows,
)
from meshwright.runtime.model.recurrent_states import RecurrentStates, StateRows


class GatedDelta(MegatronModule):
    """A gated delta layer, in place of a layer's attention."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        spec: ModelSpec,
        first_layer: int,
        **_: Any,
    ) -> None:
        """`layer_number` counts from 1 through the whole model; `first_layer` layers are on earlier stages.

        The ignored arguments are Megatron's for its own kinds of attention.
        """
        super().__init__(config)
        assert spec.linear is not None
        tp_group = pg_collection.tp
        self.sizes = spec.linear.shard(tp_group.size())
        self.index = spec.linear_layers_between(first_layer, layer_number - 1)
        """The number of earlier layers with a state on this stage."""
        self.tp_group = tp_group
        self._recomputes = config.recompute_granularity == "selective"
        (inputs, projected), (values, outputs) = spec.linear.linears(spec.hidden_size)
        options: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": tp_group,
        }
        self.linear_in = ColumnParallelLinear(inputs, projected, gather_output=False, **options)
        self.linear_proj = RowParallelLinear(values, outputs, input_is_parallel=True, **options)
        self.heads = _HeadParameters(self.sizes, config, tp_group)
        self.out_norm = _GatedNorm(self.sizes.value_dim, spec.norm_epsilon, config)

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: Packing, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The output [S, 1, hidden] for hidden states [S, 1, hidden], this rank's part of them with sequence
        parallelism, and no bias."""
        projected, _bias = self.linear_in(hidden_states)
        rows, cache, num_tokens = packed_seq_params.state_rows, packed_seq_params.cache, sum(packed_seq_params.sizes)
        assert rows is not None
        tokens = projected.squeeze(1)[:num_tokens]
        if cache is not None:
            assert cache.cache.states is not None
            mixed = self.continue_rows(tokens, rows, cache.cache.states)
        elif self._recomputes and self.training:
            mixed = checkpoint(lambda part: self._mix_rows(part, rows), False, tokens)
        else:
            mixed = self._mix_rows(tokens, rows)
        padded = F.pad(mixed, (0, 0, 0, len(projected) - num_tokens))
        output: tuple[Tensor, Tensor | None] = self.linear_proj(padded.unsqueeze(1))
        return output

    def continue_rows(self, projected: Tensor, rows: StateRows, kept: RecurrentStates) -> Tensor:
        """The gated outputs [S, values / tp] of packed rows [S, projections / tp] that continue their states, which are
        updated."""
        first = _State(kept.states[self.index, rows.slots], kept.inputs[self.index, rows.slots])
        # A row that starts does not read what an earlier one left in its slot, which may not be finite.
        starts = rows.starts
        first = _State(*(state.masked_fill(starts.view(-1, *(1,) * (state.dim() - 1)), 0.0) for state in first))
        parts = self._parts(projected)
        mixed, inputs = convolve_rows(parts.mixed, self.heads.conv_weight, rows.convolved, first.inputs)
        outputs, states = apply_in_chunks(self._delta_inputs(mixed, parts), rows.chunks, first.states)
        kept.states[self.index, rows.slots], kept.inputs[self.index, rows.slots] = states, inputs
        return self._gated(outputs, parts)

    def step(self, projected: Tensor, indices: Tensor, kept: RecurrentStates) -> Tensor:
        """The gated outputs [B, values / tp] of the next token [B, projections / tp] of each row, whose states at
        `indices` [B] are updated."""
        parts = self._parts(projected)
        states, inputs = kept.states[self.index], kept.inputs[self.index]
        mixed, last = convolve_next(parts.mixed, self.heads.conv_weight, inputs[indices])
        outputs, new = apply_to_next(self._delta_inputs(mixed, parts), states[indices])
        states.index_copy_(0, indices, new)
        inputs.index_copy_(0, indices, last)
        return self._gated(outputs, parts)

    def _mix_rows(self, projected: Tensor, rows: StateRows) -> Tensor:
        """The gated outputs [S, values / tp] of packed rows from their start."""
        parts = self._parts(projected)
        mixed, _ = convolve_rows(parts.mixed, self.heads.conv_weight, rows.convolved, None)
        outputs, _ = apply_in_chunks(self._delta_inputs(mixed, parts), rows.chunks, None)
        return self._gated(outputs, parts)

    def _parts(self, projected: Tensor) -> _Parts:
        sizes = self.sizes
        repeats = sizes.num_value_heads // sizes.num_key_heads
        values = repeats * sizes.value_dim
        by_head = projected.unflatten(-1, (sizes.num_key_heads, -1))
        mixed, gate, step, decay = by_head.split((2 * sizes.key_dim + values, values, repeats, repeats), dim=-1)
        return _Parts(mixed.flatten(1), gate.unflatten(-1, (repeats, -1)), step, decay)

    def _delta_inputs(self, mixed: Tensor, parts: _Parts) -> DeltaInputs:
        """The heads of the delta rule from convolved inputs [S, channels]."""
        sizes = self.sizes
        repeats = sizes.num_value_heads // sizes.num_key_heads
        activated = self.config.activation_func(mixed).unflatten(-1, (sizes.num_key_heads, -1))
        query, key, value = activated.split((sizes.key_dim, sizes.key_dim, repeats * sizes.value_dim), dim=-1)
        rate = self.heads.log_rate.float().exp().view(sizes.num_key_heads, repeats)
        bias = self.heads.decay_bias.view(sizes.num_key_heads, repeats)
        log_decay = -rate * F.softplus(parts.decay.float() + bias)
        return DeltaInputs(query, key, value.unflatten(-1, (repeats, -1)), log_decay, parts.step.sigmoid())

    def _gated(self, outputs: Tensor, parts: _Parts) -> Tensor:
        """The outputs [S, key heads, value heads of each, V] normalised in every head and gated, [S, values / tp]."""
        # Every rank has its own heads, and so a part of the gradient of the norm that all heads share.
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tp_group)
        return self.out_norm(outputs.to(parts.gate.dtype), parts.gate, weight).flatten(1)


class _State(NamedTuple):
    """The states of rows and their last inputs of the convolution, as in `RecurrentStates`."""

    states: Tensor
    inputs: Tensor


class _Parts(NamedTuple):
    """Projections of S tokens, by key head."""

    mixed: Tensor
    """Queries, keys and values, which are convolved, [S, channels]."""
    gate: Tensor
    """[S, key heads, value heads of each, V]."""
    step: Tensor
    """[S, key heads, value heads of each]; `decay` likewise."""
    decay: Tensor


class _HeadParameters(nn.Module):
    """The parameters of this rank's heads besides the projections."""

    def __init__(self, sizes: LinearAttention, config: TransformerConfig, tp_group: Any) -> None:
        super().__init__()
        self.tp_group = tp_group
        place = {"device": host.device(), "dtype": config.params_dtype}
        self.conv_weight = nn.Parameter(torch.empty(sizes.conv_size, 1, sizes.conv_kernel, **place))
        """[channels / tp, 1, kernel], channels in the order of the projections."""
        with get_cuda_rng_tracker().fork():  # ranks have different channels
            config.init_method(self.conv_weight)
        self.log_rate = nn.Parameter(torch.zeros(sizes.num_value_heads, **place))
        """The logarithm of the factor of the decay, [value heads / tp]; `decay_bias` likewise."""
        self.decay_bias = nn.Parameter(torch.ones(sizes.num_value_heads, **place))
        for parameter in self.parameters():
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def sharded_state_dict(self, *places: Any, **options: Any) -> dict[str, Any]:
        """The state for a checkpoint."""
        return shards_of_heads(self, self.tp_group, *places, **options)


class _GatedNorm(nn.Module):
    """Root-mean-square norm of each head, with one weight for all heads, times a gate; the weight is not offset."""

    def __init__(self, size: int, epsilon: float, config: TransformerConfig) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(size, device=host.device(), dtype=config.params_dtype))

    def forward(self, heads: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """`heads` [..., V] normalised, times `weight` [V] and the SiLU of `gate` [..., V]."""
        normed = weight * F.rms_norm(heads.float(), weight.shape, None, self.epsilon).to(heads.dtype)
        return (normed * F.silu(gate.float())).to(heads.dtype)
