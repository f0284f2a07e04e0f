"""Rows in which a tool told tokens: what is computed along a response goes from one drawn token to the next.

A response is then no run of columns: its mask has holes, which an advantage must not end at. Columns are therefore put
in another order, the drawn ones first, for what looks from a column to the next one, and back again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.profiles.stages import TOLD


def drawn_mask(response: Tensor, versions: Tensor) -> Tensor:
    """Of the predictions of response tokens [B, S] those of tokens that a policy drew."""
    return response.bool() & (versions != TOLD)


class ClosedColumns:
    """The columns of rows in an order without holes: drawn tokens, what stands behind the response, then the rest."""

    def __init__(self, response: Tensor, drawn: Tensor) -> None:
        """Masks [B, S] of the predictions of response tokens, and of those that were drawn."""
        ended = response.bool().flip(1).cumsum(1).flip(1) == 0
        place = torch.where(drawn.bool(), 0, torch.where(ended, 1, 2))
        self._order = place.argsort(dim=1, stable=True)
        self._back = self._order.argsort(dim=1)

    def closed(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fields [B, S] with their columns in this order."""
        return {name: values.gather(1, self._order) for name, values in fields.items()}

    def opened(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fields [B, S] with their columns where they were."""
        return {name: values.gather(1, self._back) for name, values in fields.items()}
