"""The rotary embedding in one pass forward and one backward; the backward pass rotates by the opposite angles."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `heads` [S, 1, heads, D] by their tokens' angles, cos and sin [S, 1, 1, D], as `attention.rotate` does."""
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
