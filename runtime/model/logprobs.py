"""Log-probabilities and entropies of tokens from vocab-parallel logits, sharded over tensor-parallel ranks.

The process group is an argument, since Megatron's cross entropy would take a global one:
https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/tensor_parallel/cross_entropy.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.device.capabilities import runs_triton_kernels

CHUNK_ELEMENTS = 2**25
"""Number of logits that are converted to fp32 at once: 128 MiB."""


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target and, if `with_entropy`, the entropy of its distribution.

    `logits` [S, B, V / tp] are this rank's columns of the padded vocabulary, of which the first `vocab_size` over all
    ranks are tokens; `targets` [B, S] int64 are tokens, already shifted. Both results are [B, S] fp32 in nats, the same
    on every rank of `group`, of softmax(logits / temperature) over the tokens without padding. With `kept` [B, S, K]
    int64, the sampling mask, they are of the softmax over the tokens of each position's set alone, whose free places
    are -1; both results are 0 where the set is empty.

    It is differentiable in `logits`. Only some tokens are converted to fp32 at a time; the backward pass recomputes the
    probabilities from the logits and one or two saved numbers per token.
    """
    columns = logits.shape[-1]
    first = group.rank() * columns
    shape = logits.shape[:2]
    if kept is not None:
        of_rows = _KeptShard(kept.transpose(0, 1).flatten(0, 1), first, temperature, group)
        logprobs, entropies = _KeptLogprobs.apply(logits.flatten(0, 1), targets.T.reshape(-1), of_rows)
        return logprobs.view(shape).T, entropies.view(shape).T if with_entropy else None
    shard = _VocabShard(
        group=group,
        num_tokens=min(max(vocab_size - first, 0), columns),
        temperature=temperature,
        with_entropy=with_entropy,
    )
    logprobs, entropies = _TokenLogprobs.apply(logits.flatten(0, 1), targets.T.reshape(-1) - first, shard)
    return logprobs.view(shape).T, entropies.view(shape).T if with_entropy else None


_RowValues = tuple[Tensor, Tensor, Tensor, Tensor]
"""The values that the backward pass needs of each row: the gradients of log-probabilities and entropies, the logarithms
of normalizers, and the entropies, [N] fp32 each."""


def cap_logits(logits: Tensor, cap: float, num_tokens: int) -> Tensor:
    """Replaces this rank's logits l [S, B, V / tp] in place by cap x tanh(l / cap), and returns them.

    The columns from `num_tokens` on, which pad the vocabulary, keep their values and have no gradient.
    """
    capped: Tensor = _CappedLogits.apply(logits, cap, num_tokens)
    return capped


class _CappedLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, cap: float, num_tokens: int) -> Tensor:
        logits[..., :num_tokens].div_(cap).tanh_().mul_(cap)
        ctx.mark_dirty(logits)
        ctx.save_for_backward(logits)
        ctx.cap, ctx.num_tokens = cap, num_tokens
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """With c = cap tanh(l / cap): dc/dl = 1 - (c / cap)^2."""
        [capped], tokens = ctx.saved_tensors, slice(ctx.num_tokens)
        uncapped = torch.zeros_like(gradient)
        slopes = uncapped[..., tokens].copy_(capped[..., tokens]).div_(ctx.cap).square_().neg_().add_(1)
        slopes.mul_(gradient[..., tokens])
        return uncapped, None, None


@dataclass(frozen=True, kw_only=True)
class _VocabShard:
    """This rank's columns of the logits, and the parameters of the softmax."""

    group: dist.ProcessGroup
    num_tokens: int  # columns that are tokens; the others pad the vocabulary
    temperature: float
    with_entropy: bool

    def owned(self, targets: Tensor) -> Tensor:
        return (targets >= 0) & (targets < self.num_tokens)


