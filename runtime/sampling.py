"""Drawing tokens so that the draw depends on the row and the position alone.

A token is the inverse of the cumulative distribution at a uniform number hashed from (seed, row, position). Batches,
slots, layouts and devices therefore do not change what is drawn, beyond what they change in the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as a signed number


def uniforms(seed: int, rows: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1), float64 [B], one for each (row, position) pair; both int64 [B].

    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) applied to each of the three in turn.
    """
    state = torch.full_like(rows, _signed(seed))
    for part in (rows, positions):
        state = _mix(state ^ _mix(part + _GOLDEN))
    return (_logical_shift(state, 11)).double() * 2.0**-53


def sample(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and their log-probabilities [B] fp32, drawn from softmax(logits [B, V] / temperature)."""
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0].float()


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _logical_shift(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _logical_shift(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _logical_shift(state, 31)


def _logical_shift(state: Tensor, bits: int) -> Tensor:
    """An unsigned right shift of signed 64-bit numbers."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
