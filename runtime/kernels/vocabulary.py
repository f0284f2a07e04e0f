"""Triton kernels over rows of logits: sampling a token, and the sums and gradients of log-probabilities and entropies.

Logits are read in their own type; no tensor of the vocabulary's width is held in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SAMPLING_TILE = 2048
"""Logits that a Triton program for sampling loads at a time."""


def sample_tokens(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return tokens [B] int64 and their log-probabilities [B] fp32 under softmax(logits / temperature).

    `logits` [B, V] must have a dense last dimension; `uniform` [B] fp64 is in [0, 1).
    """
    num_rows, width = logits.shape
    num_tiles = triton.cdiv(width, _SAMPLING_TILE)
    tile_sums = torch.empty(2, num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _sum_tiles[num_rows, num_tiles](
        logits, logits.stride(0), width, 1.0 / temperature, tile_sums, num_tiles, TILE=_SAMPLING_TILE, num_warps=4
    )
    _sample_token[(num_rows,)](
        logits, logits.stride(0), width, 1.0 / temperature, tile_sums, num_tiles, uniform, tokens, logprobs,
        TILE=_SAMPLING_TILE, TILES=triton.next_power_of_2(num_tiles), num_warps=8,
    )  # fmt: skip
    return tokens, logprobs


@triton.jit(do_not_specialize=["num_tiles"])
def _sum_tiles(logits, row_stride, width, scale, tile_sums, num_tiles, TILE: tl.constexpr):
    """Store the largest scaled logit of each tile and, after those of all rows, its sum of exponentials relative to
    that."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    scaled = (
        tl.load(logits + row * row_stride + column, mask=column < width, other=-float("inf")).to(tl.float32) * scale
    )
    highest = tl.max(scaled, 0)
    reference = tl.where(highest == -float("inf"), 0.0, highest)
    tl.store(tile_sums + row * num_tiles + tile, highest)
    tl.store(tile_sums + (tl.num_programs(0) + row) * num_tiles + tile, tl.sum(tl.exp(scaled - reference), 0))


@triton.jit(do_not_specialize=["num_tiles"])
def _sample_token(
    logits, row_stride, width, scale, tile_sums, num_tiles, uniform, tokens, logprobs,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    is_tile = tile < num_tiles
    tile_highest = tl.load(tile_sums + row * num_tiles + tile, mask=is_tile, other=-float("inf"))
    highest = tl.max(tile_highest, 0)
    sums = tl.load(tile_sums + (tl.num_programs(0) + row) * num_tiles + tile, mask=is_tile, other=0.0)
    weights = sums.to(tl.float64) * tl.exp(tile_highest - highest).to(tl.float64)
    total = tl.sum(weights, 0)
    target = tl.load(uniform + row) * total
    last_tile = tl.max(tl.where(weights > 0.0, tile, 0), 0)
    chosen = tl.minimum(tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0), last_tile)
    target -= tl.sum(tl.where(tile < chosen, weights, 0.0), 0)

    within = tl.arange(0, TILE)
    column = chosen * TILE + within
    scaled = (
        tl.load(logits + row * row_stride + column, mask=column < width, other=-float("inf")).to(tl.float32) * scale
    )
    weight = tl.exp(scaled - highest).to(tl.float64)
    last = tl.max(tl.where(weight > 0.0, within, 0), 0)
    token = tl.minimum(tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0), last)
    logit = tl.sum(tl.where(within == token, scaled, 0.0), 0)
    tl.store(tokens + row, (chosen * TILE + token).to(tl.int64))
    tl.store(logprobs + row, (logit - highest).to(tl.float64) - tl.log(total))


_LOGPROB_TILE = 4096
"""Logits that a Triton program for log-probabilities loads at a time."""


def softmax_sums(logits: Tensor, targets: Tensor, real: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return, in fp32, the maximum m [N] of z = logits / temperature, and [3, N]: the sum of exp(z - m), the target's z
    - m, and the sum of exp(z - m) (z - m).

    `logits` [N, V] are this rank's columns, of which the first `real` are tokens; a target [N] int64 that is not among
    them gives 0.
    """
    num_rows = len(logits)
    highest = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    sums = torch.empty(3, num_rows, dtype=torch.float32, device=logits.device)
    _sum_row[(num_rows,)](
        logits, logits.stride(0), targets, real, 1.0 / temperature, highest, sums, TILE=_LOGPROB_TILE, num_warps=8
    )
    return highest, sums


def logits_gradient(
    logits: Tensor, targets: Tensor, real: int, temperature: float, row_values: tuple[Tensor, Tensor, Tensor, Tensor]
) -> Tensor:
    """Return the gradient of the logits [N, V], of which the first `real` columns are tokens.

    `row_values` are [N] fp32 each: the gradients of the log-probabilities and of the entropies, the log-normalizers of
    exp(z), and the entropies.
    """
    result = torch.empty_like(logits)
    num_rows, width = logits.shape
    grad_logprobs, grad_entropies, normalizers, entropies = (one.contiguous() for one in row_values)
    _gradient_of_row[num_rows, triton.cdiv(width, _LOGPROB_TILE)](
        logits, logits.stride(0), targets, real, width, 1.0 / temperature,
        grad_logprobs, grad_entropies, normalizers, entropies, result, TILE=_LOGPROB_TILE, num_warps=8,
    )  # fmt: skip
    return result


@triton.jit
def _sum_row(logits, row_stride, targets, real, scale, highest, sums, TILE: tl.constexpr):
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    row_logits, target = logits + row * row_stride, tl.load(targets + row)
    maximum = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    weighted = tl.zeros([], tl.float32)
    for first in range(0, real, TILE):
        column = first + tl.arange(0, TILE)
        is_real = column < real
        scaled = tl.load(row_logits + column, mask=is_real, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(maximum, tl.max(scaled, 0))
        reference = tl.where(higher == -float("inf"), 0.0, higher)
        below = tl.where(is_real, scaled - reference, 0.0)
        weight = tl.where(is_real, tl.exp(below), 0.0)
        shift = tl.where(maximum == -float("inf"), 0.0, maximum - reference)
        rescale = tl.where(maximum == -float("inf"), 0.0, tl.exp(shift))
        weighted = (weighted + total * shift) * rescale + tl.sum(tl.where(weight > 0.0, weight * below, 0.0), 0)
        total = total * rescale + tl.sum(weight, 0)
        maximum = higher
    has_target = (target >= 0) & (target < real)
    target_z = tl.load(row_logits + target, mask=has_target, other=0.0).to(tl.float32) * scale
    tl.store(highest + row, maximum)
    tl.store(sums + row, total)
    tl.store(sums + num_rows + row, tl.where(has_target, target_z - maximum, 0.0))
    tl.store(sums + 2 * num_rows + row, weighted)


@triton.jit
def _gradient_of_row(
    logits, row_stride, targets, real, width, scale, grad_logprobs, grad_entropies, normalizers, entropies, result,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_real = column < real
    scaled = tl.load(logits + row * row_stride + column, mask=is_real, other=-float("inf")).to(tl.float32) * scale
    logp = tl.where(is_real, scaled - tl.load(normalizers + row), 0.0)
    p = tl.where(is_real, tl.exp(logp), 0.0)
    grad_logprob, grad_entropy = tl.load(grad_logprobs + row), tl.load(grad_entropies + row)
    is_target = column == tl.load(targets + row)
    z_gradient = grad_logprob * (tl.where(is_target, 1.0, 0.0) - p)
    z_gradient -= tl.where(p > 0.0, grad_entropy * p * (logp + tl.load(entropies + row)), 0.0)
    gradient = tl.where(is_real, z_gradient * scale, 0.0).to(result.dtype.element_ty)
    tl.store(result + row * width + column, gradient, mask=column < width)