class _TokenLogprobs(torch.autograd.Function):
    """The autograd function over flat rows: logits [N, V / tp], and targets [N] relative to this rank's first column.

    With z = logits / temperature, p = softmax(z), L = log-probability of the target and H = entropy:
    dL/dz = onehot(target) - p and dH/dz = -p (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: _VocabShard) -> tuple[Tensor, Tensor]:
        results = (
            _by_kernel(logits, targets, shard)
            if runs_triton_kernels(logits.device)
            else _by_chunks(logits, targets, shard)
        )
        logprobs, entropies, normalizers = results
        ctx.save_for_backward(logits, targets, normalizers, entropies)
        ctx.shard = shard
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, normalizers, entropies = ctx.saved_tensors
        row_values = grad_logprobs, grad_entropies, normalizers, entropies
        gradient = _gradient_by_kernel if runs_triton_kernels(logits.device) else _gradient_by_chunks
        return gradient(logits, targets, ctx.shard, row_values), None, None


class _KeptShard(NamedTuple):
    """The sampling masks [N, K] of flat rows, this rank's first token, and the parameters of the softmax."""

    kept: Tensor
    first: int
    temperature: float
    group: dist.ProcessGroup

    def columns(self, num_columns: int) -> tuple[Tensor, Tensor]:
        """The columns [N, K] of kept tokens among this rank's, and which of them it has; others have column 0."""
        columns = self.kept - self.first
        owned = (self.kept >= 0) & (columns >= 0) & (columns < num_columns)
        return columns.masked_fill(~owned, 0), owned


class _KeptLogprobs(torch.autograd.Function):
    """The autograd function over flat rows with sampling masks: logits [N, V / tp], and targets [N] as numbers of the
    whole vocabulary.

    Only the logits of kept tokens are read, and only they have a gradient. With z = logits / temperature and
    p = softmax(z) over the set: dL/dz = onehot(target) - p and dH/dz = -p (log p + H) for tokens of the set.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: _KeptShard) -> tuple[Tensor, Tensor]:
        columns, owned = shard.columns(logits.shape[-1])
        scaled = (logits.gather(1, columns).float() / shard.temperature).masked_fill_(~owned, -torch.inf)
        highest = scaled.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
        highest = highest.masked_fill_(highest == -torch.inf, 0.0)  # of an empty set
        scaled -= highest.unsqueeze(-1)
        weights = scaled.exp()
        chosen = owned & (shard.kept == targets.unsqueeze(-1))
        terms = weights, torch.where(chosen, scaled, 0.0), torch.where(owned, weights * scaled, 0.0)
        sums = torch.stack([term.sum(-1) for term in terms])
        dist.all_reduce(sums, group=shard.group)
        total, target, weighted = sums
        is_empty = total == 0.0
        normalizers = total.masked_fill(is_empty, 1.0).log()
        entropies = normalizers - torch.where(is_empty, 0.0, weighted / total)
        ctx.save_for_backward(logits, targets, highest + normalizers, entropies)
        ctx.shard = shard
        return target - normalizers, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, normalizers, entropies = ctx.saved_tensors
        shard = ctx.shard
        columns, owned = shard.columns(logits.shape[-1])
        logp = logits.gather(1, columns).float() / shard.temperature - normalizers.unsqueeze(-1)
        p = logp.exp()
        of_logprobs = (shard.kept == targets.unsqueeze(-1)).float() - p
        of_entropies = -p * (logp + entropies.unsqueeze(-1))
        slopes = grad_logprobs.unsqueeze(-1) * of_logprobs + grad_entropies.unsqueeze(-1) * of_entropies
        slopes = torch.where(owned, slopes / shard.temperature, 0.0).to(logits.dtype)
        return torch.zeros_like(logits).scatter_add_(1, columns, slopes), None, None


def _by_kernel(logits: Tensor, targets: Tensor, shard: _VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and the logarithms of the normalizers, [N] each, by a Triton kernel."""
    from meshwright.runtime.kernels.vocabulary import softmax_sums  # noqa: PLC0415 - needs Triton

    highest, sums = softmax_sums(logits, targets, shard.num_tokens, shard.temperature)
    if shard.group.size() > 1:
        highest, sums = _reduce_sums(highest, sums, shard, targets)
    total, target, weighted = sums
    normalizer = total.log()
    return target - normalizer, normalizer - weighted / total, highest + normalizer


