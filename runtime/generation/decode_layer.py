"""A transformer layer on single tokens, straight on the weights of megatron's modules, in as few operations as can be.

Of a small batch an operation costs more to call than to compute, and a view as much as an operation. So what a layer
computes goes into room that all layers share, whose views are made once for as long as there are as many rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.model.adapted import AdaptedColumns, AdaptedRows
from meshwright.runtime.model.layers import RMSNorm
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.quantised import QuantisedWeight

_KEPT_BYTES = 2**23
"""Weights that stay in a core's share of the last-level cache from step to step: of an AMD EPYC 9004 with 2 cores 6 MB
did and 12 MB did not, measured on 2026-11-25."""

_FETCHED_BYTES = 2**19
"""Of a weight that are fetched at a time: half of a core's second-level cache, so that the product finds them there. Of
an AMD EPYC 9004 pieces of 1 MB and less did, and a weight of 4 MB in one did not, measured on 2026-11-26."""


class StepAttention(Protocol):
    """The cache during a decode step."""

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """[B, heads * D] from queries, key and value [B, kv_heads, heads / kv_heads + 2, D] as projected, which are not
        turned yet; what is new is kept."""


class TurnedAttention(Protocol):
    """The cache during a decode step, to which turned heads come."""

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        """[B, heads * D] from the new queries [B, kv_heads, heads / kv_heads, D]; new keys and values
        [B, kv_heads, 2, D] are kept."""


class Scratch:
    """What a layer computes of B rows on its way from hidden states to hidden states."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """`room_for` makes the tensors, by their names here."""
        self._tensors = tensors
        self.num_rows = len(tensors["normed"])
        self.norms, self.normed = tensors["norms"], tensors["normed"]
        # Megatron lays out the queries of a group, then its key, then its value.
        self.heads, self.turned = tensors["heads"], tensors["turned"]
        self.mixed = self.heads.flatten(1)
        self.query, self.new = self.turned[:, :, :-2], self.turned[:, :, -2:]
        angles = tensors["angles"]
        self._angles, self.cos = angles[:, :, :-1], angles[:, :1]
        """Of a value there are none: cosine 1."""
        low_sin, high_sin = angles[:, 1:, :-1].chunk(2, dim=-1)
        to, (low, high) = self.turned[:, :, :-1].chunk(2, dim=-1), self.heads[:, :, :-1].chunk(2, dim=-1)
        self.halves = (to[0], high, low_sin), (to[1], low, high_sin)
        """Of turned heads, what is added to it, and times what: x cos + (x with its halves swapped) sin."""
        if "up" in tensors:
            self.up = tensors["up"]
            self.gate, self.linear = self.up.chunk(2, dim=-1)
        self.gated = tensors.get("gated")

    def first(self, num_rows: int) -> Scratch:
        """That of fewer rows, in the same place."""
        return Scratch({name: tensor[:num_rows] for name, tensor in self._tensors.items()})

    def place(self, angles: Tensor) -> None:
        """Takes over the angles of the new tokens, cos and sin [B, 2, D]."""
        self._angles.copy_(angles.unsqueeze(2))


class Turning:
    """Turns heads by the angles that have a place in some scratch, and then attends."""

    def __init__(self, room: Scratch, attention: TurnedAttention) -> None:
        self._room, self._attention = room, attention

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """As of `StepAttention`: [B, heads * D]."""
        room = self._room
        torch.mul(heads, room.cos, out=room.turned)
        for half, other, sin in room.halves:
            half.addcmul_(other, sin)
        return self._attention.attend(layer, room.query, room.new)


def room_for(num_rows: int, model: Decoder, mesh: Mesh) -> Scratch:
    """New scratch for so many rows."""
    spec, like = model.spec, next(model.parameters())
    kv_heads, per_group = spec.num_kv_heads // mesh.layout.tp, spec.num_heads // spec.num_kv_heads + 2
    tensors = {
        "norms": like.new_empty(num_rows, 1),
        "normed": like.new_empty(num_rows, spec.hidden_size),
        "heads": like.new_empty(num_rows, kv_heads, per_group, spec.head_dim),
        "turned": like.new_empty(num_rows, kv_heads, per_group, spec.head_dim),
        "angles": like.new_ones(num_rows, 2, per_group, spec.head_dim),
    }
    if not spec.experts:
        width = spec.ffn_size // mesh.layout.tp
        tensors["up"] = like.new_empty(num_rows, 2 * width)
        if model.kernels.decode == "paged":
            tensors["gated"] = like.new_empty(num_rows, width)
    return Scratch(tensors)


class DecodeLayer:
    """One transformer layer on hidden states [B, hidden], which it changes."""

    def __init__(self, layer: Any, model: Decoder, mesh: Mesh) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        group = mesh.groups.tp if mesh.layout.tp > 1 else None
        by_kernel = model.kernels.decode == "paged"
        self._input_norm = Norm(layer.input_layernorm, by_kernel=by_kernel)
        self._mlp_norm = Norm(layer.pre_mlp_layernorm, by_kernel=by_kernel)
        self._query_norm, self._key_norm = attention.q_layernorm, attention.k_layernorm
        self._qkv, self._projection = _Spreading(attention.linear_qkv), _Joining(attention.linear_proj, group)
        self._experts: Callable[[Tensor], tuple[Tensor, None]] | None = mlp if model.spec.experts else None
        self.linears: list[_Linear] = [self._qkv, self._projection]
        if not model.spec.experts:
            self._up, self._down = _Spreading(mlp.linear_fc1), _Joining(mlp.linear_fc2, group)
            self.linears += [self._up, self._down]
        self._is_silu = model.spec.activation == "silu"
        self._activation: Callable[[Tensor], Tensor] = model.config.activation_func
        self._multiply_gates = _gate_kernel() if self._is_silu and by_kernel else None

    def begin_turn(self) -> None:
        """Weights may have moved, or be others."""
        self._input_norm.look()
        self._mlp_norm.look()
        for linear in self.linears:
            linear.look()

    def attend(self, hidden: Tensor, room: Scratch, index: int, cache: StepAttention) -> None:
        """Adds the attention of layer `index` of this stage."""
        self.project(hidden, self.attended(hidden, room, index, cache))

    def attended(self, hidden: Tensor, room: Scratch, index: int, cache: StepAttention) -> Tensor:
        """What the heads of layer `index` of this stage have seen, [B, heads * D]."""
        self._qkv.into(room.mixed, self._input_norm(hidden, room))
        heads = room.heads
        if self._query_norm is not None:
            query, key = heads[:, :, :-2], heads[:, :, -2:-1]
            query.copy_(self._query_norm(query))
            key.copy_(self._key_norm(key))
        return cache.attend(index, heads)

    def project(self, hidden: Tensor, attended: Tensor) -> None:
        """Adds what the heads have seen."""
        self._projection.add_to(hidden, attended)

    def feed_forward(self, hidden: Tensor, room: Scratch) -> None:
        """Adds the gated MLP, or megatron's own layer of experts."""
        normed = self._mlp_norm(hidden, room)
        if self._experts is not None:
            hidden.add_(self._experts(normed.unsqueeze(0))[0].squeeze(0))
            return
        self._up.into(room.up, normed)
        if self._multiply_gates is not None and room.gated is not None:
            self._multiply_gates(room.up, room.gated)
            self._down.add_to(hidden, room.gated)
            return
        gate = torch._C._nn.silu_(room.gate) if self._is_silu else self._activation(room.gate)
        self._down.add_to(hidden, gate.mul_(room.linear))


