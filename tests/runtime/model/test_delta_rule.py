"""The gated delta rule in chunks and token by token is the recurrence of its paper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.profiles.model_parts.linear_attention import LinearAttention
from meshwright.runtime.model.delta_rule import (
    DeltaInputs,
    apply_in_chunks,
    apply_to_next,
    convolve_next,
    convolve_rows,
    convolved_rows,
    split_into_chunks,
)
from tests.seeds import cases

CPU = torch.device("cpu")
LENGTHS = (9, 1, 4, 12, 5)
HEADS, REPEATS, KEY, VALUE, KERNEL = 2, 3, 5, 4, 4


def sampled(num_tokens: int, seed: int) -> DeltaInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_tokens, HEADS, *shape, generator=generator)

    return DeltaInputs(
        normal(KEY), normal(KEY), normal(REPEATS, VALUE), -normal(REPEATS).exp(), normal(REPEATS).sigmoid()
    )


def by_recurrence(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [S, heads, repeats, V] and the last state [heads, repeats, V, K] of one row, in float64.

    S_t = S_(t-1) a_t (I - b_t k_t k_t^T) + b_t v_t k_t^T and o_t = S_t q_t, equation (10) of arXiv:2412.06464, with
    queries and keys of norm 1, and queries over the square root of their size.
    """
    query, key, value, log_decay, step = (tensor.double() for tensor in inputs)
    outputs, state = torch.zeros(value.shape, dtype=torch.float64), state.double().clone()
    for token in range(len(query)):
        for head in range(HEADS):
            k = key[token, head] / key[token, head].norm()
            q = query[token, head] / query[token, head].norm() / KEY**0.5
            for repeat in range(REPEATS):
                a, b = log_decay[token, head, repeat].exp(), step[token, head, repeat]
                kept = state[head, repeat] @ (torch.eye(KEY, dtype=torch.float64) - b * torch.outer(k, k))
                state[head, repeat] = a * kept + b * torch.outer(value[token, head, repeat], k)
                outputs[token, head, repeat] = state[head, repeat] @ q
    return outputs, state


@cases("chunk_tokens", [4, 1, 3, 64], few=2)
@cases("is_continued", [True, False], few=2)
def test_rows_in_chunks_are_the_recurrence(chunk_tokens: int, is_continued: bool) -> None:
    inputs, num_rows = sampled(sum(LENGTHS), 0), len(LENGTHS)
    first = torch.randn(num_rows, HEADS, REPEATS, KEY, VALUE, generator=torch.Generator().manual_seed(1))
    if not is_continued:
        first = torch.zeros_like(first)
    rows = split_into_chunks(LENGTHS, chunk_tokens, CPU)
    outputs, states = apply_in_chunks(inputs, rows, first if is_continued else None)
    expected = [
        by_recurrence(DeltaInputs(*row), state.transpose(-1, -2))
        for *row, state in zip(*(tensor.split(LENGTHS) for tensor in inputs), first, strict=True)
    ]
    torch.testing.assert_close(outputs, torch.cat([row for row, _ in expected]).float(), atol=2e-5, rtol=1e-4)
    last = torch.stack([state.transpose(-1, -2) for _, state in expected])
    torch.testing.assert_close(states, last.float(), atol=2e-5, rtol=1e-4)


def test_token_by_token_it_is_the_recurrence() -> None:
    inputs, states = sampled(6, 2), torch.zeros(1, HEADS, REPEATS, KEY, VALUE)
    outputs = []
    for token in zip(*(tensor.split(1) for tensor in inputs), strict=True):
        output, states = apply_to_next(DeltaInputs(*token), states)
        outputs.append(output)
    expected, last = by_recurrence(inputs, torch.zeros(HEADS, REPEATS, VALUE, KEY))
    torch.testing.assert_close(torch.cat(outputs), expected.float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states[0], last.transpose(-1, -2).float(), atol=1e-5, rtol=1e-4)


def test_a_chunk_is_no_longer_than_the_longest_row() -> None:
    assert split_into_chunks((3, 5), 64, CPU).tokens.shape == (2, 5)
    rows = split_into_chunks(LENGTHS, 4, CPU)
    assert rows.num_rows == (5, 3, 2)
    assert rows.order[:2] == (0, 3)


