"""Sampling of tokens in which the random number depends on the sequence and the position alone.

A token is the inverse of the cumulative distribution at a uniform number hashed from (seed, sequence, position).
Batches, slots, layouts and devices therefore change what is sampled only as far as they change the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from meshwright.runtime.device.capabilities import runs_triton_kernels
from meshwright.runtime.inference.slots import Numbers, Reals

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio

_HASHED_AT_ONCE = 128
"""Positions whose uniform numbers are hashed together."""

_BLOCK_BITS = 24
"""Bits of a key that hold a position divided by `_HASHED_AT_ONCE`; positions are therefore below 2^31."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The policy, softmax(logits / temperature) over all tokens, and the filters with which tokens are sampled from it.

    Unless sets are kept, filters do not change the policy: a token's log-probability is the policy's, whatever the
    filters excluded. It is what the trainer computes for the same token, so that a fresh token has importance weight 1
    against the policy that sampled it, and neither a loss nor a weight depends on how a plan samples. Log-probabilities
    renormalised over the tokens that the filters leave would put the policy's total probability S of these tokens into
    every ratio (https://github.com/huggingface/trl/issues/6789).

    This is an approximation. With q = policy / S the distribution that is sampled from, E_q[A grad log policy] is
    E_q[A grad log q] + E_q[A] grad log S. The second term, which would raise S, is zero if advantages have mean zero
    under q, and the critic learns the returns of q. Ratios of stale tokens ignore how S has changed since.

    With `keeps_mask` the method is exact: the set of unfiltered tokens of each position is kept with the sample, the
    policy is renormalised over it here, and so it is in the trainer (the "keep sampling mask" of DeepSeek-V3.2,
    arXiv:2512.02556, section 3.1). Of tokens that tie with the last of the set only as many are kept as `top_k` says.
    """

    temperature: float = 1.0
    """0 is greedy: the most likely token, with probability one."""
    top_k: int = 0
    """Sample only from the k most likely tokens, and those that tie with the last of them; 0 is all."""
    top_p: float = 1.0
    """Sample only from the fewest most likely tokens whose probabilities reach p, with ties, after top_k and
    renormalised."""
    keeps_mask: bool = False
    """Return the set of tokens that the filters leave with each token, and log-probabilities over it; needs `top_k`."""

    def kept_size(self, num_tokens: int) -> int:
        """Return the number of places for kept tokens of each position, of `num_tokens` tokens in all; 0 if no sets are
        kept."""
        return min(self.top_k, num_tokens) if self.keeps_mask else 0

    def sample_rows(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Return [2 + K, B] float64: tokens, their log-probabilities and, where sets are kept, the K places of each
        set; arguments are those of `sample`."""
        if not self.keeps_mask:
            tokens, logprobs = self.sample(logits, uniform)
            return torch.stack([tokens.double(), logprobs.double()])
        tokens, logprobs, kept = self.sample_kept(logits, uniform)
        return torch.cat([tokens.double()[None], logprobs.double()[None], kept.T.double()])

    def sample_kept(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [B] int64, their log-probabilities [B] fp32 over the kept sets, and these sets [B, K] int64 in
        the order of the vocabulary, with -1 in free places; arguments are those of `sample`.

        The tokens are those of `sample`, unless tokens tie at the end of a set.
        """
        num_tokens = logits.shape[-1]
        size = self.kept_size(num_tokens)
        if self.temperature == 0.0:
            tokens = logits.argmax(dim=-1)
            kept = F.pad(tokens.unsqueeze(1), (0, size - 1), value=-1)
            return tokens, torch.zeros_like(tokens, dtype=torch.float32), kept
        scaled = logits.float() if self.temperature == 1.0 else logits.float() / self.temperature
        policy, likeliest = scaled.softmax(dim=-1), scaled.topk(size)
        probabilities = likeliest.values.double().softmax(dim=-1)
        is_left = probabilities.cumsum(dim=-1) - probabilities < self.top_p
        kept = likeliest.indices.masked_fill(~is_left, num_tokens).sort(dim=-1).values
        is_left = kept < num_tokens
        weights = policy.gather(1, kept.clamp(max=num_tokens - 1)).double().masked_fill_(~is_left, 0.0)
        cumulative = weights.cumsum(dim=-1)
        kept_sum, last = cumulative[:, -1:], is_left.sum(dim=-1, keepdim=True) - 1
        place = torch.searchsorted(cumulative, kept_sum * uniform.unsqueeze(1), right=True).minimum(last)
        logprobs = (weights.gather(1, place) / kept_sum).log_()
        tokens = kept.gather(1, place).squeeze(1)
        return tokens, logprobs.squeeze(1).float(), kept.masked_fill(~is_left, -1)

    def sample(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [B] int64 and their log-probabilities [B] fp32, from logits [B, V] and uniform numbers [B] in
        [0, 1).

        Greedy tokens have log-probability 0: the policy at temperature 0 has no other.
        """
        if self.temperature == 0.0:
            tokens = logits.argmax(dim=-1)
            return tokens, torch.zeros_like(tokens, dtype=torch.float32)
        if runs_triton_kernels(logits.device) and not self.is_filtered(logits.shape[-1]):
            from meshwright.runtime.kernels.vocabulary import sample_tokens  # noqa: PLC0415 - needs Triton

            return sample_tokens(logits, uniform, self.temperature)
        scaled = logits.float() if self.temperature == 1.0 else logits.float() / self.temperature
        filtered, last = self._filtered(scaled), scaled.shape[-1] - 1
        policy = scaled.softmax(dim=-1)
        weights = policy if filtered is scaled else policy.masked_fill(filtered.isneginf(), 0.0)
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        kept_sum = cumulative.narrow(1, last, 1)
        tokens = torch.searchsorted(cumulative, kept_sum * uniform.unsqueeze(1), right=True).clamp_(max=last)
        # The fp32 sum over many tokens, by which softmax divides, is accurate to five digits only.
        total = kept_sum if filtered is scaled else policy.sum(dim=-1, keepdim=True, dtype=torch.float64)
        return tokens.squeeze(1), (policy.gather(1, tokens) / total).log_().squeeze(1).float()

    def is_filtered(self, num_tokens: int) -> bool:
        """True if the filters exclude some of `num_tokens` tokens."""
        return 0 < self.top_k < num_tokens or self.top_p < 1.0

    def _filtered(self, scaled: Tensor) -> Tensor:
        """Return logits [B, V], minus infinity for excluded tokens; the same tensor if none is."""
        if 0 < self.top_k < scaled.shape[-1]:
            scaled = _mask_below(scaled, scaled.topk(self.top_k).values[:, -1:])
        if self.top_p < 1.0:
            scaled = _mask_below(scaled, _nucleus_end(scaled, self.top_p))
        return scaled


def uniforms(seed: int, rows: Numbers, positions: Numbers) -> Reals:
    """Return numbers [B] in [0, 1), one for each (row, position) pair: both are [B], or of shapes that broadcast.

    Applies SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) to seed, row and position in turn, in unsigned 64-bit numbers.
    """
    state = np.full(1, seed & (2**64 - 1), dtype=np.uint64)
    for part in (rows, positions):
        state = _mix(state ^ _mix(part.astype(np.uint64) + _GOLDEN))
    numbers: Reals = (state >> np.uint64(11)) * np.float64(2.0**-53)
    return numbers


class Uniforms:
    """The uniform numbers that decide the next token of each row, hashed many positions at a time."""

    def __init__(self, seed: int, num_rows: int) -> None:
        self._seed = seed
        self._hashed = np.zeros((num_rows, _HASHED_AT_ONCE))
        self._keys = np.full(num_rows, -1)
        """The key of the numbers hashed for each row: its sample id, and its first position divided by
        `_HASHED_AT_ONCE`, in one number."""

    def at(self, rows: Numbers, sample_ids: Numbers, positions: Numbers) -> Tensor:
        """Return the numbers [B] at these positions of the sequences with these sample ids."""
        return self.ahead(rows, sample_ids, positions, 1)[0]

    @staticmethod
    def num_hashed(positions: Numbers) -> int:
        """Return how many consecutive numbers are hashed for every row from these positions on."""
        return _HASHED_AT_ONCE - int((positions % _HASHED_AT_ONCE).max())

    def ahead(self, rows: Numbers, sample_ids: Numbers, positions: Numbers, count: int) -> Tensor:
        """Return the numbers [count, B] for `count` consecutive positions from these on, at most as many as
        `num_hashed` returns."""
        blocks, offsets = positions // _HASHED_AT_ONCE, positions % _HASHED_AT_ONCE
        keys = (sample_ids << _BLOCK_BITS) + blocks
        stale = self._keys[rows] != keys
        if stale.any():
            new = blocks[stale, None]
            # Sequences that start together have the same positions, whose part of the hash is then computed once.
            first = (new if (new != new[0]).any() else new[:1]) * _HASHED_AT_ONCE
            self._hashed[rows[stale]] = uniforms(
                self._seed, sample_ids[stale, None], first + np.arange(_HASHED_AT_ONCE)
            )
            self._keys[rows[stale]] = keys[stale]
        return torch.from_numpy(self._hashed[rows, offsets + np.arange(count)[:, None]])


def _mask_below(scaled: Tensor, lowest: Tensor) -> Tensor:
    """Return logits [B, V] with minus infinity for those below `lowest` [B, 1]."""
    return scaled.masked_fill(scaled < lowest, -torch.inf)


def _nucleus_end(scaled: Tensor, top_p: float) -> Tensor:
    """Return the smallest logit [B, 1] among the fewest most likely tokens whose probabilities reach `top_p`."""
    descending = scaled.sort(dim=-1, descending=True).values
    probabilities = descending.double().softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    count = (before < top_p).sum(dim=-1, keepdim=True)
    return descending.gather(1, count - 1)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of the numbers in place, which the caller must not use again; products are modulo 2^64."""
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state
