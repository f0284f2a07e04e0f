"""Log-probabilities and entropies of tokens from logits whose vocabulary is cut over tensor-parallel ranks.

The group is the model's own: megatron's cross entropy would ask for a global one.
https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/tensor_parallel/cross_entropy.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.device.abilities import has_kernels

CHUNK_ELEMENTS = 2**25
"""Logits that are held in fp32 at once, 128 MiB of them."""


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and the entropy of the distribution it is drawn from if `with_entropy`.

    `logits` [S, B, V / tp] are this rank's columns of the padded vocabulary, of which the first `vocab_size` over all
    ranks are tokens; `targets` [B, S] int64 are tokens, already shifted. Both answers are [B, S] fp32 in nats, the
    same on every rank of `group`, of softmax(logits / temperature) over the tokens alone.

    Differentiable in `logits`. In fp32 only some tokens are held at a time; the backward pass computes the
    probabilities again and keeps nothing but one number per token, or two.
    """
    columns = logits.shape[-1]
    first = group.rank() * columns
    cut = _Cut(
        group=group,
        real=min(max(vocab_size - first, 0), columns),
        temperature=temperature,
        with_entropy=with_entropy,
    )
    logprobs, entropies = _TokenLogprobs.apply(logits.flatten(0, 1), targets.T.reshape(-1) - first, cut)
    shape = logits.shape[:2]
    return logprobs.view(shape).T, entropies.view(shape).T if with_entropy else None


_OfRows = tuple[Tensor, Tensor, Tensor, Tensor]
"""The gradients of log-probabilities and entropies, the logarithms of normalizers, and the entropies, [N] fp32 each."""


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """What this rank's columns are of."""

    group: dist.ProcessGroup
    real: int  # columns that are tokens; the others pad the vocabulary
    temperature: float
    with_entropy: bool

    def owned(self, targets: Tensor) -> Tensor:
        return (targets >= 0) & (targets < self.real)


class _TokenLogprobs(torch.autograd.Function):
    """Over flat tokens: logits [N, V / tp], local targets [N], which lie among the real columns of one rank only.

    With z = logits / temperature, p = softmax(z), L = log-probability of the target and H = entropy:
    dL/dz = onehot(target) - p and dH/dz = -p (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, cut: _Cut) -> tuple[Tensor, Tensor]:
        found = _by_kernel(logits, targets, cut) if has_kernels(logits.device) else _by_chunks(logits, targets, cut)
        logprobs, entropies, normalizers = found
        ctx.save_for_backward(logits, targets, normalizers, entropies)
        ctx.cut = cut
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, normalizers, entropies = ctx.saved_tensors
        of_rows = of_logprobs, of_entropies, normalizers, entropies
        gradient = _gradient_by_kernel if has_kernels(logits.device) else _gradient_by_chunks
        return gradient(logits, targets, ctx.cut, of_rows), None, None


def _by_kernel(logits: Tensor, targets: Tensor, cut: _Cut) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and the logarithms of the normalizers, [N] each."""
    from meshwright.runtime.kernels.token_logprobs import sums_of_rows  # noqa: PLC0415 - there is Triton

    highest, sums = sums_of_rows(logits, targets, cut.real, cut.temperature)
    if cut.group.size() > 1:
        highest, sums = _joined(highest, sums, cut, targets)
    total, target, weighted = sums
    normalizer = total.log()
    return target - normalizer, normalizer - weighted / total, highest + normalizer


def _joined(mine: Tensor, sums: Tensor, cut: _Cut, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logits [N] and the sums [3, N] over the columns of all ranks, from those of this rank's."""
    highest = mine.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=cut.group)
    lower = torch.where(mine == -torch.inf, 0.0, mine - highest)
    total, target, weighted = sums
    share = lower.exp()
    target = torch.where(cut.owned(targets), target + lower, 0.0)
    joined = torch.stack([total * share, target, (weighted + total * lower) * share])
    dist.all_reduce(joined, group=cut.group)
    return highest, joined


def _gradient_by_kernel(logits: Tensor, targets: Tensor, cut: _Cut, of_rows: _OfRows) -> Tensor:
    from meshwright.runtime.kernels.token_logprobs import gradient  # noqa: PLC0415 - there is Triton

    of_logprobs, of_entropies, normalizers, entropies = of_rows
    of_entropies = of_entropies if cut.with_entropy else torch.zeros_like(of_logprobs)
    return gradient(logits, targets, cut.real, cut.temperature, (of_logprobs, of_entropies, normalizers, entropies))


def _by_chunks(logits: Tensor, targets: Tensor, cut: _Cut) -> tuple[Tensor, Tensor, Tensor]:
    """As `_by_kernel`."""
    logprobs = logits.new_zeros(len(logits), dtype=torch.float32)
    entropies, normalizers = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
    for rows in _chunks(logits):
        scaled = logits[rows, : cut.real].float() / cut.temperature
        highest = scaled.amax(-1) if cut.real else scaled.new_full((len(scaled),), -torch.inf)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=cut.group)
        scaled -= highest.unsqueeze(-1)
        weights = scaled.exp()
        # One message: the sum of the exponentials, the target's logit, and the sum that the entropy needs.
        sums = torch.stack([weights.sum(-1), _chosen(scaled, targets[rows], cut), (weights * scaled).sum(-1)])
        dist.all_reduce(sums, group=cut.group)
        total, target, weighted = sums
        logprobs[rows] = target - total.log()
        entropies[rows] = total.log() - weighted / total
        normalizers[rows] = highest + total.log()
    return logprobs, entropies, normalizers


def _gradient_by_chunks(logits: Tensor, targets: Tensor, cut: _Cut, of_rows: _OfRows) -> Tensor:
    of_logprobs, of_entropies, normalizers, entropies = of_rows
    gradient = torch.zeros_like(logits)
    for rows in _chunks(logits):
        logp = logits[rows, : cut.real].float() / cut.temperature - normalizers[rows].unsqueeze(-1)
        p = logp.exp()
        of_logits = -of_logprobs[rows].unsqueeze(-1) * p
        own = cut.owned(targets[rows]).nonzero().squeeze(-1)
        of_logits[own, targets[rows][own]] += of_logprobs[rows][own]
        if cut.with_entropy:
            of_logits -= of_entropies[rows].unsqueeze(-1) * p * (logp + entropies[rows].unsqueeze(-1))
        gradient[rows, : cut.real] = (of_logits / cut.temperature).to(gradient.dtype)
    return gradient


def _chosen(scaled: Tensor, targets: Tensor, cut: _Cut) -> Tensor:
    """The targets' own logits [N], zero for the targets of other ranks."""
    chosen = scaled.new_zeros(len(scaled))
    own = cut.owned(targets).nonzero().squeeze(-1)
    chosen[own] = scaled[own, targets[own]]
    return chosen


def _chunks(logits: Tensor) -> list[slice]:
    """Rows of [N, V / tp] logits, few enough at a time for `CHUNK_ELEMENTS`."""
    rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]
