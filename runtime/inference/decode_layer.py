"""A transformer layer for decode steps: it computes on the weights of megatron's modules in as few operations as
possible.

For a small batch, calling an operation costs more than computing it, and a view costs as much as an operation. So a
layer computes into scratch tensors that all layers share, whose views are made once for each number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from meshwright.runtime.model.adapters import AdaptedColumnParallelLinear, AdaptedRowParallelLinear
from meshwright.runtime.model.attention import has_local_angles, normalise_heads, score_scale
from meshwright.runtime.model.fp8_linears import QuantisedWeight
from meshwright.runtime.model.gated_delta import GatedDelta
from meshwright.runtime.model.latent_attention import LatentSelfAttention
from meshwright.runtime.model.layers import Residual, RMSNorm, WholeNorm
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder

_CPU_CACHE_BYTES = 2**23
"""Bytes of weights that stay in a core's share of the last-level cache from step to step: on an AMD EPYC 9004 with 2
cores 6 MB stayed and 12 MB did not, measured on 2026-11-25."""

_READ_AHEAD_BYTES = 2**19
"""Bytes of a weight that are read ahead at a time: half of a core's second-level cache, so that the product finds them
there. On an AMD EPYC 9004 pieces of up to 1 MB were found there, and a weight of 4 MB in one piece was not, measured on
2026-11-26."""


class StepAttention(Protocol):
    """Attention over the KV cache during a decode step, which applies the rotary embedding itself."""

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Return [B, heads * D] from queries, key and value [B, kv_heads, heads / kv_heads + 2, D] as projected,
        without rotary embedding; the new keys and values are cached."""


class StepStates(Protocol):
    """The layers with a state of a stage during a decode step, numbered among themselves."""

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Return the gated outputs [B, values / tp] of a layer for its projections [B, projections / tp] of the next
        tokens; the states are updated."""


class RotatedAttention(Protocol):
    """Attention over the KV cache during a decode step, on inputs that already have the rotary embedding."""

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        """Return [B, heads * D] from the new queries [B, kv_heads, heads / kv_heads, D]; the new keys and values [B,
        kv_heads, 2, D] are cached."""


class Scratch:
    """Tensors that a layer computes in for B rows, between its input and its output hidden states."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the tensors that `allocate_scratch` makes, by name."""
        self._tensors = tensors
        self.num_rows = len(tensors["normed"])
        self.norms, self.normed = tensors["norms"], tensors["normed"]
        # Megatron's order for each KV head: its queries, its key, its value.
        self.heads, self.rotated = tensors["heads"], tensors["rotated"]
        self.projected = self.heads.flatten(1)
        self.query, self.new = self.rotated[:, :, :-2], self.rotated[:, :, -2:]
        self.angles = [_Angles(self, tensors[name]) for name in ("angles", "local_angles") if name in tensors]
        """The rotary angles of all layers, or of those without and with a sliding window."""
        if "up" in tensors:
            self.up = tensors["up"]
            self.gate, self.linear = self.up.chunk(2, dim=-1)
        self.gated = tensors.get("gated")
        self.state_inputs = tensors.get("state_inputs")
        """Projections of a layer with a state."""
        self.with_gates = tensors.get("with_gates")
        """The projected heads if attention has an output gate: for each KV head its queries, their gates, its key and
        its value."""

    def first_rows(self, num_rows: int) -> Scratch:
        """A view on the first `num_rows` rows."""
        return Scratch({name: tensor[:num_rows] for name, tensor in self._tensors.items()})

    def set_angles(self, angles: Sequence[Tensor]) -> None:
        """Copy in the rotary angles of the new tokens [B, 2, D], of each kind of layer: cos, and sin with its low half
        negated."""
        for target, source in zip(self.angles, angles, strict=True):
            target.copy_in(source)


class _Angles:
    """Rotary angles of the new tokens, and the views by which they rotate the heads of a scratch."""

    def __init__(self, scratch: Scratch, angles: Tensor) -> None:
        """Takes angles [B, 2, heads / kv_heads + 2, D] whose cosines of values are 1: these are not rotated."""
        self._angles, self.cos = angles[:, :, :-1], angles[:, :1]
        low_sin, high_sin = angles[:, 1:, :-1].chunk(2, dim=-1)
        targets = scratch.rotated[:, :, :-1].chunk(2, dim=-1)
        low, high = scratch.heads[:, :, :-1].chunk(2, dim=-1)
        self.halves = (targets[0], high, low_sin), (targets[1], low, high_sin)
        """Each half of the rotated heads, with the half of the projected heads and the sines whose product is added to
        it: x cos + (x with its halves swapped) sin."""

    def copy_in(self, angles: Tensor) -> None:
        """Copy in angles [B, 2, D]."""
        self._angles.copy_(angles.unsqueeze(2))


