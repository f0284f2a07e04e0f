"""The gates of a feed-forward network and what they let through, in one pass over both, each way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


def gated(up: Tensor) -> Tensor:
    """silu(gate) * linear [..., F], from `up` [..., 2 F]: the gates, then what they let through; with its gradient."""
    found: Tensor = _Gated.apply(up)
    return found


def multiply_gates(up: Tensor, found: Tensor) -> None:
    """As `gated`, of `up` [B, 2 F] into [B, F], without a gradient."""
    num_rows, width = found.shape
    _multiply_gates[num_rows, triton.cdiv(width, _TILE)](up, found, width, TILE=_TILE, num_warps=4)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor) -> Tensor:
        up = up.contiguous()
        ctx.save_for_backward(up)
        found = up.new_empty(*up.shape[:-1], up.shape[-1] // 2)
        multiply_gates(up.flatten(0, -2), found.flatten(0, -2))
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (up,) = ctx.saved_tensors
        gradient, of_up = gradient.contiguous(), torch.empty_like(up)
        width = gradient.shape[-1]
        grid = gradient.numel() // width, triton.cdiv(width, _TILE)
        _gradients_of_gates[grid](up, gradient, of_up, width, TILE=_TILE, num_warps=4)
        return of_up


@triton.jit
def _multiply_gates(up, found, width, TILE: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_held = column < width
    gate = tl.load(up + row * 2 * width + column, mask=is_held, other=0.0).to(tl.float32)
    linear = tl.load(up + row * 2 * width + width + column, mask=is_held, other=0.0).to(tl.float32)
    tl.store(found + row * width + column, (gate * tl.sigmoid(gate) * linear).to(found.dtype.element_ty), mask=is_held)


@triton.jit
def _gradients_of_gates(up, gradient, of_up, width, TILE: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_held = column < width
    of_gate = row * 2 * width + column
    gate = tl.load(up + of_gate, mask=is_held, other=0.0).to(tl.float32)
    linear = tl.load(up + of_gate + width, mask=is_held, other=0.0).to(tl.float32)
    of_found = tl.load(gradient + row * width + column, mask=is_held, other=0.0).to(tl.float32)
    opened = tl.sigmoid(gate)
    kind = of_up.dtype.element_ty
    through = of_found * linear * opened * (1.0 + gate * (1.0 - opened))
    tl.store(of_up + of_gate, through.to(kind), mask=is_held)
    tl.store(of_up + of_gate + width, (of_found * gate * opened).to(kind), mask=is_held)
