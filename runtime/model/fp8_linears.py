"""Linears with 8-bit float weights, whose inputs are rounded to 8-bit floats too before the product.

`profiles.model_parts.fp8_weights` has the equation. A GPU multiplies the 8-bit numbers; on a CPU, where such products
are slow, both are cast to the weight's original dtype: the numbers are the same, and weights still take one byte each.
Each output has one scale, computed from its whole row of the weight over all ranks, so that the 8-bit weights are the
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

from meshwright.profiles.model_parts.fp8_weights import E4M3_MAX
from meshwright.runtime.device.capabilities import runs_triton_kernels
from meshwright.runtime.model.hf_checkpoint import global_name
from meshwright.runtime.model.model_shard import Decoder

FP8_DTYPE = torch.float8_e4m3fn

_EPSILON = 1e-12
"""Added to every scale, so that the scale of a row of zeros is not 0."""


class QuantisedWeight:
    """This rank's shard [outputs, inputs] of a weight in 8 bits, with the fp32 scale of each output [outputs, 1].

    Both keep their memory addresses, so that a captured CUDA graph reads new values. `meta_parameter` is a meta
    parameter with the shape, dtype and sharding of the original weight, for a refit.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        """Allocates the 8-bit counterpart of `weight`, without copying its values."""
        self.meta_parameter = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        vars(self.meta_parameter).update(vars(weight))  # megatron's attributes of tensor parallelism
        self.device = weight.device
        self._values = torch.zeros(weight.shape, dtype=FP8_DTYPE, device=weight.device)
        self._scales = torch.ones(len(weight), 1, device=weight.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values and scales."""
        return self._values.nbytes + self._scales.nbytes

    @property
    def dequantised(self) -> Tensor:
        """The dequantised weight, [outputs, inputs] in fp32."""
        return self._values.float() * self._scales

    def set(self, weight: Tensor, largest: Tensor) -> None:
        """Quantises `weight` [outputs, inputs]; `largest` [outputs, 1] is the largest magnitude of each whole row."""
        self._scales.copy_(_scales(largest))
        self._values.copy_(weight / self._scales)

    def multiply(self, inputs: Tensor) -> Tensor:
        """The product [..., outputs] with inputs [..., inputs], both in the dtype of the original weight."""
        rounded, scales = quantise_rows(inputs.reshape(-1, inputs.shape[-1]))
        dtype = self.meta_parameter.dtype
        if rounded.is_cuda:
            outputs = scaled_matmul(rounded, scales, self._values, self._scales, dtype)
        else:
            product = F.linear(rounded.to(dtype), self._values.to(dtype))
            outputs = (product * scales * self._scales.t()).to(dtype)
        return outputs.view(*inputs.shape[:-1], len(self._scales))


class QuantisedColumnParallelLinear(nn.Module):
    """Replaces Megatron's column-parallel linear, without sequence parallelism."""

    def __init__(self, linear: ColumnParallelLinear) -> None:
        super().__init__()
        self.weight, self.bias, self._skip_bias_add = QuantisedWeight(linear.weight), linear.bias, linear.skip_bias_add

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output [S, B, outputs / tp] for [S, B, inputs], and the bias if the caller adds it."""
        return _with_bias(self.weight.multiply(inputs), self.bias, self._skip_bias_add)


class QuantisedRowParallelLinear(nn.Module):
    """Replaces Megatron's row-parallel linear, without sequence parallelism."""

    def __init__(self, linear: RowParallelLinear) -> None:
        super().__init__()
        self.weight, self.bias, self._skip_bias_add = QuantisedWeight(linear.weight), linear.bias, linear.skip_bias_add
        self._tp_group = linear.tp_group

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output [S, B, outputs] for [S, B, inputs / tp], and the bias if the caller adds it."""
        summed = reduce_from_tensor_model_parallel_region(self.weight.multiply(inputs), group=self._tp_group)
        return _with_bias(summed, self.bias, self._skip_bias_add)


def quantise_linears(model: Decoder) -> None:
    """Replaces the linears of all layers by 8-bit ones, whose values a refit sets."""
    for layer in model.decoder.layers:
        for module in (layer.self_attention, layer.mlp):
            for name, linear in list(module.named_children()):
                if isinstance(linear, ColumnParallelLinear):
                    setattr(module, name, QuantisedColumnParallelLinear(linear))
                elif isinstance(linear, RowParallelLinear):
                    setattr(module, name, QuantisedRowParallelLinear(linear))


def named_quantised_weights(model: nn.Module) -> Iterator[tuple[str, QuantisedWeight]]:
    """Yields the 8-bit weights of a rank, named as in the whole model."""
    for name, module in model.named_modules():
        if isinstance(module, QuantisedColumnParallelLinear | QuantisedRowParallelLinear):
            assert isinstance(model, Decoder), name
            yield global_name(f"{name}.weight", model.layers.start), module.weight


@torch.no_grad()
def quantise_received(
    received: Mapping[str, Tensor], weights: Mapping[str, QuantisedWeight], group: dist.ProcessGroup
) -> None:
    """Quantises received weights [outputs, inputs], by name.

    The tensor-parallel ranks of `group` call it with the same names; one all-reduce gives them the largest magnitudes
    of rows that are sharded along their inputs.
    """
    largest = {name: largest_of_rows(weight) for name, weight in received.items()}
    row_parallel = [name for name in received if getattr(weights[name].meta_parameter, "partition_dim", 0) == 1]
    if row_parallel and dist.get_world_size(group) > 1:
        joined = torch.cat([largest[name] for name in row_parallel])
        dist.all_reduce(joined, dist.ReduceOp.MAX, group=group)
        largest |= dict(zip(row_parallel, joined.split([len(largest[name]) for name in row_parallel]), strict=True))
    for name, weight in received.items():
        weights[name].set(weight, largest[name])


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The 8-bit values of rows [B, inputs] and their scales [B, 1], by a Triton kernel if the device runs Triton."""
    if runs_triton_kernels(rows.device):
        from meshwright.runtime.kernels.quantisation import quantise_rows  # noqa: PLC0415 - needs Triton

        return quantise_rows(rows, E4M3_MAX, _EPSILON)
    scales = _scales(largest_of_rows(rows))
    return (rows / scales).to(FP8_DTYPE), scales


def scaled_matmul(rows: Tensor, row_scales: Tensor, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The product [rows, outputs] of 8-bit values [rows, inputs] and [outputs, inputs], with one scale per row of
    each."""
    row_wise: Any = ScalingType.RowWise
    product: Tensor = F.scaled_mm(rows, values.t(), row_scales, row_wise, scales.t(), row_wise, output_dtype=dtype)
    return product


def largest_of_rows(values: Tensor) -> Tensor:
    """The largest magnitude of each row, [rows, 1] in fp32."""
    return torch.linalg.vector_norm(values, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)


def _scales(largest: Tensor) -> Tensor:
    return largest / E4M3_MAX + _EPSILON


def _with_bias(output: Tensor, bias: Tensor | None, skip_bias_add: bool) -> tuple[Tensor, Tensor | None]:
    if bias is None or skip_bias_add:
        return output, bias
    return output + bias, None
