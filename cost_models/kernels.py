"""Seconds of single kernels on one device, from their shapes: matrix product, attention, element-wise.

A kernel takes `kernel_seconds` to start and end, and then as long as computing and moving take together: the roofline
max(c, b) away from its ridge (Williams, Waterman and Patterson, CACM 52(4), 2009), and (c^p + b^p)^(1/p) near it, where
measured tables show neither resource saturated. Sizes are per call and may be fractions, as means are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from meshwright.profiles.cluster import Device
from meshwright.profiles.efficiency import Efficiency

_TILE_EDGE = 64
"""Edge to which the cost of feeding a tile is referred."""


class Heads(NamedTuple):
    """Attention heads on one shard."""

    queries: int
    keys: int
    size: float


class Kernels:
    """Kernel times on one device in one precision, which has `weight_bytes` per weight and `size` per activation."""

    def __init__(
        self, device: Device, efficiency: Efficiency, *, flops_per_second: float, weight_bytes: float, size: float
    ) -> None:
        self._efficiency = efficiency
        self._weight_bytes, self._size = weight_bytes, size
        self._processors = device.num_processors
        self._flops = flops_per_second / device.num_processors
        self._bandwidth = device.memory_bytes_per_second
        self._start = efficiency.kernel_seconds
        self._prologue, self._split, self._ridge = (
            efficiency.gemm_prologue,
            efficiency.gemm_split,
            efficiency.gemm_ridge,
        )
        self._gemm_byte = 1 / (self._bandwidth * efficiency.gemm_bytes)
        self._tiles = tuple(
            (rows, columns, 2 * rows * columns * self._feeding(rows, columns) / (self._flops * efficiency.gemm_flops))
            for rows, columns in efficiency.gemm_tiles
        )

    def _feeding(self, rows: int, columns: int) -> float:
        """Relative work of a tile: small ones read more operands per product (CUTLASS docs, efficient GEMM)."""
        return 1 + self._efficiency.gemm_tile_cost * _TILE_EDGE * (1 / rows + 1 / columns)

    def gemm(self, rows: float, inner: float, outer: float) -> float:
        """Seconds of [rows, inner] x [inner, outer], whole output tiles over the processors.

        Tiles that leave processors idle split the inner dimension (stream-K: Osama et al., arXiv:2301.03598); each
        piece pays a prologue of `gemm_prologue` elements.
        """
        processors, prologue, most = self._processors, self._prologue, int(inner / self._split) or 1
        compute, ceil = math.inf, math.ceil
        for tile_rows, tile_columns, seconds in self._tiles:
            tiles = ceil(rows / tile_rows) * ceil(outer / tile_columns)
            if tiles >= processors:
                found = tiles / processors * seconds * (inner + prologue)
            else:
                split = processors // tiles
                found = seconds * (inner / (split if split < most else most) + prologue)
            compute = found if found < compute else compute
        memory = (inner * outer * self._weight_bytes + rows * (inner + outer) * self._size) * self._gemm_byte
        return self._start + _joined(compute, memory, self._ridge)

    def attention(self, rows: float, tokens: float, context: float, heads: Heads, *, cache_bytes: float) -> float:
        """Seconds of causal attention of `tokens` new tokens a row over `context` cached ones and themselves.

        Blocks of queries meet the keys before them, and some of a tile beyond the diagonal (Dao, FlashAttention-2,
        arXiv:2307.08691, section 3.3), in waves over the processors; 2 FLOPs for each of the two products.
        """
        if tokens == 1 and context:
            return self._decoding(rows, context + 1, heads, cache_bytes)
        efficiency = self._efficiency
        blocks = rows * heads.queries * math.ceil(tokens / (2 * efficiency.attention_block))
        waves = max(1.0, blocks / self._processors + efficiency.attention_tail)
        seen = context + (tokens + efficiency.attention_tile) / 2
        covered = (
            math.ceil(tokens / efficiency.attention_block)
            * efficiency.attention_block
            / (blocks / (rows * heads.queries))
        )
        block = 4 * covered * seen * heads.size / (self._flops * efficiency.attention_flops)
        elements = rows * heads.size * (2 * tokens * heads.queries + 2 * (context + tokens) * heads.keys)
        moved = elements * self._size / (self._bandwidth * efficiency.attention_bytes)
        return efficiency.attention_seconds + _joined(waves * block, moved, efficiency.attention_ridge)

    def _decoding(self, rows: float, length: float, heads: Heads, cache_bytes: float) -> float:
        """Seconds to read the cache once: blocks of it spread over the processors (flash-decoding), at full bandwidth
        when all are busy, beside the work for each row's key heads and for each query head."""
        efficiency = self._efficiency
        blocks = rows * heads.keys * math.ceil(length / efficiency.decoding_block)
        busy = min(1.0, blocks / self._processors)
        moved = 2 * rows * length * heads.keys * heads.size * cache_bytes
        read = moved / (self._bandwidth * efficiency.decoding_bytes * busy)
        work = efficiency.decoding_row_seconds * heads.keys + efficiency.decoding_head_seconds * heads.queries
        return efficiency.decoding_seconds + _joined(read, work * rows / self._processors, efficiency.decoding_ridge)

    def elementwise(self, num_bytes: float) -> float:
        """Seconds to read and write this much."""
        return num_bytes / (self._bandwidth * self._efficiency.elementwise_bytes)


def _joined(one: float, other: float, power: float) -> float:
    """(a^p + b^p)^(1/p), without leaving the range of floats."""
    large, small = (one, other) if one > other else (other, one)
    return large * (1 + (small / large) ** power) ** (1 / power) if large else 0.0
