"""Layers with a state in decode steps and over packed rows: they continue the states of rows, and update them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.runtime.model.gated_delta import GatedDelta
from meshwright.runtime.model.recurrent_states import RecurrentStates, StateRows


class SteppedStates:
    """The states of rows that each take one token."""

    def __init__(self, layers: Sequence[GatedDelta], kept: RecurrentStates, indices: Tensor) -> None:
        """`indices` [B] are those of the rows' states."""
        self._layers, self._kept, self._indices = layers, kept, indices

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Return the gated outputs [B, values / tp] of a layer for its projections [B, projections / tp]."""
        return self._layers[layer].step(heads, self._indices, self._kept)


class PackedStates:
    """The states of packed rows."""

    def __init__(self, layers: Sequence[GatedDelta], kept: RecurrentStates, rows: StateRows) -> None:
        self._layers, self._kept, self._rows = layers, kept, rows

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Return the gated outputs [S, values / tp] of a layer for its projections [S, projections / tp]."""
        return self._layers[layer].continue_rows(heads, self._rows, self._kept)


class SteppedThenPackedStates:
    """The states of a pass in which the single tokens of a decode step come before packed rows."""

    def __init__(self, stepped: SteppedStates, packed: PackedStates, num_stepped: int) -> None:
        self._stepped, self._packed, self._num_stepped = stepped, packed, num_stepped

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Return the gated outputs [B + S, values / tp] of a layer for its projections [B + S, projections / tp]."""
        first, rest = heads[: self._num_stepped], heads[self._num_stepped :]
        return torch.cat((self._stepped.attend(layer, first), self._packed.attend(layer, rest)))
