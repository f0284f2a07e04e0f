"""Drawing tokens so that the draw depends on the row and the position alone.

A token is the inverse of the cumulative distribution at a uniform number hashed from (seed, row, position). Batches,
slots, layouts and devices therefore do not change what is drawn, beyond what they change in the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.runtime.device.abilities import has_kernels
from meshwright.runtime.generation.records import Numbers, Reals

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio

_HASHED_AT_ONCE = 128
"""Positions whose uniform numbers are hashed together."""

_PART_BITS = 24
"""That number such parts of a response, which is then shorter than 2^31."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The policy, softmax(logits / temperature) over all tokens, and the filters by which tokens are drawn from it.

    Filters are no policy of their own: a token's log-probability is the policy's, whatever was left beside it. It is
    what the trainer computes of the same token, so that a fresh token weighs one against the policy that drew it, and
    neither a loss nor a weight depends on how a plan samples. Log-probabilities over what a filter left would put the
    share S of the policy that it left into every ratio (https://github.com/huggingface/trl/issues/6789).

    What is accepted: with q = policy / S the distribution that is drawn from, E_q[A grad log policy] is
    E_q[A grad log q] + E_q[A] grad log S. The second term, which would raise what the filters leave, is nothing where
    advantages have mean zero under q, and the critic learns the returns of q. Ratios of stale tokens leave out how S
    changed since. The exact way keeps the set of tokens that was left at each position for the trainer to renormalise
    over, the "keep sampling mask" of DeepSeek-V3.2 (arXiv:2512.02556, section 3.1).
    """

    temperature: float = 1.0
    """0 is greedy: the likeliest token, with probability one."""
    top_k: int = 0
    """Only the k likeliest tokens, and those that tie with the last of them; 0 is all."""
    top_p: float = 1.0
    """Of what top_k left and renormalised: the fewest likeliest tokens whose probabilities reach p, with ties."""

    def draw(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B] int64 and their log-probabilities [B] fp32, from logits [B, V] and numbers [B] in [0, 1).

        Greedy tokens have log-probability 0: the policy at temperature 0 has no other.
        """
        if self.temperature == 0.0:
            tokens = logits.argmax(dim=-1)
            return tokens, torch.zeros_like(tokens, dtype=torch.float32)
        if has_kernels(logits.device) and not self.is_filtered(logits.shape[-1]):
            from meshwright.runtime.kernels.token_draws import draw  # noqa: PLC0415 - there is Triton

            return draw(logits, uniform, self.temperature)
        scaled = logits.float() if self.temperature == 1.0 else logits.float() / self.temperature
        left, last = self._filtered(scaled), scaled.shape[-1] - 1
        policy = scaled.softmax(dim=-1)
        weights = policy if left is scaled else policy.masked_fill(left.isneginf(), 0.0)
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        of_left = cumulative.narrow(1, last, 1)
        tokens = torch.searchsorted(cumulative, of_left * uniform.unsqueeze(1), right=True).clamp_(max=last)
        # Of many tokens a sum in fp32, which softmax divides by, is known to five digits.
        total = of_left if left is scaled else policy.sum(dim=-1, keepdim=True, dtype=torch.float64)
        return tokens.squeeze(1), (policy.gather(1, tokens) / total).log_().squeeze(1).float()

    def is_filtered(self, num_tokens: int) -> bool:
        """Whether some of so many tokens may not be drawn."""
        return 0 < self.top_k < num_tokens or self.top_p < 1.0

    def _filtered(self, scaled: Tensor) -> Tensor:
        """Logits [B, V] of the tokens that may be drawn; the same tensor where all may."""
        if 0 < self.top_k < scaled.shape[-1]:
            scaled = _cut_below(scaled, scaled.topk(self.top_k).values[:, -1:])
        if self.top_p < 1.0:
            scaled = _cut_below(scaled, _nucleus_end(scaled, self.top_p))
        return scaled


def uniforms(seed: int, rows: Numbers, positions: Numbers) -> Reals:
    """Numbers [B] in [0, 1), one for each (row, position) pair: [B] both, or shapes that broadcast.

    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) applied to each of the three in turn, in unsigned 64-bit numbers.
    """
    state = np.full(1, seed & (2**64 - 1), dtype=np.uint64)
    for part in (rows, positions):
        state = _mix(state ^ _mix(part.astype(np.uint64) + _GOLDEN))
    found: Reals = (state >> np.uint64(11)) * np.float64(2.0**-53)
    return found


class Uniforms:
    """The numbers that decide the next token of each row, hashed many positions at a time."""

    def __init__(self, seed: int, num_rows: int) -> None:
        self._seed = seed
        self._hashed = np.zeros((num_rows, _HASHED_AT_ONCE))
        self._keys = np.full(num_rows, -1)
        """What was hashed of each row: its draw, and its first position over `_HASHED_AT_ONCE`, in one number."""

    def of(self, rows: Numbers, draws: Numbers, positions: Numbers) -> Tensor:
        """[B], for sequences that the draws identify, at their positions."""
        return self.ahead(rows, draws, positions, 1)[0]

    @staticmethod
    def left(positions: Numbers) -> int:
        """How many numbers there are at least from these positions on before others are hashed."""
        return _HASHED_AT_ONCE - int((positions % _HASHED_AT_ONCE).max())

    def ahead(self, rows: Numbers, draws: Numbers, positions: Numbers, count: int) -> Tensor:
        """[count, B], for so many positions from these on, at most as many as are `left`."""
        parts, places = positions // _HASHED_AT_ONCE, positions % _HASHED_AT_ONCE
        keys = (draws << _PART_BITS) + parts
        stale = self._keys[rows] != keys
        if stale.any():
            new = parts[stale, None]
            # Sequences that begin together have the same positions, whose part of the hash is then computed once.
            first = (new if (new != new[0]).any() else new[:1]) * _HASHED_AT_ONCE
            self._hashed[rows[stale]] = uniforms(self._seed, draws[stale, None], first + np.arange(_HASHED_AT_ONCE))
            self._keys[rows[stale]] = keys[stale]
        return torch.from_numpy(self._hashed[rows, places + np.arange(count)[:, None]])


def _cut_below(scaled: Tensor, lowest: Tensor) -> Tensor:
    """Logits [B, V] without those below `lowest` [B, 1]."""
    return scaled.masked_fill(scaled < lowest, -torch.inf)


def _nucleus_end(scaled: Tensor, top_p: float) -> Tensor:
    """The smallest logit [B, 1] of the fewest likeliest tokens whose probabilities reach `top_p`."""
    descending = scaled.sort(dim=-1, descending=True).values
    probabilities = descending.double().softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    count = (before < top_p).sum(dim=-1, keepdim=True)
    return descending.gather(1, count - 1)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Of numbers that nothing else needs, in place; products are taken modulo 2^64."""
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state
