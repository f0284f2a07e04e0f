"""Masks and column order of rows with tool tokens, for computations along the sampled tokens of a response.

The mask of such a response has holes, at which GAE would stop. Columns are therefore reordered with the sampled tokens
first for computations that go from one column to the next, and put back afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.profiles.stages import TOOL_TOKEN_VERSION


def sampled_mask(response: Tensor, versions: Tensor) -> Tensor:
    """The mask [B, S] of the predictions of sampled tokens, from that of all response tokens: without tool tokens."""
    return response.bool() & (versions != TOOL_TOKEN_VERSION)


class SampledColumns:
    """An order of columns without holes: sampled tokens, columns after the response, then prompt and tool tokens."""

    def __init__(self, response: Tensor, sampled: Tensor) -> None:
        """Takes the masks [B, S] of the predictions of response tokens, and of sampled tokens (`drawn`)."""
        is_after = response.bool().flip(1).cumsum(1).flip(1) == 0
        rank = torch.where(sampled.bool(), 0, torch.where(is_after, 1, 2))
        self._order = rank.argsort(dim=1, stable=True)
        self._back = self._order.argsort(dim=1)

    def compact(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fields [B, S] with their columns in this order, without holes."""
        return {name: values.gather(1, self._order) for name, values in fields.items()}

    def restore(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fields [B, S] with their columns in the original order."""
        return {name: values.gather(1, self._back) for name, values in fields.items()}
