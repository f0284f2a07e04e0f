"""Linears whose weights are 8-bit floats, and so are their inputs while they are multiplied.

`profiles.model_parts.eight_bit_floats` has the equation. On a GPU the product is one of 8-bit numbers; on a CPU, whose
product of them is slower than any other, both are cast up: the numbers are the same, and weights still take a byte
each. The scale of an output is that of the whole output, whichever of its inputs a rank has, so that weights are the
same numbers in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor, nn
from torch.nn.functional import ScalingType

from meshwright.profiles.model_parts.eight_bit_floats import LARGEST
from meshwright.runtime.device.abilities import has_kernels
from meshwright.runtime.model.hf_mapping import global_name
from meshwright.runtime.model.model_shard import Decoder

EIGHT_BITS = torch.float8_e4m3fn

_LEAST = 1e-12
"""What a scale is more than its largest number asks for: a row of zeros has one too."""


class QuantisedWeight:
    """A weight [outputs, inputs] of this rank in 8 bits, with the fp32 scale of each output [outputs, 1].

    Both stay where they are in memory, so that a recorded step goes on reading them. `stands_for` is a parameter
    without numbers: the shape, the type and the cut of the weight, for those who bring it.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        """With room for the numbers of such a weight."""
        self.stands_for = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        vars(self.stands_for).update(vars(weight))  # what megatron says of the cut
        self.device = weight.device
        self._values = torch.zeros(weight.shape, dtype=EIGHT_BITS, device=weight.device)
        self._scales = torch.ones(len(weight), 1, device=weight.device)

    @property
    def num_bytes(self) -> int:
        """Of its numbers and scales."""
        return self._values.nbytes + self._scales.nbytes

    @property
    def numbers(self) -> Tensor:
        """What it holds, [outputs, inputs] in fp32."""
        return self._values.float() * self._scales

    def set(self, weight: Tensor, largest: Tensor) -> None:
        """Takes over the numbers of a weight; `largest` [outputs, 1] is the largest magnitude of each whole output."""
        self._scales.copy_(_scales(largest))
        self._values.copy_(weight / self._scales)

    def multiply(self, inputs: Tensor) -> Tensor:
        """[..., outputs], of the type of the weight that it stands for, from [..., inputs] of that type."""
        rounded, scales = rounded_rows(inputs.reshape(-1, inputs.shape[-1]))
        dtype = self.stands_for.dtype
        if rounded.is_cuda:
            found = multiplied(rounded, scales, self._values, self._scales, dtype)
        else:
            product = F.linear(rounded.to(dtype), self._values.to(dtype))
            found = (product * scales * self._scales.t()).to(dtype)
        return found.view(*inputs.shape[:-1], len(self._scales))


class QuantisedColumns(nn.Module):
    """In the place of megatron's linear that is cut along its outputs, without sequence parallelism."""

    def __init__(self, linear: ColumnParallelLinear) -> None:
        super().__init__()
        self.weight, self.bias, self._leaves_bias = QuantisedWeight(linear.weight), linear.bias, linear.skip_bias_add

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """[S, B, outputs / tp] and what of a bias is left to add, from [S, B, inputs]."""
        return _with_bias(self.weight.multiply(inputs), self.bias, self._leaves_bias)


class QuantisedRows(nn.Module):
    """In the place of megatron's linear that is cut along its inputs, without sequence parallelism."""

    def __init__(self, linear: RowParallelLinear) -> None:
        super().__init__()
        self.weight, self.bias, self._leaves_bias = QuantisedWeight(linear.weight), linear.bias, linear.skip_bias_add
        self._tp_group = linear.tp_group

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """[S, B, outputs] and what of a bias is left to add, from [S, B, inputs / tp]."""
        summed = reduce_from_tensor_model_parallel_region(self.weight.multiply(inputs), group=self._tp_group)
        return _with_bias(summed, self.bias, self._leaves_bias)


def quantise_linears(model: Decoder) -> None:
    """Puts linears in 8 bits in the place of those of all layers, without numbers: a refit brings them."""
    for layer in model.decoder.layers:
        for block in (layer.self_attention, layer.mlp):
            for name, linear in list(block.named_children()):
                if isinstance(linear, ColumnParallelLinear):
                    setattr(block, name, QuantisedColumns(linear))
                elif isinstance(linear, RowParallelLinear):
                    setattr(block, name, QuantisedRows(linear))


def quantised_in_whole(model: nn.Module) -> Iterator[tuple[str, QuantisedWeight]]:
    """The weights in 8 bits of a rank, named as in the whole model."""
    for name, module in model.named_modules():
        if isinstance(module, QuantisedColumns | QuantisedRows):
            assert isinstance(model, Decoder), name
            yield global_name(f"{name}.weight", model.layers.start), module.weight


@torch.no_grad()
def take_over(arrived: Mapping[str, Tensor], weights: Mapping[str, QuantisedWeight], group: dist.ProcessGroup) -> None:
    """Makes 8-bit floats of weights [outputs, inputs] that have arrived, by name.

    The ranks of `group` each have a part of the same weights, and call it with the same names: one message tells them
    the largest numbers of what is cut along its inputs.
    """
    largest = {name: largest_of_rows(weight) for name, weight in arrived.items()}
    cut = [name for name in arrived if getattr(weights[name].stands_for, "partition_dim", 0) == 1]
    if cut and dist.get_world_size(group) > 1:
        together = torch.cat([largest[name] for name in cut])
        dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
        largest |= dict(zip(cut, together.split([len(largest[name]) for name in cut]), strict=True))
    for name, weight in arrived.items():
        weights[name].set(weight, largest[name])


def rounded_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The 8-bit numbers of rows [B, inputs] and their scales [B, 1]: by a kernel where there are kernels."""
    if has_kernels(rows.device):
        from meshwright.runtime.kernels.row_rounding import round_rows  # noqa: PLC0415 - here there is Triton

        return round_rows(rows, LARGEST, _LEAST)
    scales = _scales(largest_of_rows(rows))
    return (rows / scales).to(EIGHT_BITS), scales


def multiplied(rows: Tensor, row_scales: Tensor, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The product [rows, outputs] of 8-bit numbers [rows, inputs] and [outputs, inputs], with a scale for each row of
    either."""
    by_row: Any = ScalingType.RowWise
    found: Tensor = F.scaled_mm(rows, values.t(), row_scales, by_row, scales.t(), by_row, output_dtype=dtype)
    return found


def largest_of_rows(values: Tensor) -> Tensor:
    """The largest magnitude of each row, [rows, 1] in fp32."""
    return torch.linalg.vector_norm(values, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)


def _scales(largest: Tensor) -> Tensor:
    return largest / LARGEST + _LEAST


def _with_bias(output: Tensor, bias: Tensor | None, leaves_bias: bool) -> tuple[Tensor, Tensor | None]:
    if bias is None or leaves_bias:
        return output, bias
    return output + bias, None
