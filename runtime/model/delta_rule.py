"""The gated delta rule and the convolution before it, over packed rows in chunks and for one token of each row.

With S_t the state of a head [keys, values], a_t its decay and b_t the step size of a token (Yang et al.,
arXiv:2412.06464, equation 10):

    S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T        o_t = S_t^T q_t

Inside a chunk, with d_t the product of the decays up to t, the updates u_t solve a triangular system, and the state
passes from chunk to chunk (section 3.3 of the same paper):

    (I + L) u = b (v - d k S_0)    L_ti = b_t d_t/d_i k_t.k_i for i < t
    o_t = d_t q_t S_0 + sum_(i<=t) d_t/d_i q_t.k_i u_i    S_C = d_C S_0 + sum_i d_C/d_i k_i u_i^T

All of it is computed in fp32, as in transformers and flash-linear-attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_NORM_EPSILON = 1e-6
"""Added to the squared norm of queries and keys, as in transformers and flash-linear-attention."""


class DeltaInputs(NamedTuple):
    """The heads of S tokens. Each key head serves R value heads."""

    query: Tensor
    """[S, key heads, K]; `key` likewise."""
    key: Tensor
    value: Tensor
    """[S, key heads, R, V]."""
    log_decay: Tensor
    """The logarithm of the decay, [S, key heads, R], 0 or less."""
    step: Tensor
    """The step size, [S, key heads, R]."""

    def normalised(self) -> DeltaInputs:
        """The same in fp32, with queries and keys of norm 1, and queries over the square root of their size."""
        query, key, value, log_decay, step = (tensor.float() for tensor in self)
        return DeltaInputs(_unit(query) * query.shape[-1] ** -0.5, _unit(key), value, log_decay, step)

    def at(self, tokens: Tensor, is_token: Tensor) -> DeltaInputs:
        """The heads of the tokens with indices `tokens` [N, C], zero where `is_token` is False."""
        chunks = (tensor[tokens] for tensor in self)
        return DeltaInputs(*(chunk * is_token.view(*is_token.shape, *(1,) * (chunk.dim() - 2)) for chunk in chunks))


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _NORM_EPSILON)


@dataclass(frozen=True, kw_only=True)
class RowChunks:
    """Packed rows split into chunks of equal size: first the first chunk of every row, then the second ones, and so on.

    In this order the rows that have an n-th chunk are the first ones of those that have the chunk before it, because
    longer rows come first.
    """

    order: tuple[int, ...]
    """The rows, those with more chunks first."""
    tokens: Tensor
    """The index of each token of a chunk, [chunks, C]; any one where `is_token` is False."""
    is_token: Tensor
    places: Tensor
    """The index of each token among all tokens of the chunks, [S]."""
    num_rows: tuple[int, ...]
    """For each n the number of rows that have an n-th chunk."""

    @property
    def in_row_order(self) -> list[int]:
        """The indices into `order` of row 0, of row 1 and so on."""
        return sorted(range(len(self.order)), key=self.order.__getitem__)


def split_into_chunks(lengths: Sequence[int], chunk_tokens: int, device: torch.device) -> RowChunks:
    """Split packed rows of these lengths, each at least 1, into chunks of `chunk_tokens` tokens, or of as many as the
    longest row has if that is less."""
    size = min(chunk_tokens, max(lengths))
    counts = [-(-length // size) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda row: -counts[row])
    starts = np.cumsum([0, *lengths[:-1]])
    num_rows = [sum(count > number for count in counts) for number in range(max(counts))]
    chunks = [(row, number * size) for number, rows in enumerate(num_rows) for row in order[:rows]]
    offsets = np.array([first for _, first in chunks])[:, None] + np.arange(size)
    rows = np.array([row for row, _ in chunks])
    is_token = offsets < np.array(lengths)[rows][:, None]
    tokens = np.where(is_token, starts[rows][:, None] + offsets, 0)
    places = np.empty(sum(lengths), dtype=np.int64)
    places[tokens[is_token]] = is_token.ravel().nonzero()[0]
    return RowChunks(
        order=tuple(order),
        tokens=torch.from_numpy(tokens).to(device),
        is_token=torch.from_numpy(is_token).to(device),
        places=torch.from_numpy(places).to(device),
        num_rows=tuple(num_rows),
    )


def apply_in_chunks(inputs: DeltaInputs, rows: RowChunks, first_states: Tensor | None) -> tuple[Tensor, Tensor]:
    """The outputs [S, key heads, R, V] of packed rows, and the state of each row after its last token, [rows, key
    heads, R, K, V], both fp32.

    `first_states` are those of the rows before their first token, zero if None.
    """
    parts = _chunk_parts(inputs.normalised().at(rows.tokens, rows.is_token))
    num_heads, repeats, num_values = inputs.value.shape[1:]
    if first_states is None:
        shape = (len(rows.order), num_heads, repeats, inputs.key.shape[-1], num_values)
        states = torch.zeros(shape, device=inputs.key.device)
    else:
        states = first_states[list(rows.order)]
    outputs, ended = list[Tensor](), list[Tensor]()
    for part in zip(*(tensor.split(rows.num_rows) for tensor in parts), strict=True):
        chunk = _ChunkParts(*part)
        count = len(chunk.query)
        if count < len(states):
            ended.append(states[count:])
            states = states[:count]
        updates = chunk.values - chunk.keys_of_state @ states
        outputs.append(chunk.query @ states + chunk.scores @ updates)
        states = chunk.decay * states + chunk.key.transpose(-1, -2) @ updates
    flat = torch.cat(outputs).permute(0, 3, 1, 2, 4).flatten(0, 1)
    last_states = torch.cat((states, *reversed(ended)))
    return flat.index_select(0, rows.places), last_states[rows.in_row_order]


class _ChunkParts(NamedTuple):
    """The parts of N chunks of C tokens that do not depend on the state, [N, key heads, R, ...]."""

    query: Tensor
    """Queries times the decay since the start, [..., C, K]."""
    key: Tensor
    """Keys times the decay until the end, [..., C, K]."""
    values: Tensor
    """The updates for a state of zero, [..., C, V]."""
    keys_of_state: Tensor
    """The factors whose product with the state is subtracted from `values`, [..., C, K]."""
    scores: Tensor
    """Products of queries and keys up to each query, times the decay between them, [..., C, C]."""
    decay: Tensor
    """The decay of the whole chunk, [..., 1, 1]."""


def _chunk_parts(chunks: DeltaInputs) -> _ChunkParts:
    # The order of the axes is chunk, key head, value head of it, token.
    query, key = (heads.permute(0, 2, 1, 3).unsqueeze(2) for heads in (chunks.query, chunks.key))
    value = chunks.value.permute(0, 2, 3, 1, 4)
    step, log_decay = (gates.permute(0, 2, 3, 1) for gates in (chunks.step, chunks.log_decay))
    total = log_decay.cumsum(-1)
    is_later = torch.ones(total.shape[-1:] * 2, dtype=torch.bool, device=total.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(is_later, -torch.inf).exp()
    system = step.unsqueeze(-1) * between * (key @ key.transpose(-1, -2))
    since_start = total.exp().unsqueeze(-1)
    sides = step.unsqueeze(-1) * torch.cat((value, key * since_start), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys_of_state = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    return _ChunkParts(
        query=query * since_start,
        key=key * (total[..., -1:] - total).exp().unsqueeze(-1),
        values=values,
        keys_of_state=keys_of_state,
        scores=between * (query @ key.transpose(-1, -2)),
        decay=since_start[..., -1:, :],
    )


def apply_to_next(inputs: DeltaInputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs [B, key heads, R, V] of one token of each row, and the new states, from the rows' states [B, key
    heads, R, K, V], all fp32."""
    query, key, value, log_decay, step = inputs.normalised()
    query, key = query.unsqueeze(2).unsqueeze(-2), key.unsqueeze(2).unsqueeze(-2)
    states = states * log_decay.exp()[..., None, None]
    update = step[..., None, None] * (value.unsqueeze(-2) - key @ states)
    states = states + key.transpose(-1, -2) * update
    return (query @ states).squeeze(-2), states


