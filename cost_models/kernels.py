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
"""Tile edge that `gemm.tile_cost` refers to."""


class Heads(NamedTuple):
    """Attention heads on one shard: query heads, key heads, head size, and the sliding window if there is one."""

    queries: int
    keys: int
    size: float
    window: SlidingWindow | None = None


class Kernels:
    """Kernel times on one device in one precision of `weight_bytes` per weight and `size` bytes per activation."""

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
        """Return the seconds of one inner element of an output tile, on one processor at `share` of its peak.

        Small tiles read more operands per product (CUTLASS docs, efficient GEMM).
        """
        feeding = 1 + self._efficiency.gemm.tile_cost * _TILE_EDGE * (1 / rows + 1 / columns)
        return 2 * rows * columns * feeding / (self._flops * share)

    def gemm(self, rows: float, inner: float, outer: float) -> float:
        """Return the seconds of [rows, inner] x [inner, outer]."""
        memory = inner * outer * self._weight_seconds + rows * (inner + outer) * self._element_seconds
        return self._start + _smooth_max(
            self._computing(math.ceil(rows / self._edge), inner, outer), memory, self._ridge
        )

    def computing(self, rows: float, inner: float, outer: float) -> float:
        """Return the seconds of [rows, inner] x [inner, outer] without memory traffic, which is counted elsewhere."""
        return self._start + self._computing(math.ceil(rows / self._edge), inner, outer)

    def products(self, shapes: Sequence[tuple[float, float]]) -> Callable[[float], float]:
        """Return a function of rows: the sum of `gemm` over shapes (inner, outer).

        Compute time depends on the number of tiles alone, and is cached.
        """
        starts, edge, power, root = len(shapes) * self._start, self._edge, self._ridge, 1 / self._ridge
        moved = [
            (inner * outer * self._weight_seconds, (inner + outer) * self._element_seconds) for inner, outer in shapes
        ]
        known: dict[int, list[tuple[float, float, float]]] = {}

        def parts(edges: int) -> list[tuple[float, float, float]]:
            """Return for each matmul the seconds of computing, of moving weights, and of moving a row."""
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
        """Return the seconds of whole output tiles over the processors, for rows that span `edges` tile edges.

        If there are fewer tiles than processors, the inner dimension is split (stream-K: Osama et al.,
        arXiv:2301.03598); each piece pays a prologue of `gemm.prologue` elements.
        """
        tile_kinds = self._columns.get(outer)
        if tile_kinds is None:
            tile_kinds = self._columns[outer] = [(e, math.ceil(outer / columns), s) for e, columns, s in self._tiles]
        processors, prologue, compute = self._processors, self._prologue, math.inf
        for tile_edges, columns, seconds in tile_kinds:
            tiles = -(-edges // tile_edges) * columns
            if tiles >= processors:
                seconds_of_kind = tiles / processors * seconds * (inner + prologue)
            else:
                split, max_split = processors // tiles, int(inner / self._split) or 1
                seconds_of_kind = seconds * (inner / (split if split < max_split else max_split) + prologue)
            compute = seconds_of_kind if seconds_of_kind < compute else compute
        return compute

    def grouped(self, rows: float, groups: float, inner: float, outer: float) -> float:
        """Return the seconds of a grouped GEMM: `rows` rows in `groups` groups, each with [inner, outer] weights.

        A tile holds rows of one group (Gale et al., MegaBlocks, arXiv:2211.15841, section 5): groups differ in size, so
        the last tile of each is half full on average. Weights are read once. The kernel's start is not counted.
        """
        computing, processors = math.inf, self._processors
        for edge, columns, seconds in self._grouped_tiles:
            num_tiles = rows / edge + groups * (edge - 1) / (2 * edge)
            waves = (num_tiles if num_tiles > groups else groups) * -(-outer // columns) / processors
            candidate = seconds * (waves if waves > 1 else 1)
            computing = candidate if candidate < computing else computing
        computing *= inner + self._efficiency.grouped.prologue
        memory = groups * inner * outer * self._grouped_weight + rows * (inner + outer) * self._grouped_element
        return _smooth_max(computing, memory, self._efficiency.grouped.ridge)

    def grouped_gradient(self, rows: float, groups: float, inner: float, outer: float) -> float:
        """Return the seconds of a grouped GEMM for the weight gradients, each a product over the group's rows."""
        computing, processors = math.inf, self._processors
        for edge, columns, seconds in self._grouped_tiles:
            waves = groups * -(-inner // edge) * -(-outer // columns) / processors
            candidate = seconds * (waves if waves > 1 else 1)
            computing = candidate if candidate < computing else computing
        computing *= rows / groups + self._efficiency.grouped.prologue
        memory = groups * inner * outer * self._grouped_weight + rows * (inner + outer) * self._grouped_element
        return _smooth_max(computing, memory, self._efficiency.grouped.ridge)

    def attention(self, rows: float, tokens: float, context: float, heads: Heads, *, cache_bytes: float) -> float:
        """Return the seconds of causal attention of `tokens` new tokens a row over themselves and `context` cached
        ones, limited to the window if there is one.

        Each block of queries meets the keys before it, plus part of a tile beyond the diagonal (Dao, FlashAttention-2,
        arXiv:2307.08691, section 3.3) and beyond the far edge of a window. Blocks run in waves over the processors,
        with 2 FLOPs for each of the two products.
        """
        if tokens == 1 and context:
            return self.decoding(heads, cache_bytes)(rows, context)
        (queries, keys, size, window), law = heads, self._efficiency.attention
        edge = law.block
        per_head = math.ceil(tokens / (2 * edge))
        waves = rows * queries * per_head / self._processors + law.tail
        num_keys = context + (tokens + law.tile) / 2
        if window:
            num_keys = min(num_keys, window.attended_tokens(tokens, context) + law.tile)
            context = min(context, window.num_tokens)
        flops = self._flops * law.flops
        block = 4 * (math.ceil(tokens / edge) * edge / per_head) * num_keys * size / flops
        elements = rows * size * (2 * tokens * queries + 2 * (context + tokens) * keys)
        moving = elements * self._size / (self._bandwidth * law.bytes)
        return law.seconds + _smooth_max((waves if waves > 1 else 1) * block, moving, law.ridge)

    def decoding(self, heads: Heads, cache_bytes: float) -> Callable[[float, float], float]:
        """Return a function of rows and cached tokens: the seconds of attention of one new token a row.

        The cache is read once: its blocks are spread over the processors and joined (flash-decoding), at full bandwidth
        if enough processors are busy; besides there is work per key head and per query head of a row. With fewer query
        heads per key head than `decoding.group`, one processor reads the whole cache of a key head.
        """
        (queries, keys, size, window), processors, law = heads, self._processors, self._efficiency.decoding
        start, power, root = law.seconds, law.ridge, 1 / law.ridge
        per_token = 2 * keys * size * cache_bytes / (self._bandwidth * law.bytes)
        per_row = (law.row_seconds * keys + law.head_seconds * queries) / processors
        block = math.inf if queries < law.group * keys else law.block
        joined, saturating = start + law.join_seconds, processors * law.saturation

        def seconds(rows: float, context: float) -> float:
            blocks = rows * keys * (math.ceil((context + 1) / block) or 1)
            read, work = rows * (context + 1) * per_token, rows * per_row
            if blocks < saturating:
                read *= saturating / blocks
            total: float
            if read > work:
                total = read * (1 + (work / read) ** power) ** root
            else:
                total = work * (1 + (read / work) ** power) ** root
            return (joined if context + 1 > block else start) + total

        if window is None:
            return seconds
        max_context = window.num_tokens - 1
        return lambda rows, context: seconds(rows, min(context, max_context))

    def elementwise(self, num_bytes: float) -> float:
        """Return the seconds to read and write `num_bytes`."""
        return num_bytes / (self._bandwidth * self._efficiency.elementwise_bytes)


def _smooth_max(one: float, other: float, power: float) -> float:
    """Return (a^p + b^p)^(1/p) without overflow."""
    large, small = (one, other) if one > other else (other, one)
    return large * (1 + (small / large) ** power) ** (1 / power) if large else 0.0