class RotaryAttention:
    """Applies the rotary embedding, whose angles are in the scratch tensors, and then attends."""

    def __init__(
        self,
        scratch: Scratch,
        attention: RotatedAttention,
        kinds: Sequence[int | None],
        *,
        norm_epsilon: float | None = None,
        query_scales: Tensor | None = None,
    ) -> None:
        """`kinds` has for each layer the index of its angles in the scratch; None for no rotary embedding. With a
        `norm_epsilon` rotated queries and keys are normalised; `query_scales` [B] multiply queries that are not
        rotated."""
        self._scratch, self._attention, self._kinds = scratch, attention, kinds
        self._norm_epsilon, self._query_scales = norm_epsilon, query_scales

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Return [B, heads * D], as `StepAttention.attend` does."""
        scratch, kind = self._scratch, self._kinds[layer]
        if kind is None:
            scratch.rotated.copy_(heads)
            if self._query_scales is not None:
                scratch.query.mul_(self._query_scales.view(-1, 1, 1, 1))
            return self._attention.attend(layer, scratch.query, scratch.new)
        angles = scratch.angles[kind]
        torch.mul(heads, angles.cos, out=scratch.rotated)
        for half, swapped, sin in angles.halves:
            half.addcmul_(swapped, sin)
        if self._norm_epsilon is not None:
            queries_and_key = scratch.rotated[:, :, :-1]
            queries_and_key.copy_(normalise_heads(queries_and_key, self._norm_epsilon))
        return self._attention.attend(layer, scratch.query, scratch.new)


def allocate_scratch(num_rows: int, model: Decoder, mesh: Mesh) -> Scratch:
    """Allocate scratch tensors for `num_rows` rows."""
    spec, like = model.spec, next(model.parameters())
    kv_heads, queries, size = spec.cached_heads(mesh.layout.tp)
    per_group = queries + 2
    tensors = {
        "norms": like.new_empty(num_rows, 1),
        "normed": like.new_empty(num_rows, spec.hidden_size),
        "heads": like.new_empty(num_rows, kv_heads, per_group, size),
        "rotated": like.new_empty(num_rows, kv_heads, per_group, size),
        "angles": like.new_ones(num_rows, 2, per_group, size),
    }
    if has_local_angles(spec):
        tensors["local_angles"] = like.new_ones(num_rows, 2, per_group, size)
    if spec.linear:
        (_, width), _ = spec.linear.shard(mesh.layout.tp).linears(spec.hidden_size)
        tensors["state_inputs"] = like.new_empty(num_rows, width)
    if spec.attention_gate:
        tensors["with_gates"] = like.new_empty(num_rows, kv_heads, 2 * queries + 2, size)
    if spec.num_dense_layers:
        width = spec.ffn_size // mesh.layout.tp
        tensors["up"] = like.new_empty(num_rows, 2 * width)
        if model.kernels.decode == "paged":
            tensors["gated"] = like.new_empty(num_rows, width)
    return Scratch(tensors)


class DecodeLayer:
    """One transformer layer on hidden states [B, hidden], which it updates in place."""

    def __init__(self, layer: Any, model: Decoder, mesh: Mesh) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        group = mesh.groups.tp if mesh.layout.tp > 1 else None
        by_kernel = model.kernels.decode == "paged"
        self._input_norm = _norm_before(layer.input_layernorm, by_kernel=by_kernel)
        self._mlp_norm = _norm_before(layer.pre_mlp_layernorm, by_kernel=by_kernel)
        self._attention_residual = layer.self_attn_bda if isinstance(layer.self_attn_bda, Residual) else None
        self._mlp_residual = layer.mlp_bda if isinstance(layer.mlp_bda, Residual) else None
        self._score_scale = score_scale(model.spec)
        self._latent = attention if isinstance(attention, LatentSelfAttention) else None
        self._projection = _RowParallel(attention.linear_proj, group)
        self.has_state = isinstance(attention, GatedDelta)
        self._experts: Callable[[Tensor], tuple[Tensor, None]] | None = mlp if isinstance(mlp, MoELayer) else None
        self.linears: list[_Linear] = [self._projection]
        if self.has_state:
            self._state_inputs = _ColumnParallel(attention.linear_in)
            self.linears.append(self._state_inputs)
        elif self._latent is None:
            self._query_norm, self._key_norm = attention.q_layernorm, attention.k_layernorm
            self._qkv = _ColumnParallel(attention.linear_qkv)
            self.linears.append(self._qkv)
        if self._experts is None:
            self._up, self._down = _ColumnParallel(mlp.linear_fc1), _RowParallel(mlp.linear_fc2, group)
            self.linears += [self._up, self._down]
        self._is_silu = model.spec.activation == "silu"
        self._activation: Callable[[Tensor], Tensor] = model.config.activation_func
        self._multiply_gates = _gate_kernel() if self._is_silu and by_kernel else None

    def refresh_weights(self) -> None:
        """Look up the weights again: they may have been updated or moved."""
        for norm in (self._input_norm, self._mlp_norm):
            if norm is not None:
                norm.refresh_weight()
        for linear in self.linears:
            linear.refresh_weight()

    def attend(self, hidden: Tensor, scratch: Scratch, index: int, cache: StepAttention | StepStates) -> None:
        """Add the output of this layer's attention, or of its state, to `hidden` [B, hidden].

        `index` is the layer's number among the stage's layers of its kind, with attention or with a state, and `cache`
        belongs to this kind.
        """
        self.project(hidden, self.attention_output(hidden, scratch, index, cache))

    def attention_output(
        self, hidden: Tensor, scratch: Scratch, index: int, cache: StepAttention | StepStates
    ) -> Tensor:
        """Return the output of the heads of this layer, before the projection, [B, heads * D]; see `attend`."""
        heads = scratch.heads
        normed = hidden if self._input_norm is None else self._input_norm(hidden, scratch)
        if self.has_state:
            assert scratch.state_inputs is not None
            self._state_inputs.into(scratch.state_inputs, normed)
            return cache.attend(index, scratch.state_inputs)
        if self._latent is not None:
            self._latent.project_into(heads, normed)
        else:
            self._project_heads(normed, scratch)
        if self._score_scale != 1.0:
            heads[:, :, :-2].mul_(self._score_scale)
        attended = cache.attend(index, heads)
        if scratch.with_gates is not None:
            num_queries = heads.shape[2] - 2
            gates = scratch.with_gates[:, :, num_queries : 2 * num_queries].flatten(1)
            return attended * gates.float().sigmoid().to(attended.dtype)
        return attended if self._latent is None else self._latent.expand_output(attended)

    def _project_heads(self, normed: Tensor, scratch: Scratch) -> None:
        """Write the projected heads of `normed` [B, hidden], with their norms, to the scratch."""
        heads = scratch.heads
        if scratch.with_gates is None:
            self._qkv.into(scratch.projected, normed)
        else:
            self._qkv.into(scratch.with_gates.flatten(1), normed)
            num_queries = heads.shape[2] - 2
            heads[:, :, :num_queries].copy_(scratch.with_gates[:, :, :num_queries])
            heads[:, :, num_queries:].copy_(scratch.with_gates[:, :, 2 * num_queries :])
        if isinstance(self._query_norm, WholeNorm):
            for norm, part in ((self._query_norm, heads[:, :, :-2]), (self._key_norm, heads[:, :, -2:-1])):
                part.copy_(norm(part.flatten(1, 2).unsqueeze(1)).view(part.shape))
        elif self._query_norm is not None:
            query, key = heads[:, :, :-2], heads[:, :, -2:-1]
            query.copy_(self._query_norm(query))
            key.copy_(self._key_norm(key))

    def project(self, hidden: Tensor, attended: Tensor) -> None:
        """Add the projection of the heads' output [B, heads * D] to `hidden` [B, hidden]."""
        _add(self._projection, self._attention_residual, hidden, attended)

    def feed_forward(self, hidden: Tensor, scratch: Scratch) -> None:
        """Add the gated MLP, or megatron's own layer of experts, to `hidden` [B, hidden]."""
        normed = hidden if self._mlp_norm is None else self._mlp_norm(hidden, scratch)
        if self._experts is not None:
            hidden.add_(self._experts(normed.unsqueeze(0))[0].squeeze(0))
            return
        self._up.into(scratch.up, normed)
        if self._multiply_gates is not None and scratch.gated is not None:
            self._multiply_gates(scratch.up, scratch.gated)
            _add(self._down, self._mlp_residual, hidden, scratch.gated)
            return
        gate = torch._C._nn.silu_(scratch.gate) if self._is_silu else self._activation(scratch.gate)
        _add(self._down, self._mlp_residual, hidden, gate.mul_(scratch.linear))