class Norm:
    """A norm of hidden states, by a kernel if asked for.

    In fp32 on a CPU step by step: there torch has no operation for it and takes a dozen.
    """

    def __init__(self, module: RMSNorm, *, by_kernel: bool) -> None:
        self._module, weight = module, module.weight
        self._is_own = not weight.is_cuda and weight.dtype == torch.float32 and not module.offset
        self._by_kernel = _norm_kernel() if by_kernel and not module.offset else None
        self._floor = torch.tensor(math.sqrt(module.epsilon * len(weight)))
        self.look()

    def look(self) -> None:
        """What the weight is now, times the square root of the width: sqrt(mean + epsilon) is the length of the row and
        of the floor at right angles to it, over that root."""
        if self._is_own:
            self._scaled = self._module.weight.detach() * math.sqrt(len(self._module.weight))

    def __call__(self, hidden: Tensor, room: Scratch) -> Tensor:
        """[B, hidden], which last until the next norm."""
        if self._by_kernel is not None:
            self._by_kernel(hidden, self._module.weight, self._module.epsilon, room.normed)
            return room.normed
        if not self._is_own:
            return self._module.forward(hidden)
        norms = torch.linalg.vector_norm(hidden, 2, -1, True, out=room.norms)
        torch.hypot(norms, self._floor, out=norms)
        return torch.div(hidden, norms, out=room.normed).mul_(self._scaled)


