"""Heads turned by the angles of their tokens, in one pass each way; the gradient is turned back by the same angles."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`heads` [S, 1, heads, D] turned by their tokens' angles, cos and sin [S, 1, 1, D], as `attention.rotate` does."""
    turned: Tensor = _Turned.apply(heads, cos, sin)
    return turned


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(heads, cos, sin, direction=1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _turn(gradient, *ctx.saved_tensors, direction=-1.0), None, None


def _turn(heads: Tensor, cos: Tensor, sin: Tensor, *, direction: float) -> Tensor:
    if heads.stride(-1) != 1:
        heads = heads.contiguous()
    num_tokens, _, num_heads, size = heads.shape
    turned = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    _turn_token[(num_tokens,)](
        heads, heads.stride(0), heads.stride(2), cos, sin, cos.stride(0), turned, num_heads, direction,
        SIZE=size, HALF=triton.next_power_of_2(size // 2), HEADS=triton.next_power_of_2(num_heads), num_warps=4,
    )  # fmt: skip
    return turned


@triton.jit(do_not_specialize=["direction"])
def _turn_token(
    heads, token_stride, head_stride, cos, sin, angle_stride, turned, num_heads, direction,
    SIZE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, low = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    is_low = low < SIZE // 2
    is_mine = (head < num_heads) & is_low
    of_cos = tl.load(cos + token * angle_stride + low, mask=is_low, other=0.0).to(tl.float32)
    of_sin = tl.load(sin + token * angle_stride + low, mask=is_low, other=0.0).to(tl.float32) * direction
    own = heads + token * token_stride + head * head_stride + low
    first = tl.load(own, mask=is_mine, other=0.0).to(tl.float32)
    second = tl.load(own + SIZE // 2, mask=is_mine, other=0.0).to(tl.float32)
    kind = turned.dtype.element_ty
    target = turned + token * num_heads * SIZE + head * SIZE + low
    tl.store(target, (first * of_cos - second * of_sin).to(kind), mask=is_mine)
    tl.store(target + SIZE // 2, (second * of_cos + first * of_sin).to(kind), mask=is_mine)
