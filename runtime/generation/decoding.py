"""One more token for every row: a decoder's forward pass on single tokens, straight on the weights of its modules.

A decode step of a small batch is so little arithmetic that megatron's modules around it would take most of its time,
and attention over a paged cache needs no copy of keys and values when blocks meet the queries of their rows. The
numbers are those of the modules, which prefill and training go through; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.runtime.model.adapted import AdaptedColumns, AdaptedRows
from meshwright.runtime.model.block_attention import BlockAttention
from meshwright.runtime.model.block_reads import BlockReads
from meshwright.runtime.model.kv_cache import PagedCache
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.padded_attention import PaddedAttention, is_small
from meshwright.runtime.model.quantised import QuantisedWeight


class Decoding(Protocol):
    """A pipeline stage's part of the decode steps, one more token for every row of a group in each."""

    def begin_turn(self) -> None:
        """To be called before the steps of a turn: weights may have moved since the last."""

    def __call__(self, inputs: Tensor, reads: BlockReads) -> Tensor:
        """Logits [B, V / tp] of the padded vocabulary on the last stage, hidden states [B, hidden] before it.

        `inputs` are tokens [B] on the first stage and the hidden states of the earlier stage after it; `reads` is
        what of the cache they read.
        """


class DecodeStep:
    """Decode steps on the model's own parameters, so that refits are seen."""

    def __init__(self, model: Decoder, mesh: Mesh, cache: PagedCache) -> None:
        """For a language model without sequence parallelism, whose keys and values are in `cache`."""
        assert not model.config.sequence_parallel
        assert not model.spec.scalar_head
        self._model, self._mesh, self.cache = model, mesh, cache
        self._layers = [_Layer(layer, model, mesh) for layer in model.decoder.layers]
        cos, sin = model.rotary.table(cache.max_tokens, next(model.parameters()))
        low, high = sin.chunk(2, dim=-1)
        self._cos, self._sin = cos, torch.cat((-low, high), dim=-1)
        """The sine of the low half is negated: a head is turned by x cos + (x with its halves swapped) sin."""

    def begin_turn(self) -> None:
        """Nothing to do: a parameter that moved is still the same parameter."""

    @torch.inference_mode()
    def __call__(self, inputs: Tensor, reads: BlockReads) -> Tensor:
        reads = reads.to(inputs.device)
        cache = (PaddedAttention if is_small(self.cache, reads) else BlockAttention)(self.cache, reads)
        hidden = self._embed(inputs) if self._mesh.is_first_stage else inputs
        cos, sin = self._cos[reads.lengths], self._sin[reads.lengths]
        for index, layer in enumerate(self._layers):
            hidden = layer.attend(hidden, cos, sin, index, cache)
            hidden = layer.feed_forward(hidden)
        if not self._mesh.is_last_stage:
            return hidden
        tied = self._model.share_embeddings_and_output_weights
        weight = self._model.shared_embedding_or_output_weight() if tied else self._model.output_layer.weight
        return F.linear(self._model.decoder.final_layernorm(hidden), weight)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [B, hidden] of tokens [B]."""
        if self._mesh.layout.tp == 1 and self._model.spec.embedding_scale == 1.0:
            return F.embedding(tokens, self._model.embedding.word_embeddings.weight)
        return self._model.embedding(tokens.unsqueeze(1), None).squeeze(0)


class _Layer:
    """One transformer layer on hidden states [B, hidden]."""

    def __init__(self, layer: Any, model: Decoder, mesh: Mesh) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        group = mesh.groups.tp if mesh.layout.tp > 1 else None
        per_group = model.spec.num_heads // model.spec.num_kv_heads + 2
        self._qkv_shape = (-1, model.spec.num_kv_heads // mesh.layout.tp, per_group, model.spec.head_dim)
        self._input_norm, self._mlp_norm = layer.input_layernorm.forward, layer.pre_mlp_layernorm.forward
        self._query_norm, self._key_norm = attention.q_layernorm, attention.k_layernorm
        self._qkv, self._projection = _Spreading(attention.linear_qkv), _Joining(attention.linear_proj, group)
        self._experts: Callable[[Tensor], tuple[Tensor, None]] | None = mlp if model.spec.experts else None
        if not model.spec.experts:
            self._up, self._down = _Spreading(mlp.linear_fc1), _Joining(mlp.linear_fc2, group)
        self._activation: Callable[[Tensor], Tensor] = model.config.activation_func

    def attend(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, index: int, cache: BlockAttention | PaddedAttention
    ) -> Tensor:
        """`hidden` after the attention of layer `index` of this stage; cos and sin [B, 1, 1, D] of the new tokens."""
        # Megatron lays out the queries of a group, then its key, then its value.
        mixed = self._qkv(self._input_norm(hidden)).view(self._qkv_shape)
        turning = mixed[:, :, :-1]
        if self._query_norm is not None:
            turning = torch.cat([self._query_norm(turning[:, :, :-1]), self._key_norm(turning[:, :, -1:])], dim=2)
        turned = torch.addcmul(turning * cos, turning.roll(turning.shape[-1] // 2, -1), sin)
        attended = cache.attend(index, turned[:, :, :-1], turned[:, :, -1], mixed[:, :, -1])
        return self._projection.add_to(hidden, attended.flatten(1))

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """`hidden` after the gated MLP, or after megatron's own layer of experts."""
        if self._experts is not None:
            return hidden + self._experts(self._mlp_norm(hidden).unsqueeze(0))[0].squeeze(0)
        gate, linear = self._up(self._mlp_norm(hidden)).chunk(2, dim=-1)
        return self._down.add_to(hidden, self._activation(gate) * linear)


