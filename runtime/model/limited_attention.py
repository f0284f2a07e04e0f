"""Attention with a sliding window, in chunks, with capped scores or sinks, in blocks of queries.

A block needs only the keys from the start of its first query's window on, so that with a window of W tokens the scores
of S tokens are S x 2 W at most. No kernel of torch caps scores (Gemma 2, arXiv:2408.00118, section 2): they are
computed with its products, one block at a time, and again in the backward pass. So are those of heads with a sink: a
learned number that takes part in the softmax as the score of a token without a value (Xiao et al., arXiv:2309.17453).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.profiles.model_shape import ModelSpec

BLOCK_SCORES = 2**23
"""Maximum number of scores of one block, 32 MiB in fp32, unless a block with the minimum of queries has more."""
MIN_BLOCK_QUERIES = 16


@dataclass(frozen=True)
class AttentionLimits:
    """The limits of the attention of a layer: the tokens of its window, the cap of its scores, and its sinks."""

    window: int = 0
    """A token attends to this many tokens up to itself; 0: to all."""
    cap: float = 0.0
    """Scores s are cap x tanh(s / cap); 0: they are not capped."""
    sinks: Tensor | None = field(default=None, compare=False)
    """The sink of each head, [heads] or [B, heads]."""
    chunked: bool = False
    """The window does not slide: a token attends to those of its own chunk of `window` tokens up to itself."""

    def apply_to(self, num_keys: int) -> bool:
        """True if attention to `num_keys` tokens differs from that without limits."""
        return self.cap > 0 or self.sinks is not None or 0 < self.window < num_keys


def attention_limits(spec: ModelSpec, layer: int) -> AttentionLimits:
    """The limits of layer number `layer` of the whole model, without its sinks, which are parameters."""
    has_window = spec.window is not None and spec.window.has_layer(layer)
    if spec.window is None or not has_window:
        return AttentionLimits(cap=spec.attention_cap)
    return AttentionLimits(spec.window.num_tokens, spec.attention_cap, chunked=spec.window.chunked)


def has_limits(spec: ModelSpec) -> bool:
    """True if any layer of the model has a window, capped scores or sinks."""
    return spec.window is not None or spec.attention_cap > 0 or spec.attention_sinks


def attend_limited(query: Tensor, keys: Tensor, values: Tensor, limits: AttentionLimits) -> Tensor:
    """Attention [B, heads, S, D] of the query [B, heads, S, D] to keys and values [B, kv_heads, T, D], of which the
    last of S queries sees the last within the limits, and each query before it one fewer. The first of T keys is that
    of the first token of its row."""
    num_rows, num_heads, num_queries, _ = query.shape
    kv_heads, num_keys = keys.shape[1:3]
    window = limits.window or num_keys
    block = max(MIN_BLOCK_QUERIES, BLOCK_SCORES // (num_rows * num_heads * min(num_keys, 2 * window)))
    if limits.window:
        block = min(block, max(MIN_BLOCK_QUERIES, window))
    outputs = []
    for first in range(0, num_queries, block):
        queries = query[:, :, first : first + block]
        end = num_keys - num_queries + first + queries.shape[2]
        start = max(0, end - queries.shape[2] - window + 1)
        mask = _mask(queries.shape[2], end - start, window, query.device)
        if limits.chunked:
            mask &= _same_chunk(start, end, queries.shape[2], window, query.device)
        # The query heads of a group become more queries of their key head: kernels with a mask would copy its keys.
        grouped = queries.reshape(num_rows, kv_heads, -1, query.shape[-1])
        mask = mask.repeat(num_heads // kv_heads, 1)
        sinks = _sinks_of_queries(limits.sinks, kv_heads, queries.shape[2])
        attended = attend_masked(grouped, keys[:, :, start:end], values[:, :, start:end], mask, limits.cap, sinks)
        outputs.append(attended.reshape(queries.shape))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _sinks_of_queries(sinks: Tensor | None, kv_heads: int, num_queries: int) -> Tensor | None:
    """The sinks [heads] or [B, heads] for the queries of each group, [1 or B, kv_heads, heads / kv_heads * queries,
    1]."""
    if sinks is None:
        return None
    groups = sinks.view(-1, kv_heads, sinks.shape[-1] // kv_heads, 1)
    return groups.expand(-1, -1, -1, num_queries).flatten(2).unsqueeze(-1)


def _mask(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """True for the keys that each query sees, [queries, keys]; the last query is at the last key."""
    positions = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    key_positions = torch.arange(num_keys, device=device)
    return (key_positions <= positions) & (key_positions > positions - window)


def _same_chunk(start: int, end: int, num_queries: int, chunk: int, device: torch.device) -> Tensor:
    """True for the keys of positions `start` to `end` - 1 in the chunk of each query, [queries, keys].

    The last query is at the last key.
    """
    chunks = torch.arange(start, end, device=device) // chunk
    return chunks[-num_queries:, None] == chunks


def attend_masked(  # noqa: PLR0917 - it is called as attention is
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, cap: float, sinks: Tensor | None = None
) -> Tensor:
    """Attention [B, heads, S, D] of the query [B, heads, S, D] to keys and values [B, heads, T, D] where the mask,
    which is broadcast to [B, heads, S, T], is True; scores are capped if `cap` is not 0. Sinks are broadcast to [B,
    heads, S, 1]."""
    if not cap and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    attended: Tensor = _OwnAttention.apply(query, keys, values, mask, cap, sinks)
    return attended


class _OwnAttention(torch.autograd.Function):
    """Attention with capped scores or sinks, which saves its inputs only."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes no keywords
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, cap: float, sinks: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(query, keys, values, mask, sinks)
        ctx.cap = cap
        weights, *_ = _weights(query, keys, mask, cap, sinks)
        return weights.to(values.dtype) @ values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, Tensor | None]:
        """With weights p = softmax(cap t), t = tanh(s / cap): ds = p (dp - sum p dp) (1 - t^2).

        A sink has the weight p0 and no value, so that dp0 is 0 and its gradient -p0 sum p dp.
        """
        query, keys, values, mask, sinks = ctx.saved_tensors
        weights, tanh, sink_weight = _weights(query, keys, mask, ctx.cap, sinks)
        of_values = weights.to(values.dtype).transpose(-2, -1) @ gradient
        of_weights = (gradient @ values.transpose(-2, -1)).float()
        mean = (of_weights * weights).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - mean) * query.shape[-1] ** -0.5
        if tanh is not None:
            of_scores = of_scores * (1 - tanh.square())
        of_sinks = None if sink_weight is None else (-sink_weight * mean).sum_to_size(sinks.shape).to(sinks.dtype)
        of_scores = of_scores.to(query.dtype)
        return of_scores @ keys, of_scores.transpose(-2, -1) @ query, of_values, None, None, of_sinks


def _weights(
    query: Tensor, keys: Tensor, mask: Tensor, cap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Weights of keys [B, heads, S, T] in fp32, tanh of the scores over the cap if there is one, and the weights of
    sinks [B, heads, S, 1] if there are any."""
    scores = (query @ keys.transpose(-2, -1)).float() * query.shape[-1] ** -0.5
    tanh = (scores / cap).tanh() if cap else None
    scores = (scores if tanh is None else tanh * cap).masked_fill(~mask, -torch.inf)
    if sinks is None:
        return scores.softmax(-1), tanh, None
    largest = torch.maximum(scores.amax(-1, keepdim=True), sinks.float())
    weights, sink_weight = (scores - largest).exp_(), (sinks.float() - largest).exp()
    total = weights.sum(-1, keepdim=True) + sink_weight
    return weights / total, tanh, sink_weight / total
