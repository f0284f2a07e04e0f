"""The gated activation silu(gate) * linear of a feed-forward network, fused in one pass forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


def silu_and_mul(up: Tensor) -> Tensor:
    """Return silu(gate) * linear [..., F] from `up` [..., 2 F], whose first half is the gate; differentiable."""
    output: Tensor = _Gated.apply(up)
    return output


def silu_and_mul_into(up: Tensor, output: Tensor) -> None:
    """Write silu(gate) * linear of `up` [B, 2 F] to `found` [B, F], without a gradient."""
    num_rows, width = output.shape
    _multiply_gates[num_rows, triton.cdiv(width, _TILE)](up, output, width, TILE=_TILE, num_warps=4)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor) -> Tensor:
        up = up.contiguous()
        ctx.save_for_backward(up)
        output = up.new_empty(*up.shape[:-1], up.shape[-1] // 2)
        silu_and_mul_into(up.flatten(0, -2), output.flatten(0, -2))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (up,) = ctx.saved_tensors
        gradient, up_gradient = gradient.contiguous(), torch.empty_like(up)
        width = gradient.shape[-1]
        grid = gradient.numel() // width, triton.cdiv(width, _TILE)
        _gradients_of_gates[grid](up, gradient, up_gradient, width, TILE=_TILE, num_warps=4)
        return up_gradient


@triton.jit
def _multiply_gates(up, output, width, TILE: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < width
    gate = tl.load(up + row * 2 * width + column, mask=is_column, other=0.0).to(tl.float32)
    linear = tl.load(up + row * 2 * width + width + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(
        output + row * width + column, (gate * tl.sigmoid(gate) * linear).to(output.dtype.element_ty), mask=is_column
    )


@triton.jit
def _gradients_of_gates(up, gradient, up_gradient, width, TILE: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < width
    index = row * 2 * width + column
    gate = tl.load(up + index, mask=is_column, other=0.0).to(tl.float32)
    linear = tl.load(up + index + width, mask=is_column, other=0.0).to(tl.float32)
    output_gradient = tl.load(gradient + row * width + column, mask=is_column, other=0.0).to(tl.float32)
    gate_sigmoid = tl.sigmoid(gate)
    kind = up_gradient.dtype.element_ty
    gate_gradient = output_gradient * linear * gate_sigmoid * (1.0 + gate * (1.0 - gate_sigmoid))
    tl.store(up_gradient + index, gate_gradient.to(kind), mask=is_column)
    tl.store(up_gradient + index + width, (output_gradient * gate * gate_sigmoid).to(kind), mask=is_column)
