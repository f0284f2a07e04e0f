"""The gates of a feed-forward network and what they let through, in one pass over both."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


def multiply_gates(up: Tensor, gated: Tensor) -> None:
    """silu(gate) * linear into `gated` [B, F], from `up` [B, 2 F]: the gates, then what they let through."""
    num_rows, width = gated.shape
    _multiply_gates[num_rows, triton.cdiv(width, _TILE)](up, gated, width, TILE=_TILE, num_warps=4)


@triton.jit
def _multiply_gates(up, gated, width, TILE: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_held = column < width
    gate = tl.load(up + row * 2 * width + column, mask=is_held, other=0.0).to(tl.float32)
    linear = tl.load(up + row * 2 * width + width + column, mask=is_held, other=0.0).to(tl.float32)
    tl.store(gated + row * width + column, (gate * tl.sigmoid(gate) * linear).to(gated.dtype.element_ty), mask=is_held)