def _norm_before(module: nn.Module, *, by_kernel: bool) -> Norm | None:
    """The norm before attention or MLP; None if it is after them only."""
    return Norm(module, by_kernel=by_kernel) if isinstance(module, RMSNorm) else None


def _add(linear: _RowParallel, residual: Residual | None, hidden: Tensor, inputs: Tensor) -> None:
    """Add the output of `linear` for `inputs` to `hidden`, through the norm and the scale of `residual` if there is
    one."""
    if residual is None:
        linear.add_to(hidden, inputs)
        return
    output = torch.zeros_like(hidden)
    linear.add_to(output, inputs)
    hidden.add_(residual.branch(output))


class Norm:
    """A root-mean-square norm of hidden states, with a Triton kernel if `by_kernel`.

    In fp32 on a CPU it is computed in four operations: torch has no fused norm there, and its own takes a dozen.
    """

    def __init__(self, module: RMSNorm, *, by_kernel: bool) -> None:
        self._module, weight = module, module.weight
        self._is_decomposed = not weight.is_cuda and weight.dtype == torch.float32 and not module.offset
        self._kernel = _norm_kernel() if by_kernel and not module.offset else None
        self._floor = torch.tensor(math.sqrt(module.epsilon * len(weight)))
        self.refresh_weight()

    def refresh_weight(self) -> None:
        """Look up the weight again, and scale it by the square root of the width n: sqrt(mean(x^2) + epsilon) is
        hypot(|x|, sqrt(n epsilon)) / sqrt(n)."""
        if self._is_decomposed:
            self._scaled = self._module.weight.detach() * math.sqrt(len(self._module.weight))

    def __call__(self, hidden: Tensor, scratch: Scratch) -> Tensor:
        """Return the normed states [B, hidden], valid until the next norm."""
        if self._kernel is not None:
            self._kernel(hidden, self._module.weight, self._module.epsilon, scratch.normed)
            return scratch.normed
        if not self._is_decomposed:
            return self._module.forward(hidden)
        norms = torch.linalg.vector_norm(hidden, 2, -1, True, out=scratch.norms)
        torch.hypot(norms, self._floor, out=norms)
        return torch.div(hidden, norms, out=scratch.normed).mul_(self._scaled)


