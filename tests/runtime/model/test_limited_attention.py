"""Attention with a window or capped scores is that of the equation in blocks of any size, and so are its gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.cost_models import memory_cost
from meshwright.profiles.model_parts.hf_config import SlidingWindow
from meshwright.runtime.model import limited_attention
from meshwright.runtime.model.attention import CoreAttention
from meshwright.runtime.model.limited_attention import AttentionLimits, attend_limited, attention_limits, has_limits
from tests.runtime.model.test_attention import trained
from tests.runtime.model.test_kv_cache import SPEC, attend, continued, random_rows, used_cache

LIMITS = [
    AttentionLimits(5),
    AttentionLimits(0, 0.7),
    AttentionLimits(3, 0.7),
    AttentionLimits(40, 2.0),
    AttentionLimits(5, chunked=True),
    AttentionLimits(7, 0.7, chunked=True),
]


def by_equation(query: Tensor, keys: Tensor, values: Tensor, limits: AttentionLimits) -> Tensor:
    per_group = query.shape[1] // keys.shape[1]
    keys, values = (heads.repeat_interleave(per_group, 1) for heads in (keys, values))
    scores = query @ keys.transpose(2, 3) / query.shape[-1] ** 0.5
    if limits.cap:
        scores = limits.cap * (scores / limits.cap).tanh()
    queries, tokens = scores.shape[2:]
    distance = torch.arange(tokens - queries, tokens)[:, None] - torch.arange(tokens)
    is_seen = (distance >= 0) & ((distance < limits.window) if limits.window else True)
    if limits.chunked:
        chunks = torch.arange(tokens) // limits.window
        is_seen &= chunks[-queries:, None] == chunks
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if limits.sinks is not None:
        sinks = limits.sinks.view(1, -1, 1, 1).expand(len(scores), -1, queries, 1)
        return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1] @ values
    return scores.softmax(-1) @ values


@pytest.mark.parametrize("scores", [2**23, 1])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(("queries", "tokens"), [(37, 37), (20, 33), (1, 9)])
def test_outputs_and_gradients_are_those_of_the_equation(
    queries: int, tokens: int, limits: AttentionLimits, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of all queries, and of 16."""
    monkeypatch.setattr(limited_attention, "BLOCK_SCORES", scores)
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(2, heads, size, 8, generator=generator) for heads, size in ((6, queries), (2, tokens), (2, tokens))
    ]
    answers = []
    for attention in (attend_limited, by_equation):
        leaves = [heads.clone().requires_grad_() for heads in given]
        output = attention(*leaves, limits)
        output.square().sum().backward()
        answers.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*answers, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scores", [2**23, 1])
@pytest.mark.parametrize("limits", [AttentionLimits(), AttentionLimits(5), AttentionLimits(3, 0.7)], ids=str)
@pytest.mark.parametrize(("queries", "tokens"), [(37, 37), (1, 9)])
def test_sinks_take_their_share_of_the_weights_and_learn(
    queries: int, tokens: int, limits: AttentionLimits, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_attention, "BLOCK_SCORES", scores)
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 6, queries, 8), (2, 2, tokens, 8), (2, 2, tokens, 8), (6,)
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    answers = []
    for attention in (attend_limited, by_equation):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        output = attention(*leaves[:3], replace(limits, sinks=leaves[3]))
        output.square().sum().backward()
        answers.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*answers, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_memory_is_planned_for_blocks_of_these_sizes() -> None:
    planned = memory_cost._BLOCK_SCORES, memory_cost._MIN_BLOCK_QUERIES
    assert planned == (limited_attention.BLOCK_SCORES, limited_attention.MIN_BLOCK_QUERIES)


def test_limits_matter_where_a_row_is_longer_than_the_window_or_scores_are_capped() -> None:
    assert not AttentionLimits().apply_to(10**6)
    assert not AttentionLimits(8).apply_to(8)
    assert AttentionLimits(8).apply_to(9)
    assert AttentionLimits(8, 2.0).apply_to(1)
    assert AttentionLimits(8, sinks=torch.zeros(4)).apply_to(1)


def test_only_layers_of_the_window_have_it() -> None:
    spec = replace(SPEC, window=SlidingWindow(num_tokens=7, first=1, every=2), attention_cap=3.0)
    assert [attention_limits(spec, layer) for layer in range(3)] == [
        AttentionLimits(0, 3.0),
        AttentionLimits(7, 3.0),
        AttentionLimits(0, 3.0),
    ]
    assert has_limits(spec)
    assert not has_limits(SPEC)


@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_rows_of_a_pass_and_rows_that_continue_a_cache_have_the_window(cap: float) -> None:
    spec = replace(SPEC, window=SlidingWindow(num_tokens=4), attention_cap=cap)
    attention = CoreAttention(first_layer=2, layer_number=4, spec=spec)
    rows = random_rows([11, 11, 3], 0)
    together, alone = trained(rows, tail=2, attention=attention), [trained([row], attention=attention) for row in rows]
    for found, expected in zip(together, (torch.cat(parts) for parts in zip(*alone, strict=True)), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    plain = trained(rows, attention=CoreAttention(first_layer=2, layer_number=4, spec=SPEC))
    assert (together[0] - plain[0]).abs().max() > 0.01
    cache = used_cache()
    for first, count in ((0, 6), (6, 5)):
        chunk = [row.chunk(first, count) for row in rows[:2]]
        output = attend(chunk, continued(cache, [0, 2], [first] * 2, [count] * 2), attention=attention)
    expected = torch.cat([together[0][6:11], together[0][17:22]])
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
