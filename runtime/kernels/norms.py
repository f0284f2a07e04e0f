"""The root-mean-square norm of a few rows, for decode steps: torch's is made for many."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def norm_rows(hidden: Tensor, weight: Tensor, epsilon: float, normed: Tensor) -> None:
    """Into `normed` [B, hidden] from `hidden` [B, hidden], times the weight [hidden]."""
    num_rows, width = hidden.shape
    _norm_row[(num_rows,)](
        hidden, weight, normed, width, epsilon, WIDTH=triton.next_power_of_2(width), num_warps=8 if width > 1024 else 4
    )


@triton.jit
def _norm_row(hidden, weight, normed, width, epsilon, WIDTH: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    is_held = column < width
    held = tl.load(hidden + row * width + column, mask=is_held, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(held * held, 0) / width + epsilon)
    times = tl.load(weight + column, mask=is_held, other=0.0).to(tl.float32)
    tl.store(normed + row * width + column, (held * scale * times).to(normed.dtype.element_ty), mask=is_held)