class ConvolvedRows(NamedTuple):
    """Indices for the convolution of packed rows, into the J inputs before each row, followed by all tokens."""

    inputs: Tensor
    """For each row, the inputs before it and its tokens, [S + rows * J]."""
    outputs: Tensor
    """The outputs of the tokens among those of all inputs, [S]."""
    last: Tensor
    """The last J + 1 inputs of each row, [rows, J + 1]."""


def convolved_rows(lengths: Sequence[int], kernel_size: int, device: torch.device) -> ConvolvedRows:
    """The indices for packed rows of these lengths, each at least 1."""
    before, num_rows = kernel_size - 1, len(lengths)
    starts = np.cumsum([0, *lengths])
    by_row = [
        np.concatenate((np.arange(row * before, (row + 1) * before), num_rows * before + np.arange(first, end)))
        for row, (first, end) in enumerate(itertools.pairwise(starts))
    ]
    outputs = np.arange(starts[-1]) + np.repeat(np.arange(num_rows) * before, lengths)
    arrays = np.concatenate(by_row), outputs, np.stack([inputs[-kernel_size:] for inputs in by_row])
    return ConvolvedRows(*(torch.from_numpy(array).to(device) for array in arrays))


def convolve_rows(tokens: Tensor, weight: Tensor, rows: ConvolvedRows, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """The causal convolution [S, channels] of packed rows [S, channels], and the last inputs of each row, [rows,
    channels, kernel].

    `weight` is [channels, 1, kernel]; `before` are the last inputs of the rows so far, as returned, zero if None.
    """
    channels, _, size = weight.shape
    if before is None:
        earlier = tokens.new_zeros(len(rows.last) * (size - 1), channels)
    else:
        earlier = before[..., 1:].transpose(1, 2).flatten(0, 1)
    inputs = torch.cat((earlier, tokens))
    convolved = F.conv1d(inputs[rows.inputs].t().unsqueeze(0), weight, groups=channels)
    return convolved[0].t()[rows.outputs], inputs[rows.last].transpose(1, 2)


def convolve_next(tokens: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution [B, channels] of one token [B, channels] of each row, and the last inputs of each row, from those
    before, [B, channels, kernel]."""
    inputs = torch.cat((before[..., 1:], tokens.unsqueeze(-1)), dim=-1)
    return (inputs * weight.squeeze(1)).sum(-1), inputs