class Weight:
    """A weight [outputs, inputs] where it lies now."""

    def __init__(self, weight: Tensor, *, is_fetched: bool) -> None:
        """`is_fetched` has each piece of it read in order before its product."""
        weight = weight.detach()
        self._rows = max(1, _FETCHED_BYTES // weight[0].nbytes) if is_fetched else len(weight)
        self._fetched = weight.split(self._rows) if is_fetched else ()
        self._turned = [piece.t() for piece in weight.split(self._rows)]

    def into(self, output: Tensor, inputs: Tensor, bias: Tensor | None = None) -> None:
        """Writes the product [B, outputs] of inputs [B, inputs], and a bias [outputs] more: in one operation where the
        weight is whole."""
        if not self._fetched:
            if bias is None:
                torch.mm(inputs, self._turned[0], out=output)
            else:
                torch.addmm(bias, inputs, self._turned[0], out=output)
            return
        for piece, turned, part in zip(self._fetched, self._turned, self._parts(output), strict=True):
            piece.amax()
            torch.mm(inputs, turned, out=part)
        if bias is not None:
            output.add_(bias)

    def add_to(self, hidden: Tensor, inputs: Tensor) -> None:
        """Adds the product [B, outputs] of inputs [B, inputs]."""
        if not self._fetched:
            hidden.addmm_(inputs, self._turned[0])
            return
        for piece, turned, part in zip(self._fetched, self._turned, self._parts(hidden), strict=True):
            piece.amax()
            part.addmm_(inputs, turned)

    def _parts(self, output: Tensor) -> Sequence[Tensor]:
        return output.split(self._rows, dim=1)


def are_fetched(layers: Sequence[DecodeLayer], head: Tensor | None) -> bool:
    """Has the layers read each weight in order before its product where they come from memory in every step, those of
    the head [V, hidden] with them; whether they do.

    A product of few rows reads many outputs' weights side by side, which a core fetches from memory at a quarter of
    the speed: of 24 MB read in order first, the products of 8 rows and fewer took half the time, the reading counted.
    """
    linears = [linear for layer in layers for linear in layer.linears]
    num_bytes = sum(linear.num_bytes for linear in linears)
    if head is not None and not head.is_cuda:
        num_bytes += head.nbytes
    for linear in linears:
        linear.is_fetched = num_bytes > _KEPT_BYTES
        linear.look()
    return num_bytes > _KEPT_BYTES


class _Linear:
    """The weight of a linear, its bias and its adapter."""

    def __init__(self, module: Any) -> None:
        self._weight, self._bias, self._adapter = module.weight, module.bias, _adapter_of(module)
        self._is_quantised = isinstance(self._weight, QuantisedWeight)
        self.is_fetched = False
        self.look()

    @property
    def num_bytes(self) -> int:
        """That a product on a CPU reads where they lie; none of a weight that it makes anew."""
        return 0 if self._is_quantised or self._weight.is_cuda else self._weight.nbytes

    def look(self) -> None:
        """Where the weight lies now."""
        if not self._is_quantised:
            self._product = Weight(self._weight, is_fetched=self.is_fetched)


class _Spreading(_Linear):
    """A linear that is cut along its output."""

    def into(self, output: Tensor, inputs: Tensor) -> None:
        """Writes what it says of `inputs` to `output`."""
        if self._is_quantised:
            output.copy_(self._weight.multiply(inputs))
            if self._bias is not None:
                output.add_(self._bias)
            return
        self._product.into(output, inputs, self._bias)
        if self._adapter:
            self._adapter.add_to(output, inputs)


class _Joining(_Linear):
    """A linear that is cut along its input: its output is summed over the tensor-parallel ranks, and with it that of
    its adapter, which megatron's modules sum before its second product."""

    def __init__(self, module: Any, group: dist.ProcessGroup | None) -> None:
        super().__init__(module)
        self._group = group

    def add_to(self, hidden: Tensor, inputs: Tensor) -> None:
        """Adds what it says of `inputs` to `hidden`."""
        if self._group is None and not self._is_quantised:
            self._product.add_to(hidden, inputs)
            if self._adapter:
                self._adapter.add_to(hidden, inputs)
        else:
            output = self._weight.multiply(inputs) if self._is_quantised else self._multiplied(hidden, inputs)
            if self._adapter:
                self._adapter.add_to(output, inputs)
            if self._group is not None:
                dist.all_reduce(output, group=self._group)
            hidden.add_(output)
        if self._bias is not None:
            hidden.add_(self._bias)

    def _multiplied(self, like: Tensor, inputs: Tensor) -> Tensor:
        output = torch.empty_like(like)
        self._product.into(output, inputs)
        return output


class _Adapter:
    """The low-rank product beside a linear, this rank's part of it."""

    def __init__(self, module: AdaptedColumns | AdaptedRows) -> None:
        self._down, self._up, self._scale = module.adapter_down, module.adapter_up, module.adapter.scale

    def add_to(self, output: Tensor, inputs: Tensor) -> None:
        """Adds what it says of `inputs` to `output`."""
        low = torch.nn.functional.linear(torch.nn.functional.linear(inputs, self._down), self._up)
        output.add_(low, alpha=self._scale)


def _norm_kernel() -> Callable[[Tensor, Tensor, float, Tensor], None]:
    from meshwright.runtime.kernels.norms import norm_rows  # noqa: PLC0415 - there is Triton where it was chosen

    return norm_rows


def _gate_kernel() -> Callable[[Tensor, Tensor], None]:
    from meshwright.runtime.kernels.gates import multiply_gates  # noqa: PLC0415 - there is Triton where it was chosen

    return multiply_gates


def _adapter_of(module: Any) -> _Adapter | None:
    return _Adapter(module) if isinstance(module, AdaptedColumns | AdaptedRows) else None
