"""Distributions over the next token from vocab-parallel logits, cut to k tokens: those that a teacher finds likeliest.

A distribution is given by the log-probabilities of its k tokens and, as one more outcome, of all other tokens together
(the rest). So it sums to 1 whatever k is, and nothing is renormalised. Logits [N, V / tp] are this rank's columns of
the padded vocabulary, as in `meshwright.runtime.model.logprobs`; results are the same on every rank of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.model.logprobs import CHUNK_ELEMENTS

LEAST_LOGPROB = -69.0
"""Lower bound on the log-probability of the rest, about 1e-30: where no other token has any probability, both
divergences stay finite."""

_TOKEN_BITS = 32
_LARGEST_TOKEN = 2**_TOKEN_BITS - 1


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the logits: `num_tokens` of them are tokens, from `first_token` on; the others pad."""

    group: dist.ProcessGroup
    first_token: int
    num_tokens: int
    temperature: float

    @classmethod
    def of(cls, logits: Tensor, group: dist.ProcessGroup, vocab_size: int, temperature: float) -> VocabShard:
        """The shard that logits [N, V / tp] are; `vocab_size` tokens are on all ranks together."""
        columns = logits.shape[-1]
        first = group.rank() * columns
        return cls(group, first, min(max(vocab_size - first, 0), columns), temperature)


@torch.no_grad()
def top_distributions(logits: Tensor, positions: Tensor, shard: VocabShard, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` likeliest tokens at each of the positions [N] among the rows of logits [T, V / tp], [N, k] int32, in
    falling order, and their log-probabilities with that of the rest after them, [N, k + 1] fp32 in nats.

    Of equally likely tokens the one with the smaller number comes first, so that the selection does not depend on how
    the vocabulary is sharded.
    """
    tokens = torch.empty(len(positions), top_k, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(len(positions), top_k + 1, dtype=torch.float32, device=logits.device)
    for part in _chunks(positions, logits):
        rows = logits[positions[part]]
        chosen = _top_tokens(rows, shard, top_k)
        tokens[part] = chosen.int()
        logprobs[part], _ = _logprobs_of(rows, chosen, shard)
    return tokens, logprobs


def logprobs_of_tokens(logits: Tensor, positions: Tensor, tokens: Tensor, shard: VocabShard) -> Tensor:
    """Log-probabilities [N, k + 1] fp32 of k different `tokens` [N, k] int64 and of the rest, at each of the positions
    [N] among the rows of logits [T, V / tp].

    It is differentiable in `logits`, by torch operators over chunks of rows.
    """
    logprobs: Tensor = _LogprobsOfTokens.apply(logits, positions, tokens, shard)
    return logprobs


class _LogprobsOfTokens(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z) and r = the sum of p over the rest:

    d log p_v / dz_j = [j = v] - p_j, and d log r / dz_j = [j in the rest] p_j / r - p_j.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, positions: Tensor, tokens: Tensor, shard: VocabShard) -> Tensor:
        logprobs = torch.empty(len(tokens), tokens.shape[1] + 1, dtype=torch.float32, device=logits.device)
        normalizers = torch.empty_like(logprobs[:, 0])
        for part in _chunks(positions, logits):
            logprobs[part], normalizers[part] = _logprobs_of(logits[positions[part]], tokens[part], shard)
        ctx.save_for_backward(logits, positions, tokens, logprobs, normalizers)
        ctx.shard = shard
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor) -> tuple[Tensor, None, None, None]:
        logits, positions, tokens, logprobs, normalizers = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        gradient = torch.zeros_like(logits)
        for part in _chunks(positions, logits):
            of_tokens, rest = grad_logprobs[part, :-1], logprobs[part, -1]
            of_rest = torch.where(rest > LEAST_LOGPROB, grad_logprobs[part, -1], 0.0)
            total = of_tokens.sum(-1) + of_rest
            p = (_scaled(logits[positions[part]], shard) - normalizers[part, None]).exp_()
            grad_scaled = p * (of_rest * (-rest).exp() - total)[:, None]
            row, place = _owned(tokens[part], shard).nonzero(as_tuple=True)
            column = tokens[part][row, place] - shard.first_token
            grad_scaled[row, column] = of_tokens[row, place] - p[row, column] * total[row]
            gradient[positions[part], : shard.num_tokens] = (grad_scaled / shard.temperature).to(gradient.dtype)
        return gradient, None, None, None


def _top_tokens(logits: Tensor, shard: VocabShard, top_k: int) -> Tensor:
    """The likeliest tokens [N, k] int64 of all ranks' columns.

    Each token has one 64-bit key: the bits of its logit, in an order that integers have, before those of its number.
    """
    bits = (logits[:, : shard.num_tokens].float() + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last = torch.arange(shard.num_tokens, device=logits.device) + shard.first_token
    keys = (ordered << _TOKEN_BITS) | (_LARGEST_TOKEN - last)
    keys = keys.topk(min(top_k, shard.num_tokens)).values
    if shard.group.size() > 1:
        filled = keys.new_full((len(keys), top_k), torch.iinfo(torch.int64).min)
        filled[:, : keys.shape[1]] = keys
        gathered = keys.new_empty(shard.group.size() * len(keys), top_k)
        dist.all_gather_into_tensor(gathered, filled, group=shard.group)
        keys = gathered.view(-1, len(keys), top_k).transpose(0, 1).flatten(1).topk(top_k).values
    return _LARGEST_TOKEN - (keys & _LARGEST_TOKEN)


def _logprobs_of(logits: Tensor, tokens: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N, k + 1] of the tokens and of the rest, and the logarithms [N] of the normalizers."""
    scaled = _scaled(logits, shard)
    highest = scaled.amax(-1) if shard.num_tokens else scaled.new_full((len(scaled),), -torch.inf)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
    scaled -= highest[:, None]
    row, place = _owned(tokens, shard).nonzero(as_tuple=True)
    column = tokens[row, place] - shard.first_token
    sums = scaled.new_zeros(len(tokens), tokens.shape[1] + 2)
    sums[row, place] = scaled[row, column]
    weights = scaled.exp_()
    sums[:, -1] = weights.sum(-1)
    weights[row, column] = 0.0
    sums[:, -2] = weights.sum(-1)
    dist.all_reduce(sums, group=shard.group)
    normalizer = sums[:, -1].log()
    rest = (sums[:, -2].log() - normalizer).clamp(min=LEAST_LOGPROB)
    logprobs = torch.cat([sums[:, :-2] - normalizer[:, None], rest[:, None]], dim=1)
    return logprobs, highest + normalizer


def _scaled(logits: Tensor, shard: VocabShard) -> Tensor:
    return logits[:, : shard.num_tokens].float() / shard.temperature


def _owned(tokens: Tensor, shard: VocabShard) -> Tensor:
    return (tokens >= shard.first_token) & (tokens < shard.first_token + shard.num_tokens)


def _chunks(positions: Tensor, logits: Tensor) -> list[slice]:
    """Slices of the positions, each of at most half of `CHUNK_ELEMENTS` logits or one row: keys have twice the
    bytes."""
    size = max(1, CHUNK_ELEMENTS // 2 // logits.shape[-1])
    return [slice(start, start + size) for start in range(0, len(positions), size)]
