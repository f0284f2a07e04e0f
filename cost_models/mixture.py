"""Seconds that a rank takes for the experts among which a router picks: grouped products, and moving tokens to them.

Where experts are spread over replicas, all of them wait for the one with the busiest experts: its seconds are these.
"""

from __future__ import annotations

from meshwright.cost_models.kernels import Kernels
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.experts import Experts

_MOVES = 4
"""Reads and writes of a hidden state that goes to an expert and comes back, besides those of the products."""

_WIDTHS = 3
"""What the activation reads, gate and projection, and writes, of an expert's width."""

_BACKWARD = 2.0
"""Of what forward moves and starts: backward reads what was saved and the gradient, and writes a gradient."""


class Mixture:
    """Experts, cut along their width by tensor parallelism, and spread over `spread` replicas; or whole, and spread
    over `folded` ranks of each of these beside (see `Layout`)."""

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
        """Seconds on the busiest rank when each of the replicas brings `count` tokens; experts that are frozen have no
        gradients of their weights."""
        experts, tokens = self.experts, count * self._spread
        rows = count * experts.experts_per_token * experts.busiest(tokens, self._ep) / self._folded
        return self.of(rows, experts.touched(tokens) / self._ep, trains=trains, is_frozen=is_frozen)

    def of(self, rows: float, groups: float, *, trains: bool = False, is_frozen: bool = False) -> float:
        """Seconds when this many copies of tokens come to so many of this rank's experts."""
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
