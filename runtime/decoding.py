"""One more token for every row: a decoder's forward pass on single tokens, straight on the weights of its modules.

A decode step of a small batch is so little arithmetic that megatron's modules around it would take most of its time,
and attention over a slot cache needs no copy of keys and values when the heads of a group are laid side by side. The
numbers are those of the modules, which prefill and training go through; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.runtime.attention import rotate
from meshwright.runtime.kv_cache import DecodeView
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.models import Decoder


class DecodeStep:
    """A pipeline stage's part of a decode step. Weights are read where the model keeps them, so refits are seen."""

    def __init__(self, model: Decoder, mesh: Mesh, max_tokens: int) -> None:
        """For a language model without sequence parallelism; no row becomes longer than `max_tokens`."""
        assert not model.config.sequence_parallel
        assert not model.spec.scalar_head
        self._model, self._mesh = model, mesh
        self._layers = [_Layer(layer, model, mesh) for layer in model.decoder.layers]
        self._cos, self._sin = model.rotary.table(max_tokens, next(model.parameters()))

    def __call__(self, inputs: Tensor, cache: DecodeView) -> Tensor:
        """Logits [B, V / tp] of the padded vocabulary on the last stage, hidden states [B, hidden] before it.

        `inputs` are tokens [B] on the first stage and the hidden states of the earlier stage after it.
        """
        hidden = self._model.embedding(inputs.unsqueeze(1), None).squeeze(0) if self._mesh.is_first_stage else inputs
        cos, sin = self._cos[cache.positions], self._sin[cache.positions]
        for index, layer in enumerate(self._layers):
            hidden = layer.attend(hidden, cos, sin, index, cache)
            hidden = layer.feed_forward(hidden)
        if not self._mesh.is_last_stage:
            return hidden
        tied = self._model.share_embeddings_and_output_weights
        weight = self._model.shared_embedding_or_output_weight() if tied else self._model.output_layer.weight
        return F.linear(self._model.decoder.final_layernorm(hidden), weight)


class _Layer:
    """One transformer layer on hidden states [B, hidden]."""

    def __init__(self, layer: Any, model: Decoder, mesh: Mesh) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        self._group = mesh.groups.tp if mesh.layout.tp > 1 else None
        self._num_groups = model.spec.num_kv_heads // mesh.layout.tp
        self._head_dim = model.spec.head_dim
        self._input_norm, self._mlp_norm = layer.input_layernorm, layer.pre_mlp_layernorm
        self._query_norm, self._key_norm = attention.q_layernorm, attention.k_layernorm
        self._qkv, self._projection = attention.linear_qkv, attention.linear_proj
        self._up, self._down = mlp.linear_fc1, mlp.linear_fc2
        self._activation: Callable[[Tensor], Tensor] = model.config.activation_func

    def attend(self, hidden: Tensor, cos: Tensor, sin: Tensor, index: int, cache: DecodeView) -> Tensor:
        """`hidden` after the attention of layer `index` of this stage; cos and sin [B, 1, 1, D] of the new tokens."""
        # Megatron lays out the queries of a group, then its key, then its value.
        mixed = F.linear(self._input_norm(hidden), self._qkv.weight, self._qkv.bias)
        mixed = mixed.view(len(hidden), self._num_groups, -1, self._head_dim)
        turning = mixed[:, :, :-1]
        if self._query_norm is not None:
            turning = torch.cat([self._query_norm(turning[:, :, :-1]), self._key_norm(turning[:, :, -1:])], dim=2)
        turned = rotate(turning, cos, sin)
        keys, values = cache.extend(index, turned[:, :, -1], mixed[:, :, -1])
        attended = F.scaled_dot_product_attention(turned[:, :, :-1], keys, values, attn_mask=cache.mask)
        return hidden + self._joined(self._projection, attended.reshape(len(hidden), -1))

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """`hidden` after the gated MLP."""
        gate, linear = F.linear(self._mlp_norm(hidden), self._up.weight, self._up.bias).chunk(2, dim=-1)
        return hidden + self._joined(self._down, self._activation(gate) * linear)

    def _joined(self, module: Any, inputs: Tensor) -> Tensor:
        """A linear that is cut along its input, summed over the tensor-parallel ranks."""
        if self._group is None:
            return F.linear(inputs, module.weight, module.bias)
        output = F.linear(inputs, module.weight)
        dist.all_reduce(output, group=self._group)
        return output if module.bias is None else output + module.bias