class Weight:
    """A weight [outputs, inputs] at its present address."""

    def __init__(self, weight: Tensor, *, reads_ahead: bool) -> None:
        """If `reads_ahead`, each piece of the weight is read into the cache in order before its product."""
        weight = weight.detach()
        self._rows = max(1, _READ_AHEAD_BYTES // weight[0].nbytes) if reads_ahead else len(weight)
        self._read_ahead = weight.split(self._rows) if reads_ahead else ()
        self._transposed = [piece.t() for piece in weight.split(self._rows)]

    def into(self, output: Tensor, inputs: Tensor, bias: Tensor | None = None) -> None:
        """Write the product [B, outputs] of inputs [B, inputs], plus a bias [outputs], into `output`: one operation if
        the weight is in one piece."""
        if not self._read_ahead:
            if bias is None:
                torch.mm(inputs, self._transposed[0], out=output)
            else:
                torch.addmm(bias, inputs, self._transposed[0], out=output)
            return
        for piece, transposed, part in zip(self._read_ahead, self._transposed, self._parts(output), strict=True):
            piece.amax()  # reads the piece into the cache
            torch.mm(inputs, transposed, out=part)
        if bias is not None:
            output.add_(bias)

    def add_to(self, hidden: Tensor, inputs: Tensor) -> None:
        """Add the product [B, outputs] of inputs [B, inputs] to `hidden`."""
        if not self._read_ahead:
            hidden.addmm_(inputs, self._transposed[0])
            return
        for piece, transposed, part in zip(self._read_ahead, self._transposed, self._parts(hidden), strict=True):
            piece.amax()  # reads the piece into the cache
            part.addmm_(inputs, transposed)

    def _parts(self, output: Tensor) -> Sequence[Tensor]:
        return output.split(self._rows, dim=1)


def set_read_ahead(layers: Sequence[DecodeLayer], head: Tensor | None) -> bool:
    """Make the layers read each weight in order before its product if the weights, with those of the head [V, hidden],
    do not fit in the CPU's cache; return True if the layers read ahead.

    A product of few rows reads the weights of many outputs side by side, which a core fetches from memory at a quarter
    of the speed of reading in order. With 24 MB of weights read in order first, products of up to 8 rows took half the
    time, including that reading.
    """
    linears = [linear for layer in layers for linear in layer.linears]
    num_bytes = sum(linear.num_bytes for linear in linears)
    if head is not None and not head.is_cuda:
        num_bytes += head.nbytes
    for linear in linears:
        linear.reads_ahead = num_bytes > _CPU_CACHE_BYTES
        linear.refresh_weight()
    return num_bytes > _CPU_CACHE_BYTES


class _Linear:
    """A linear layer's weight, bias and adapter."""

    def __init__(self, module: Any) -> None:
        self._weight, self._bias, self._adapter = module.weight, module.bias, _adapter_of(module)
        self._is_quantised = isinstance(self._weight, QuantisedWeight)
        self.reads_ahead = False
        self.refresh_weight()

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight that a product on a CPU reads; 0 for a weight on a GPU, and for a quantised one, whose
        product reads another tensor."""
        return 0 if self._is_quantised or self._weight.is_cuda else self._weight.nbytes

    def refresh_weight(self) -> None:
        """Look up the present address of the weight."""
        if not self._is_quantised:
            self._product = Weight(self._weight, reads_ahead=self.reads_ahead)


class _ColumnParallel(_Linear):
    """A column-parallel linear, sharded along its output."""

    def into(self, output: Tensor, inputs: Tensor) -> None:
        """Write the output for `inputs` to `output`."""
        if self._is_quantised:
            output.copy_(self._weight.multiply(inputs))
            if self._bias is not None:
                output.add_(self._bias)
            return
        self._product.into(output, inputs, self._bias)
        if self._adapter:
            self._adapter.add_to(output, inputs)


class _RowParallel(_Linear):
    """A row-parallel linear, sharded along its input. One all-reduce over the tensor-parallel ranks sums its output and
    its adapter's; megatron's modules have one more, between the two products of the adapter."""

    def __init__(self, module: Any, group: dist.ProcessGroup | None) -> None:
        super().__init__(module)
        self._group = group

    def add_to(self, hidden: Tensor, inputs: Tensor) -> None:
        """Add the output for `inputs` to `hidden`."""
        if self._group is None and not self._is_quantised:
            self._product.add_to(hidden, inputs)
            if self._adapter:
                self._adapter.add_to(hidden, inputs)
        else:
            output = self._weight.multiply(inputs) if self._is_quantised else self._multiply(hidden, inputs)
            if self._adapter:
                self._adapter.add_to(output, inputs)
            if self._group is not None:
                dist.all_reduce(output, group=self._group)
            hidden.add_(output)
        if self._bias is not None:
            hidden.add_(self._bias)

    def _multiply(self, like: Tensor, inputs: Tensor) -> Tensor:
        output = torch.empty_like(like)
        self._product.into(output, inputs)
        return output


class _Adapter:
    """This rank's shard of the LoRA adapter of a linear."""

    def __init__(self, module: AdaptedColumnParallelLinear | AdaptedRowParallelLinear) -> None:
        self._down, self._up, self._scale = module.adapter_down, module.adapter_up, module.adapter.scale

    def add_to(self, output: Tensor, inputs: Tensor) -> None:
        """Add the product of `inputs` to `output`."""
        low = torch.nn.functional.linear(torch.nn.functional.linear(inputs, self._down), self._up)
        output.add_(low, alpha=self._scale)


def _norm_kernel() -> Callable[[Tensor, Tensor, float, Tensor], None]:
    from meshwright.runtime.kernels.layer_ops import norm_rows  # noqa: PLC0415 - needs Triton

    return norm_rows


def _gate_kernel() -> Callable[[Tensor, Tensor], None]:
    from meshwright.runtime.kernels.layer_ops import silu_and_mul_into  # noqa: PLC0415 - needs Triton

    return silu_and_mul_into


def _adapter_of(module: Any) -> _Adapter | None:
    return _Adapter(module) if isinstance(module, AdaptedColumnParallelLinear | AdaptedRowParallelLinear) else None
