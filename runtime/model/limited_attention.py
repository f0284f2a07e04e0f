"""Attention with a sliding window or capped scores, in blocks of queries.

A block needs only the keys from the start of its first query's window on, so that with a window of W tokens the scores
of S tokens are S x 2 W at most. No kernel of torch caps scores (Gemma 2, arXiv:2408.00118, section 2): they are
computed with its products, one block at a time, and again in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """The limits of the attention of a layer: the tokens of its window, and the cap of its scores."""

    window: int = 0
    """A token attends to this many tokens up to itself; 0: to all."""
    cap: float = 0.0
    """Scores s are cap x tanh(s / cap); 0: they are not capped."""

    def apply_to(self, num_keys: int) -> bool:
        """True if attention to `num_keys` tokens differs from that without limits."""
        return self.cap > 0 or 0 < self.window < num_keys


def attention_limits(spec: ModelSpec, layer: int) -> AttentionLimits:
    """The limits of layer number `layer` of the whole model."""
    has_window = spec.window is not None and spec.window.has_layer(layer)
    return AttentionLimits(spec.window.num_tokens if spec.window and has_window else 0, spec.attention_cap)


def has_limits(spec: ModelSpec) -> bool:
    """True if any layer of the model has a window or capped scores."""
    return spec.window is not None or spec.attention_cap > 0


def attend_limited(query: Tensor, keys: Tensor, values: Tensor, limits: AttentionLimits) -> Tensor:
    """Attention [B, heads, S, D] of the query [B, heads, S, D] to keys and values [B, kv_heads, T, D], of which the
    last of S queries sees the last within the limits, and each query before it one fewer."""
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
        # The query heads of a group become more queries of their key head: kernels with a mask would copy its keys.
        grouped = queries.reshape(num_rows, kv_heads, -1, query.shape[-1])
        mask = mask.repeat(num_heads // kv_heads, 1)
        attended = attend_masked(grouped, keys[:, :, start:end], values[:, :, start:end], mask, limits.cap)
        outputs.append(attended.reshape(queries.shape))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _mask(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """True for the keys that each query sees, [queries, keys]; the last query is at the last key."""
    positions = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    key_positions = torch.arange(num_keys, device=device)
    return (key_positions <= positions) & (key_positions > positions - window)


def attend_masked(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Attention [B, heads, S, D] of the query [B, heads, S, D] to keys and values [B, heads, T, D] where the mask,
    which is broadcast to [B, heads, S, T], is True; scores are capped if `cap` is not 0."""
    if not cap:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    attended: Tensor = _CappedAttention.apply(query, keys, values, mask, cap)
    return attended


class _CappedAttention(torch.autograd.Function):
    """Attention with capped scores, which saves its inputs only."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes no keywords
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, cap: float
    ) -> Tensor:
        ctx.save_for_backward(query, keys, values, mask)
        ctx.cap = cap
        weights, _ = _capped_weights(query, keys, mask, cap)
        return weights.to(values.dtype) @ values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """With weights p = softmax(cap t), t = tanh(s / cap): ds = p (dp - sum p dp) (1 - t^2)."""
        query, keys, values, mask = ctx.saved_tensors
        weights, tanh = _capped_weights(query, keys, mask, ctx.cap)
        of_values = weights.to(values.dtype).transpose(-2, -1) @ gradient
        of_weights = (gradient @ values.transpose(-2, -1)).float()
        of_capped = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
        of_scores = (of_capped * (1 - tanh.square()) * query.shape[-1] ** -0.5).to(query.dtype)
        return of_scores @ keys, of_scores.transpose(-2, -1) @ query, of_values, None, None


def _capped_weights(query: Tensor, keys: Tensor, mask: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Weights of keys [B, heads, S, T] in fp32, and tanh of the scores over the cap."""
    tanh = ((query @ keys.transpose(-2, -1)).float() * (query.shape[-1] ** -0.5 / cap)).tanh()
    return (tanh * cap).masked_fill(~mask, -torch.inf).softmax(-1), tanh