def test_a_decay_to_nothing_leaves_no_trace_and_no_infinity() -> None:
    inputs = sampled(12, 3)
    inputs.log_decay[5] = -200.0
    outputs, states = apply_in_chunks(inputs, split_into_chunks((12,), 4, CPU), None)
    rest, last = apply_in_chunks(DeltaInputs(*(t[5:] for t in inputs)), split_into_chunks((7,), 4, CPU), None)
    torch.testing.assert_close(outputs[5:], rest, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states, last, atol=1e-4, rtol=1e-4)


def test_rows_are_convolved_as_token_by_token_with_zeros_before_them() -> None:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randn(sum(LENGTHS), 6, generator=generator)
    weight = torch.randn(6, 1, KERNEL, generator=generator)
    expected, windows = [], []
    for row in tokens.split(LENGTHS):
        window = torch.zeros(1, 6, KERNEL)
        for token in row:
            output, window = convolve_next(token[None], weight, window)
            earlier = window[0].t()
            torch.testing.assert_close(output[0], sum(earlier[i] * weight[:, 0, i] for i in range(KERNEL)))
            expected.append(output)
        windows.append(window)
    outputs, last = convolve_rows(tokens, weight, convolved_rows(LENGTHS, KERNEL, CPU), None)
    torch.testing.assert_close(outputs, torch.cat(expected))
    assert torch.equal(last, torch.cat(windows))


@cases("ends", [(4, 1, 2, 7, 3), (1, 1, 1, 1, 1)], few=2)
def test_rows_in_two_pieces_are_rows_at_once(ends: tuple[int, ...]) -> None:
    """But for a row of one token, which is in the first piece alone."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randn(sum(LENGTHS), 6, generator=generator)
    weight = torch.randn(6, 1, KERNEL, generator=generator)
    whole, last = convolve_rows(tokens, weight, convolved_rows(LENGTHS, KERNEL, CPU), None)
    first = torch.cat([row[:end] for row, end in zip(tokens.split(LENGTHS), ends, strict=True)])
    second = torch.cat([row[end:] for row, end in zip(tokens.split(LENGTHS), ends, strict=True)])
    is_longer = [length > end for length, end in zip(LENGTHS, ends, strict=True)]
    rest = [length - end for length, end in zip(LENGTHS, ends, strict=True) if length > end]
    before, kept = convolve_rows(first, weight, convolved_rows(ends, KERNEL, CPU), None)
    after, now = convolve_rows(second, weight, convolved_rows(rest, KERNEL, CPU), kept[is_longer])
    expected = [row.split((end, len(row) - end)) for row, end in zip(whole.split(LENGTHS), ends, strict=True)]
    torch.testing.assert_close(before, torch.cat([row for row, _ in expected]))
    torch.testing.assert_close(after, torch.cat([row for _, row in expected]))
    assert torch.equal(now, last[is_longer])


@cases("sizes", [(2, 4, 16, 12), (4, 8, 64, 64), (4, 16, 64, 32)], few=1)
def test_what_is_held_for_the_backward_pass_is_planned(sizes: tuple[int, int, int, int]) -> None:
    """But for the norm and the gate, which follow the rule: three numbers for each value."""
    num_keys, num_values, key_dim, value_dim = sizes
    linear = LinearAttention(
        rule="gated delta",
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_kernel=4,
    )
    num_tokens, repeats = 4 * linear.chunk_tokens, num_values // num_keys
    shapes = (key_dim,), (key_dim,), (repeats, value_dim), (repeats,), (repeats,)
    heads = [torch.randn(num_tokens, num_keys, *shape).requires_grad_() for shape in shapes]
    inputs = DeltaInputs(*heads[:3], -heads[3].exp(), heads[4].sigmoid())
    held: dict[int, int] = {}
    saved = list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)  # so that no other gets its address
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        apply_in_chunks(inputs, split_into_chunks((num_tokens,), linear.chunk_tokens, CPU), None)
    planned = linear.rule_elements(linear.chunk_tokens) - 3 * linear.value_size
    assert sum(held.values()) / 4 / num_tokens == pytest.approx(planned, rel=0.05)
