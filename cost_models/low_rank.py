"""Seconds of an adapter on one rank: its low-rank products, and adding what they give to what the linears give."""

from __future__ import annotations

from meshwright.cost_models.kernels import Kernels
from meshwright.profiles.model_shape import ModelSpec

_ADDING = 3
"""Reads and writes of each output when one product is added to another."""

_KERNELS, _STARTED = 3, 2
"""Of each linear: two products and the sum of which the products' law counts the start."""


class LowRank:
    """Of a layer of a shard with an adapter; all seconds grow with the number of tokens.

    The gradients of A and of B are products of their own, beside those of what they read (Hu et al., LoRA,
    arXiv:2106.09685, section 4.1).
    """

    def __init__(self, model: ModelSpec, kernels: Kernels, size: float) -> None:
        """`size` are the bytes of an element between kernels."""
        assert model.adapter is not None, model.name
        rank, linears = model.adapter.rank, model.adapted_products
        self._shapes = [shape for inner, outer in linears for shape in ((inner, rank), (rank, outer))]
        self._kernels = kernels
        self._forward = kernels.products(self._shapes)
        self._gradients = kernels.products([(outer, inner) for inner, outer in self._shapes])
        self._adding_seconds = kernels.elementwise(size * _ADDING * sum(outer for _, outer in linears))
        self.num_kernels, self.num_started = _KERNELS * len(linears), _STARTED * len(linears)

    def seconds(self, count: float, *, trains: bool) -> float:
        """Device seconds of a layer for so many tokens, forward or both ways; a sum passes its gradient on as it is."""
        seconds = self._forward(count) + count * self._adding_seconds
        if trains:
            gemm = self._kernels.gemm
            seconds += self._gradients(count) + sum([gemm(inner, count, outer) for inner, outer in self._shapes])
        return seconds
