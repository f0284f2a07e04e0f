"""Seconds of a low-rank adapter (LoRA) on one rank: its matmuls, and adding their outputs to those of the linears."""

from __future__ import annotations

from meshwright.cost_models.kernels import Kernels
from meshwright.profiles.model_shape import ModelSpec

_ADDING = 3
"""Reads and writes of each output when one product is added to another."""

_KERNELS, _STARTED = 3, 2
"""Kernels of each adapted linear (two matmuls and a sum), and how many of them have their start in the equations."""


class LowRank:
    """Seconds of the adapters of one layer of a shard; they grow with the number of tokens.

    The gradients of A and of B are matmuls of their own, besides those of their inputs (Hu et al., LoRA,
    arXiv:2106.09685, section 4.1).
    """

    def __init__(self, model: ModelSpec, kernels: Kernels, size: float) -> None:
        """`size` is the number of bytes of an element between kernels."""
        assert model.adapter is not None, model.name
        rank, linears = model.adapter.rank, model.adapted_linears
        self._shapes = [shape for inner, outer in linears for shape in ((inner, rank), (rank, outer))]
        self._kernels = kernels
        self._forward = kernels.products(self._shapes)
        self._gradients = kernels.products([(outer, inner) for inner, outer in self._shapes])
        self._adding_seconds = kernels.elementwise(size * _ADDING * sum(outer for _, outer in linears))
        self.num_kernels, self.num_started = _KERNELS * len(linears), _STARTED * len(linears)

    def seconds(self, count: float, *, trains: bool) -> float:
        """Return the device seconds of a layer for `count` tokens, forward or (`trains`) forward and backward.

        The sum has no cost backward: it passes its gradient on unchanged.
        """
        seconds = self._forward(count) + count * self._adding_seconds
        if trains:
            gemm = self._kernels.gemm
            seconds += self._gradients(count) + sum([gemm(inner, count, outer) for inner, outer in self._shapes])
        return seconds