def _reduce_sums(local_highest: Tensor, sums: Tensor, shard: _VocabShard, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logits [N] and the sums [3, N] over the columns of all ranks, from those over this rank's."""
    highest = local_highest.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
    difference = torch.where(local_highest == -torch.inf, 0.0, local_highest - highest)
    total, target, weighted = sums
    scale = difference.exp()
    target = torch.where(shard.owned(targets), target + difference, 0.0)
    reduced = torch.stack([total * scale, target, (weighted + total * difference) * scale])
    dist.all_reduce(reduced, group=shard.group)
    return highest, reduced


def _gradient_by_kernel(logits: Tensor, targets: Tensor, shard: _VocabShard, row_values: _RowValues) -> Tensor:
    from meshwright.runtime.kernels.vocabulary import logits_gradient  # noqa: PLC0415 - needs Triton

    grad_logprobs, grad_entropies, normalizers, entropies = row_values
    grad_entropies = grad_entropies if shard.with_entropy else torch.zeros_like(grad_logprobs)
    return logits_gradient(
        logits, targets, shard.num_tokens, shard.temperature, (grad_logprobs, grad_entropies, normalizers, entropies)
    )


def _by_chunks(logits: Tensor, targets: Tensor, shard: _VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `_by_kernel`, by torch operators over chunks of rows."""
    logprobs = logits.new_zeros(len(logits), dtype=torch.float32)
    entropies, normalizers = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
    for rows in _chunks(logits):
        scaled = logits[rows, : shard.num_tokens].float() / shard.temperature
        highest = scaled.amax(-1) if shard.num_tokens else scaled.new_full((len(scaled),), -torch.inf)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
        scaled -= highest.unsqueeze(-1)
        weights = scaled.exp()
        # One all-reduce of three: the sum of exponentials, the target's logit, and the weighted sum for the entropy.
        sums = torch.stack([weights.sum(-1), _target_logits(scaled, targets[rows], shard), (weights * scaled).sum(-1)])
        dist.all_reduce(sums, group=shard.group)
        total, target, weighted = sums
        logprobs[rows] = target - total.log()
        entropies[rows] = total.log() - weighted / total
        normalizers[rows] = highest + total.log()
    return logprobs, entropies, normalizers


def _gradient_by_chunks(logits: Tensor, targets: Tensor, shard: _VocabShard, row_values: _RowValues) -> Tensor:
    grad_logprobs, grad_entropies, normalizers, entropies = row_values
    gradient = torch.zeros_like(logits)
    for rows in _chunks(logits):
        logp = logits[rows, : shard.num_tokens].float() / shard.temperature - normalizers[rows].unsqueeze(-1)
        p = logp.exp()
        grad_scaled = -grad_logprobs[rows].unsqueeze(-1) * p
        owned = shard.owned(targets[rows]).nonzero().squeeze(-1)
        grad_scaled[owned, targets[rows][owned]] += grad_logprobs[rows][owned]
        if shard.with_entropy:
            grad_scaled -= grad_entropies[rows].unsqueeze(-1) * p * (logp + entropies[rows].unsqueeze(-1))
        gradient[rows, : shard.num_tokens] = (grad_scaled / shard.temperature).to(gradient.dtype)
    return gradient


def _target_logits(scaled: Tensor, targets: Tensor, shard: _VocabShard) -> Tensor:
    """The logits of the targets [N], zero for the targets of other ranks."""
    target_logits = scaled.new_zeros(len(scaled))
    owned = shard.owned(targets).nonzero().squeeze(-1)
    target_logits[owned] = scaled[owned, targets[owned]]
    return target_logits


def _chunks(logits: Tensor) -> list[slice]:
    """Slices of the rows of logits [N, V / tp], each of at most `CHUNK_ELEMENTS` logits or one row."""
    rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]
