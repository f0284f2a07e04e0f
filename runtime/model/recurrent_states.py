"""The states that layers with a state keep of each sequence, and the last inputs of the convolution before them.

Unlike keys and values, they are replaced at every token, so a row has them only for the tokens that it has passed so
far. A row that starts from the prompt of another one takes a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.profiles.model_parts.linear_attention import SPARE_STATES, LinearAttention
from meshwright.runtime.model.delta_rule import ConvolvedRows, RowChunks, convolved_rows, split_into_chunks


class RecurrentStates:
    """The states and last inputs of one pipeline stage's layers, of each row and two more.

    The indices along the second axis are those of rows plus 1. Rows that only pad the batch of a decode step write to
    index 0. The last index keeps the state of a prompt whose samples have not all been admitted, while that of the
    sample that was prefilled moves on.
    """

    def __init__(
        self, linear: LinearAttention, *, num_layers: int, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`linear` has the sizes of this rank's shard."""
        count, repeats = num_rows + SPARE_STATES, linear.num_value_heads // linear.num_key_heads
        heads = (linear.num_key_heads, repeats, linear.key_dim, linear.value_dim)
        self.states = torch.zeros(num_layers, count, *heads, device=device)
        """[layers, rows + 2, key heads, value heads of each, key size, value size], fp32."""
        self.inputs = torch.zeros(num_layers, count, linear.conv_size, linear.conv_kernel, dtype=dtype, device=device)
        """[layers, rows + 2, channels, kernel], the newest input last."""

        self._linear = linear

    def rows(self, lengths: Sequence[int], rows: Sequence[int], cached: Sequence[int]) -> StateRows:
        """The rows of a pass over packed rows: `rows[b]` has passed `cached[b]` tokens, and `lengths[b]` follow."""
        return state_rows(self._linear, lengths, self.states.device, rows, cached)

    def keep_prompt(self, row: int) -> None:
        """Keep the state of a row, which has passed its prompt and nothing else, for later samples of the prompt."""
        for kept in (self.states, self.inputs):
            kept[:, -1] = kept[:, row + 1]

    def start_from_prompt(self, row: int, prefilled: int | None) -> None:
        """Give a row the state after its prompt: that of row `prefilled`, or the kept one if None."""
        source = -1 if prefilled is None else prefilled + 1
        for kept in (self.states, self.inputs):
            kept[:, row + 1] = kept[:, source]

    def read(self, row: int) -> tuple[Tensor, Tensor]:
        """Host copies of the states [layers, key heads, value heads of each, key size, value size] and last inputs
        [layers, channels, kernel] of a row."""
        return self.states[:, row + 1].cpu().clone(), self.inputs[:, row + 1].cpu().clone()

    def write(self, row: int, states: Tensor, inputs: Tensor) -> None:
        """Write the result of `read`, states [layers, ...] and inputs [layers, channels, kernel], to a row."""
        self.states[:, row + 1], self.inputs[:, row + 1] = states, inputs


def state_indices(rows: Sequence[int], device: torch.device) -> Tensor:
    """The indices of the states of rows, [B]."""
    return torch.tensor(rows, dtype=torch.int64, device=device) + 1


@dataclass(frozen=True)
class StateRows:
    """The packed rows of a pass, as layers with a state need them."""

    chunks: RowChunks
    convolved: ConvolvedRows
    slots: Tensor
    """The indices of the rows' states, [rows]; empty in a pass without a cache."""
    starts: Tensor
    """True for rows that start in this pass, [rows]; empty in a pass without a cache."""


def state_rows(
    linear: LinearAttention,
    lengths: Sequence[int],
    device: torch.device,
    rows: Sequence[int] = (),
    cached: Sequence[int] = (),
) -> StateRows:
    """The rows of a pass, of these lengths; with a cache, `rows` [B] are their rows in it, of `cached` tokens each."""
    return StateRows(
        split_into_chunks(lengths, linear.chunk_tokens, device),
        convolved_rows(lengths, linear.conv_kernel, device),
        state_indices(rows, device),
        torch.tensor(cached, dtype=torch.int64, device=device) == 0,
    )
