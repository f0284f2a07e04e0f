"""Times of individually measured kernels: the equation of `kernels` times a ratio from the measured neighbours.

The seconds themselves jump between measured sizes, but the ratio of measured to predicted seconds changes smoothly, so
the ratio is interpolated, in the logarithms of the sizes. Beyond the measured sizes the outermost ratio is used.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from meshwright.cost_models.kernels import Heads, Kernels
from meshwright.cost_models.precision import PRECISIONS
from meshwright.profiles.aiconfigurator import Attention, Gemm, HeadCounts, Operators
from meshwright.profiles.cluster import Device
from meshwright.profiles.efficiency import Efficiency


class MeasuredKernels(Kernels):
    """Kernel times on the device and in the precision of these operators."""

    def __init__(self, operators: Operators, device: Device, efficiency: Efficiency) -> None:
        number_format, flops = PRECISIONS[operators.precision], device.flops_per_second[operators.precision]
        super().__init__(
            device, efficiency, flops_per_second=flops, weight_bytes=number_format.weight_bytes, size=number_format.size
        )
        self._cache_bytes = number_format.cache_bytes
        self._gemms = _Ratios(operators.gemms, lambda key: Kernels.gemm(self, *key))
        self._prefill = {
            heads: self._prefill_ratios(heads, measured) for heads, measured in operators.prefill_attention.items()
        }
        self._decode = {
            heads: self._decode_ratios(heads, measured) for heads, measured in operators.decode_attention.items()
        }

    def gemm(self, rows: float, inner: float, outer: float) -> float:
        """Return the seconds of [rows, inner] x [inner, outer]."""
        return super().gemm(rows, inner, outer) * self._gemms.at((rows, inner, outer))

    def products(self, shapes: Sequence[tuple[float, float]]) -> Callable[[float], float]:
        """Return a function of rows: the sum of `gemm` over shapes (inner, outer)."""
        return lambda rows: sum(self.gemm(rows, inner, outer) for inner, outer in shapes)

    def attention(self, rows: float, tokens: float, context: float, heads: Heads, *, cache_bytes: float) -> float:
        """Return the seconds of `Kernels.attention`, scaled by the ratios of the most similar measured heads."""
        if tokens == 1 and context:
            return self.decoding(heads, cache_bytes)(rows, context)
        predicted = super().attention(rows, tokens, context, heads, cache_bytes=cache_bytes)
        return predicted * _nearest(self._prefill, heads).at((rows, tokens))

    def decoding(self, heads: Heads, cache_bytes: float) -> Callable[[float, float], float]:
        """Return the function of `Kernels.decoding`, scaled by the ratios of the most similar measured heads."""
        law, ratios = super().decoding(heads, cache_bytes), _nearest(self._decode, heads)
        return lambda rows, context: law(rows, context) * ratios.at((rows, context))

    def _prefill_ratios(self, heads: HeadCounts, measured: Mapping[Attention, float]) -> _Ratios:
        whole, size = Heads(*heads), self._cache_bytes
        return _Ratios(measured, lambda key: Kernels.attention(self, key[0], key[1], 0, whole, cache_bytes=size))

    def _decode_ratios(self, heads: HeadCounts, measured: Mapping[Attention, float]) -> _Ratios:
        law = super().decoding(Heads(*heads), self._cache_bytes)
        return _Ratios(measured, lambda key: law(key[0], key[1]))


class _Ratios:
    """Ratios of measured to predicted seconds on a grid of sizes, of which some may be missing."""

    def __init__(
        self,
        measured: Mapping[Gemm, float] | Mapping[Attention, float],
        law: Callable[[Sequence[float]], float],
    ) -> None:
        self._measured: Mapping[tuple[float, ...], float] = {tuple(key): seconds for key, seconds in measured.items()}
        self._axes = [sorted(set(sizes)) for sizes in zip(*self._measured, strict=True)]
        self._law = law

    def at(self, sizes: Sequence[float]) -> float:
        """Return the ratio at these sizes: the mean of the grid's corners around them, weighted by proximity."""
        total = weights = 0.0
        for corner, weight in _corners(self._axes, sizes):
            if corner in self._measured:
                total += weight * self._measured[corner] / self._law(corner)
                weights += weight
        if weights:
            return total / weights
        nearest = min(self._measured, key=partial(_distance, sizes))
        return self._measured[nearest] / self._law(nearest)


def _corners(axes: Sequence[Sequence[float]], sizes: Sequence[float]) -> Iterator[tuple[tuple[float, ...], float]]:
    """Yield the corners of the cell around the sizes, each with its weight; sizes are clamped to the grid."""
    if not axes:
        yield (), 1.0
        return
    axis, size = axes[0], min(max(sizes[0], axes[0][0]), axes[0][-1])
    upper = min(bisect_right(axis, size), len(axis) - 1)
    low, high = axis[max(0, upper - 1)], axis[upper]
    share = math.log(size / low) / math.log(high / low) if high > low else 0.0
    for end, part in ((low, 1 - share), (high, share)):
        if part > 0:
            for corner, weight in _corners(axes[1:], sizes[1:]):
                yield (end, *corner), part * weight


def _nearest(ratios: Mapping[HeadCounts, _Ratios], heads: Heads) -> _Ratios:
    return ratios[min(ratios, key=partial(_distance, heads[:3]))]


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the distance of two tuples of sizes: the sum of the absolute logarithms of their ratios."""
    return sum(abs(math.log(a / b)) for a, b in zip(one, other, strict=True))
