"""Triton kernels of a transformer layer: the root-mean-square norm of a decode step, the rotary embedding and the
gated activation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def norm_rows(hidden: Tensor, weight: Tensor, epsilon: float, normed: Tensor) -> None:
    """Write `hidden` [B, hidden] over its root mean square, times the weight [hidden], to `normed` [B, hidden]."""
    num_rows, width = hidden.shape
    _norm_row[(num_rows,)](
        hidden, weight, normed, width, epsilon, WIDTH=triton.next_power_of_2(width), num_warps=8 if width > 1024 else 4
    )


@triton.jit
def _norm_row(hidden, weight, normed, width, epsilon, WIDTH: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    is_column = column < width
    values = tl.load(hidden + row * width + column, mask=is_column, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + epsilon)
    weights = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(normed + row * width + column, (values * scale * weights).to(normed.dtype.element_ty), mask=is_column)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `heads` [S, 1, heads, D] by their tokens' angles, cos and sin [S, 1, 1, D], as `rotate` of
    `runtime.model.attention` does."""
    rotated: Tensor = _Rotate.apply(heads, cos, sin)
    return rotated


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(heads, cos, sin, direction=1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _rotate(gradient, *ctx.saved_tensors, direction=-1.0), None, None


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, *, direction: float) -> Tensor:
    if heads.stride(-1) != 1:
        heads = heads.contiguous()
    num_tokens, _, num_heads, size = heads.shape
    rotated = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    _rotate_token[(num_tokens,)](
        heads, heads.stride(0), heads.stride(2), cos, sin, cos.stride(0), rotated, num_heads, direction,
        SIZE=size, HALF=triton.next_power_of_2(size // 2), HEADS=triton.next_power_of_2(num_heads), num_warps=4,
    )  # fmt: skip
    return rotated


@triton.jit(do_not_specialize=["direction"])
def _rotate_token(
    heads, token_stride, head_stride, cos, sin, angle_stride, rotated, num_heads, direction,
    SIZE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, low = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    is_low = low < SIZE // 2
    mask = (head < num_heads) & is_low
    cosine = tl.load(cos + token * angle_stride + low, mask=is_low, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * angle_stride + low, mask=is_low, other=0.0).to(tl.float32) * direction
    source = heads + token * token_stride + head * head_stride + low
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + SIZE // 2, mask=mask, other=0.0).to(tl.float32)
    dtype = rotated.dtype.element_ty
    target = rotated + token * num_heads * SIZE + head * SIZE + low
    tl.store(target, (first * cosine - second * sine).to(dtype), mask=mask)
    tl.store(target + SIZE // 2, (second * cosine + first * sine).to(dtype), mask=mask)


_TILE = 1024


def silu_and_mul(up: Tensor) -> Tensor:
    """Return silu(gate) * linear [..., F] from `up` [..., 2 F], whose first half is the gate; differentiable."""
    output: Tensor = _Gated.apply(up)
    return output


def silu_and_mul_into(up: Tensor, output: Tensor) -> None:
    """Write silu(gate) * linear of `up` [B, 2 F] to `output` [B, F], without a gradient."""
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
