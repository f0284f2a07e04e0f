"""The root-mean-square norm of the few rows of a decode step; torch's own kernel is made for many rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def norm_rows(hidden: Tensor, weight: Tensor, epsilon: float, normed: Tensor) -> None:
    """Write the norm of `hidden` [B, hidden], times the weight [hidden], to `normed` [B, hidden]."""
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
