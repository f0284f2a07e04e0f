"""Seconds of single kernels on one device, from their shapes: matrix product, attention, element-wise.

A kernel takes `kernel_seconds` to start and end, and then as long as computing and moving take together: the roofline
max(c, b) away from its ridge (Williams, Waterman and Patterson, CACM 52(4), 2009), and (c^p + b^p)^(1/p) near it, where
measured tables show neither resource saturated. Sizes are per call and may be fractions, as means are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshwright.profiles.cluster import Device
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.model_parts.sliding_window import SlidingWindow

_TILE_EDGE = 64
"""Edge to which the cost of feeding a tile is referred."""


class Heads(NamedTuple):
    """Attention heads on one shard, which may see no more than a sliding window."""

    queries: int
    keys: int
    size: float
    window: SlidingWindow | None = None


class Kernels:
    """Kernel times on one device in one precision, which has `weight_bytes` per weight and `size` per activation."""

    def __init__(
        self, device: Device, efficiency: Efficiency, *, flops_per_second: float, weight_bytes: float, size: float
    ) -> None:
        self._efficiency = efficiency
        gemm, grouped = efficiency.gemm, efficiency.grouped
        self._processors = device.num_processors
        self._flops = flops_per_second / device.num_processors
        self._bandwidth, self._size = device.memory_bytes_per_second, size
        self._start = efficiency.kernel_seconds
        self._prologue, self._split, self._ridge = gemm.prologue, gemm.split, gemm.ridge
        byte = 1 / (self._bandwidth * gemm.bytes)
        self._weight_seconds, self._element_seconds = weight_bytes * byte, size * byte
        self._edge = math.gcd(*(rows for rows, _ in gemm.tiles))
        self._tiles = [
            (rows // self._edge, columns, self._tile_seconds(rows, columns, gemm.flops)) for rows, columns in gemm.tiles
        ]
        self._grouped_tiles = [(*tile, self._tile_seconds(*tile, grouped.flops)) for tile in gemm.tiles]
        byte = 1 / (self._bandwidth * grouped.bytes)
        self._grouped_weight, self._grouped_element = weight_bytes * byte, size * byte
        self._columns: dict[float, list[tuple[int, int, float]]] = {}

    def _tile_seconds(self, rows: int, columns: int, share: float) -> float:
        """Seconds of one element of the inner dimension of an output tile on one processor at this share of its peak.

        Small tiles read more operands per product (CUTLASS docs, efficient GEMM).
        """
        feeding = 1 + self._efficiency.gemm.tile_cost * _TILE_EDGE * (1 / rows + 1 / columns)
        return 2 * rows * columns * feeding / (self._flops * share)

    def gemm(self, rows: float, inner: float, outer: float) -> float:
        """Seconds of [rows, inner] x [inner, outer]."""
        memory = inner * outer * self._weight_seconds + rows * (inner + outer) * self._element_seconds
        return self._start + _joined(self._computing(math.ceil(rows / self._edge), inner, outer), memory, self._ridge)

    def computing(self, rows: float, inner: float, outer: float) -> float:
        """Seconds of [rows, inner] x [inner, outer] whose reading and writing are counted elsewhere."""
        return self._start + self._computing(math.ceil(rows / self._edge), inner, outer)

    def products(self, shapes: Sequence[tuple[float, float]]) -> Callable[[float], float]:
        """Seconds by rows of one product after the other, [rows, inner] x [inner, outer]: the sum of `gemm`.

        Computing depends on the number of tiles alone, and is kept.
        """
        starts, edge, power, root = len(shapes) * self._start, self._edge, self._ridge, 1 / self._ridge
        moved = [
            (inner * outer * self._weight_seconds, (inner + outer) * self._element_seconds) for inner, outer in shapes
        ]
        known: dict[int, list[tuple[float, float, float]]] = {}

        def parts(edges: int) -> list[tuple[float, float, float]]:
            """Seconds of each product: computing, moving weights, and moving a row."""
            computing = [self._computing(edges, inner, outer) for inner, outer in shapes]
            return [(compute, *moving) for compute, moving in zip(computing, moved, strict=True)]

        def seconds(rows: float) -> float:
            edges, total = math.ceil(rows / edge), starts
            if edges not in known:
                known[edges] = parts(edges)
            for compute, weights, per_row in known[edges]:
                memory = weights + rows * per_row
                if compute > memory:
                    total += compute * (1 + (memory / compute) ** power) ** root
                else:
                    total += memory * (1 + (compute / memory) ** power) ** root
            return total

        return seconds

    def _computing(self, edges: int, inner: float, outer: float) -> float:
        """Seconds of whole output tiles over the processors, for rows that fill so many edges.

        Tiles that leave processors idle split the inner dimension (stream-K: Osama et al., arXiv:2301.03598); each
        piece pays a prologue of `gemm.prologue` elements.
        """
        kinds = self._columns.get(outer)
        if kinds is None:
            kinds = self._columns[outer] = [(e, math.ceil(outer / columns), s) for e, columns, s in self._tiles]
        processors, prologue, compute = self._processors, self._prologue, math.inf
        for tile_edges, columns, seconds in kinds:
            tiles = -(-edges // tile_edges) * columns
            if tiles >= processors:
                found = tiles / processors * seconds * (inner + prologue)
            else:
                split, most = processors // tiles, int(inner / self._split) or 1
                found = seconds * (inner / (split if split < most else most) + prologue)
            compute = found if found < compute else compute
        return compute

    def grouped(self, rows: float, groups: float, inner: float, outer: float) -> float:
        """Seconds of one kernel that multiplies rows, dealt to `groups`, by the [inner, outer] weights of their group.

        A tile holds rows of one group (Gale et al., MegaBlocks, arXiv:2211.15841, section 5): groups are of unequal
        size, so that the last tile of each is half full on average. Weights are read once. The start is not counted.
        """
        computing, processors = math.inf, self._processors
        for edge, columns, seconds in self._grouped_tiles:
            high = rows / edge + groups * (edge - 1) / (2 * edge)
            waves = (high if high > groups else groups) * -(-outer // columns) / processors
            found = seconds * (waves if waves > 1 else 1)
            computing = found if found < computing else computing
        computing *= inner + self._efficiency.grouped.prologue
        memory = groups * inner * outer * self._grouped_weight + rows * (inner + outer) * self._grouped_element
        return _joined(computing, memory, self._efficiency.grouped.ridge)

    def grouped_gradient(self, rows: float, groups: float, inner: float, outer: float) -> float:
        """Seconds of one kernel that finds the gradients of those weights: each is a product over the group's rows."""
        computing, processors = math.inf, self._processors
        for edge, columns, seconds in self._grouped_tiles:
            waves = groups * -(-inner // edge) * -(-outer // columns) / processors
            found = seconds * (waves if waves > 1 else 1)
            computing = found if found < computing else computing
        computing *= rows / groups + self._efficiency.grouped.prologue
        memory = groups * inner * outer * self._grouped_weight + rows * (inner + outer) * self._grouped_element
        return _joined(computing, memory, self._efficiency.grouped.ridge)

    def attention(self, rows: float, tokens: float, context: float, heads: Heads, *, cache_bytes: float) -> float:
        """Seconds of causal attention of `tokens` new tokens a row over `context` cached ones and themselves, or over
        those of them in a window.

        Blocks of queries meet the keys before them, and some of a tile beyond the diagonal (Dao, FlashAttention-2,
        arXiv:2307.08691, section 3.3) and beyond the far edge of a window, in waves over the processors; 2 FLOPs for
        each of the two products.
        """
        if tokens == 1 and context:
            return self.decoding(heads, cache_bytes)(rows, context)
        (queries, keys, size, window), known = heads, self._efficiency.attention
        edge = known.block
        per_head = math.ceil(tokens / (2 * edge))
        waves = rows * queries * per_head / self._processors + known.tail
        seen = context + (tokens + known.tile) / 2
        if window:
            seen = min(seen, window.seen(tokens, context) + known.tile)
            context = min(context, window.num_tokens)
        flops = self._flops * known.flops
        block = 4 * (math.ceil(tokens / edge) * edge / per_head) * seen * size / flops
        elements = rows * size * (2 * tokens * queries + 2 * (context + tokens) * keys)
        moving = elements * self._size / (self._bandwidth * known.bytes)
        return known.seconds + _joined((waves if waves > 1 else 1) * block, moving, known.ridge)

    def decoding(self, heads: Heads, cache_bytes: float) -> Callable[[float, float], float]:
        """Seconds by rows and cached tokens of attention of one new token a row.

        The cache is read once: blocks of it spread over the processors and are joined (flash-decoding), at full
        bandwidth when enough are busy, beside the work for each row's key heads and for each query head. Kernels for
        fewer query heads a key head than `decoding.group` leave the cache of a key head to one processor.
        """
        (queries, keys, size, window), processors, known = heads, self._processors, self._efficiency.decoding
        start, power, root = known.seconds, known.ridge, 1 / known.ridge
        per_token = 2 * keys * size * cache_bytes / (self._bandwidth * known.bytes)
        per_row = (known.row_seconds * keys + known.head_seconds * queries) / processors
        block = math.inf if queries < known.group * keys else known.block
        joined, saturating = start + known.join_seconds, processors * known.saturation

        def seconds(rows: float, context: float) -> float:
            blocks = rows * keys * (math.ceil((context + 1) / block) or 1)
            read, work = rows * (context + 1) * per_token, rows * per_row
            if blocks < saturating:
                read *= saturating / blocks
            together: float
            if read > work:
                together = read * (1 + (work / read) ** power) ** root
            else:
                together = work * (1 + (read / work) ** power) ** root
            return (joined if context + 1 > block else start) + together

        if window is None:
            return seconds
        most = window.num_tokens - 1
        return lambda rows, context: seconds(rows, min(context, most))

    def elementwise(self, num_bytes: float) -> float:
        """Seconds to read and write this much."""
        return num_bytes / (self._bandwidth * self._efficiency.elementwise_bytes)


def _joined(one: float, other: float, power: float) -> float:
    """(a^p + b^p)^(1/p), without leaving the range of floats."""
    large, small = (one, other) if one > other else (other, one)
    return large * (1 + (small / large) ** power) ** (1 / power) if large else 0.0
