"""Samples a token of every row from the softmax of its logits, which are read once, in their own type.

Like `Sampling.draw` it inverts the cumulative distribution at a uniform number: it sums the weights of each tile of the
vocabulary, chooses a tile, then a token of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SAMPLING_TILE = 2048


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
