"""Seconds of a mixture of experts on one rank: grouped GEMMs, and moving tokens to the experts and back.

If experts are spread over ranks, all of them wait for the rank with the busiest experts, so that rank is costed.
"""

from __future__ import annotations

from meshwright.cost_models.kernels import Kernels
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.experts import Experts

_MOVES = 4
"""Reads and writes of a hidden state that is dispatched to an expert and combined, besides those of the matmuls."""

_WIDTHS = 3
"""Elements that the activation moves, in expert widths: it reads gate and up projection, and writes their product."""

_BACKWARD = 2.0
"""Backward over forward traffic: it reads the saved input and the gradient, and writes a gradient."""


class Mixture:
    """Experts spread over `spread` replicas, sharded along their width by tensor parallelism; or whole, and spread over
    `folded` ranks of each replica as well (see `Layout`)."""

    def __init__(
        self,
        kernels: Kernels,
        efficiency: Efficiency,
        experts: Experts,
        hidden_size: int,
        *,
        spread: int,
        folded: int = 1,
        size: float,
    ) -> None:
        self.experts, width = experts, experts.ffn_size * folded
        self._kernels, self._start = kernels, efficiency.grouped.seconds
        self._spread, self._folded, self._ep = spread, folded, spread * folded
        self._copy_seconds = kernels.elementwise(size * (_WIDTHS * width + _MOVES * hidden_size))
        self._shapes = (hidden_size, 2 * width), (width, hidden_size)

    def seconds(self, count: float, *, trains: bool, is_frozen: bool = False) -> float:
        """Return the seconds on the busiest rank when each replica brings `count` tokens.

        Frozen experts have no weight gradients.
        """
        experts, tokens = self.experts, count * self._spread
        rows = count * experts.experts_per_token * experts.imbalance(tokens, self._ep) / self._folded
        return self.seconds_of_rows(rows, experts.num_selected(tokens) / self._ep, trains=trains, is_frozen=is_frozen)

    def seconds_of_rows(self, rows: float, groups: float, *, trains: bool = False, is_frozen: bool = False) -> float:
        """Return the seconds when `rows` routed tokens arrive at `groups` of this rank's experts."""
        grouped, moving = self._kernels.grouped, self._start + rows * self._copy_seconds
        seconds = moving
        for inner, outer in self._shapes:
            seconds += grouped(rows, groups, inner, outer)
        if trains:
            seconds += _BACKWARD * moving
            for inner, outer in self._shapes:
                seconds += grouped(rows, groups, outer, inner)
                seconds += 0.0 if is_frozen else self._kernels.grouped_gradient(rows, groups, inner, outer)
        return seconds
