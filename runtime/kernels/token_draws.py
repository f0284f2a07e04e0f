"""Draws a token of every row from the softmax of its logits, which are read once, in the type that they have.

As `Sampling.draw` does, the inverse of the cumulative distribution at a uniform number: tiles of the vocabulary are
weighed first, then a tile is drawn, then a token of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048


def draw(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and their log-probabilities [B] fp32 under softmax(logits / temperature).

    From logits [B, V] whose last dimension is dense, and numbers [B] fp64 in [0, 1).
    """
    num_rows, width = logits.shape
    num_tiles = triton.cdiv(width, _TILE)
    weighed = torch.empty(2, num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _weigh_tiles[num_rows, num_tiles](
        logits, logits.stride(0), width, 1.0 / temperature, weighed, num_tiles, TILE=_TILE, num_warps=4
    )
    _draw_token[(num_rows,)](
        logits, logits.stride(0), width, 1.0 / temperature, weighed, num_tiles, uniform, tokens, logprobs,
        TILE=_TILE, TILES=triton.next_power_of_2(num_tiles), num_warps=8,
    )  # fmt: skip
    return tokens, logprobs


@triton.jit(do_not_specialize=["num_tiles"])
def _weigh_tiles(logits, row_stride, width, scale, weighed, num_tiles, TILE: tl.constexpr):
    """Of each tile the largest scaled logit, and behind those of all the sum of exponentials at it."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    scaled = (
        tl.load(logits + row * row_stride + column, mask=column < width, other=-float("inf")).to(tl.float32) * scale
    )
    highest = tl.max(scaled, 0)
    at = tl.where(highest == -float("inf"), 0.0, highest)
    tl.store(weighed + row * num_tiles + tile, highest)
    tl.store(weighed + (tl.num_programs(0) + row) * num_tiles + tile, tl.sum(tl.exp(scaled - at), 0))


@triton.jit(do_not_specialize=["num_tiles"])
def _draw_token(
    logits, row_stride, width, scale, weighed, num_tiles, uniform, tokens, logprobs,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    is_tile = tile < num_tiles
    of_tile = tl.load(weighed + row * num_tiles + tile, mask=is_tile, other=-float("inf"))
    highest = tl.max(of_tile, 0)
    sums = tl.load(weighed + (tl.num_programs(0) + row) * num_tiles + tile, mask=is_tile, other=0.0)
    weights = sums.to(tl.float64) * tl.exp(of_tile - highest).to(tl.float64)
    total = tl.sum(weights, 0)
    wanted = tl.load(uniform + row) * total
    last_tile = tl.max(tl.where(weights > 0.0, tile, 0), 0)
    chosen = tl.minimum(tl.sum((tl.cumsum(weights, 0) <= wanted).to(tl.int32), 0), last_tile)
    wanted -= tl.sum(tl.where(tile < chosen, weights, 0.0), 0)

    within = tl.arange(0, TILE)
    column = chosen * TILE + within
    scaled = (
        tl.load(logits + row * row_stride + column, mask=column < width, other=-float("inf")).to(tl.float32) * scale
    )
    weight = tl.exp(scaled - highest).to(tl.float64)
    last = tl.max(tl.where(weight > 0.0, within, 0), 0)
    token = tl.minimum(tl.sum((tl.cumsum(weight, 0) <= wanted).to(tl.int32), 0), last)
    logit = tl.sum(tl.where(within == token, scaled, 0.0), 0)
    tl.store(tokens + row, (chosen * TILE + token).to(tl.int64))
    tl.store(logprobs + row, (logit - highest).to(tl.float64) - tl.log(total))