class _Spreading:
    """A linear that is cut along its output."""

    def __init__(self, module: Any) -> None:
        self._weight, self._bias, self._adapter = module.weight, module.bias, _adapter_of(module)

    def __call__(self, inputs: Tensor) -> Tensor:
        if isinstance(self._weight, QuantisedWeight):
            output = self._weight.multiply(inputs)
            return output if self._bias is None else output + self._bias
        output = F.linear(inputs, self._weight, self._bias)
        return self._adapter.add_to(output, inputs) if self._adapter else output


class _Joining:
    """A linear that is cut along its input: its output is summed over the tensor-parallel ranks, and with it that of
    its adapter, which megatron's modules sum before its second product."""

    def __init__(self, module: Any, group: dist.ProcessGroup | None) -> None:
        self._weight, self._bias, self._adapter = module.weight, module.bias, _adapter_of(module)
        self._group = group

    def add_to(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        if self._group is None and not isinstance(self._weight, QuantisedWeight):
            output = torch.addmm(hidden, inputs, self._weight.t())
            output = self._adapter.add_to(output, inputs) if self._adapter else output
        else:
            output = self._product(inputs)
            output = self._adapter.add_to(output, inputs) if self._adapter else output
            if self._group is not None:
                dist.all_reduce(output, group=self._group)
            output += hidden
        return output if self._bias is None else output + self._bias

    def _product(self, inputs: Tensor) -> Tensor:
        weight = self._weight
        return weight.multiply(inputs) if isinstance(weight, QuantisedWeight) else F.linear(inputs, weight)


class _Adapter:
    """The low-rank product beside a linear, this rank's part of it."""

    def __init__(self, module: AdaptedColumns | AdaptedRows) -> None:
        self._down, self._up, self._scale = module.adapter_down, module.adapter_up, module.adapter.scale

    def add_to(self, output: Tensor, inputs: Tensor) -> Tensor:
        return torch.add(output, F.linear(F.linear(inputs, self._down), self._up), alpha=self._scale)


def _adapter_of(module: Any) -> _Adapter | None:
    return _Adapter(module) if isinstance(module, AdaptedColumns | AdaptedRows) else None
