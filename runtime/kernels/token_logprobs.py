"""What a log-probability and an entropy need of each row of logits, in one pass over them, and their gradients in one.

Nothing of the vocabulary's width is held in fp32. The equations are those of `model.logprobs`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096


def sums_of_rows(logits: Tensor, targets: Tensor, real: int, temperature: float) -> tuple[Tensor, Tensor]:
    """The largest m of z = logits / temperature [N], and [3, N]: the sum of exp(z - m), the target's z - m, and the sum
    of exp(z - m) (z - m), in fp32.

    `logits` [N, V] are this rank's columns, of which the first `real` are tokens; a target [N] int64 that is none of
    them has zero.
    """
    num_rows = len(logits)
    highest = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    sums = torch.empty(3, num_rows, dtype=torch.float32, device=logits.device)
    _sum_row[(num_rows,)](
        logits, logits.stride(0), targets, real, 1.0 / temperature, highest, sums, TILE=_TILE, num_warps=8
    )
    return highest, sums


def gradient(
    logits: Tensor, targets: Tensor, real: int, temperature: float, of_rows: tuple[Tensor, Tensor, Tensor, Tensor]
) -> Tensor:
    """Of logits [N, V], from `of_rows` [N] fp32 each: gradients of log-probabilities and of entropies, the logarithms
    of the normalizers of exp(z), and the entropies."""
    found = torch.empty_like(logits)
    num_rows, width = logits.shape
    of_logprobs, of_entropies, normalizers, entropies = (one.contiguous() for one in of_rows)
    _gradient_of_row[num_rows, triton.cdiv(width, _TILE)](
        logits, logits.stride(0), targets, real, width, 1.0 / temperature,
        of_logprobs, of_entropies, normalizers, entropies, found, TILE=_TILE, num_warps=8,
    )  # fmt: skip
    return found


@triton.jit
def _sum_row(logits, row_stride, targets, real, scale, highest, sums, TILE: tl.constexpr):
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    own, target = logits + row * row_stride, tl.load(targets + row)
    most = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    weighted = tl.zeros([], tl.float32)
    for first in range(0, real, TILE):
        column = first + tl.arange(0, TILE)
        is_real = column < real
        scaled = tl.load(own + column, mask=is_real, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(most, tl.max(scaled, 0))
        at = tl.where(higher == -float("inf"), 0.0, higher)
        below = tl.where(is_real, scaled - at, 0.0)
        weight = tl.where(is_real, tl.exp(below), 0.0)
        moved = tl.where(most == -float("inf"), 0.0, most - at)
        kept = tl.where(most == -float("inf"), 0.0, tl.exp(moved))
        weighted = (weighted + total * moved) * kept + tl.sum(tl.where(weight > 0.0, weight * below, 0.0), 0)
        total = total * kept + tl.sum(weight, 0)
        most = higher
    is_mine = (target >= 0) & (target < real)
    of_target = tl.load(own + target, mask=is_mine, other=0.0).to(tl.float32) * scale
    tl.store(highest + row, most)
    tl.store(sums + row, total)
    tl.store(sums + num_rows + row, tl.where(is_mine, of_target - most, 0.0))
    tl.store(sums + 2 * num_rows + row, weighted)


@triton.jit
def _gradient_of_row(
    logits, row_stride, targets, real, width, scale, of_logprobs, of_entropies, normalizers, entropies, found,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_real = column < real
    scaled = tl.load(logits + row * row_stride + column, mask=is_real, other=-float("inf")).to(tl.float32) * scale
    logp = tl.where(is_real, scaled - tl.load(normalizers + row), 0.0)
    p = tl.where(is_real, tl.exp(logp), 0.0)
    of_logprob, of_entropy = tl.load(of_logprobs + row), tl.load(of_entropies + row)
    is_target = column == tl.load(targets + row)
    of_z = of_logprob * (tl.where(is_target, 1.0, 0.0) - p)
    of_z -= tl.where(p > 0.0, of_entropy * p * (logp + tl.load(entropies + row)), 0.0)
    gradient = tl.where(is_real, of_z * scale, 0.0).to(found.dtype.element_ty)
    tl.store(found + row * width + column, gradient, mask=column < width)
