"""Seconds of single kernels on one device from their shapes, in each number format: matmuls, attention, element-wise
work, 8-bit linears, low-rank adapters and experts.

A kernel takes `kernel_seconds` to start and end, and then as long as computing and moving take together: the roofline
max(c, b) away from its ridge (Williams, Waterman and Patterson, CACM 52(4), 2009), and (c^p + b^p)^(1/p) near it,
where measured tables show neither resource saturated. Sizes are per call and may be fractions, as means are. If
experts are spread over ranks, all of them wait for the rank with the busiest experts, so that rank is costed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.elementwise import N, ceil, floor, maximum, minimum, sum_of, where
from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Experts
from meshwright.profiles.hardware import Device
from meshwright.profiles.model_parts.adapter import MLP_LINEARS, Adapter
from meshwright.profiles.model_parts.fp8_weights import linear_shapes, linears_of
from meshwright.profiles.model_parts.hf_config import SlidingWindow
from meshwright.profiles.model_shape import ModelSpec

_TILE_EDGE = 64
"""Tile edge for which `gemm.tile_cost` is stated."""


class Heads(NamedTuple):
    """Attention heads on one shard: query heads, KV heads, head size, and the sliding window if there is one."""

    queries: int
    keys: int
    size: float
    window: SlidingWindow | None = None


class SecondsByCount(Protocol):
    """Return the seconds for a number of rows, or for each of several numbers."""

    def __call__(self, rows: N, /) -> N: ...


class DecodeSeconds(Protocol):
    """Return the seconds of a decode step's attention for a number of rows and of cached tokens, or for several."""

    def __call__(self, rows: N, context: N, /) -> N: ...


class Kernels:
    """Kernel times on one device in one precision of `weight_bytes` per weight and `size` bytes per activation.

    With `block_scaled`, inputs of matmuls are rounded with a scale for each block. With `widens`, grouped ones widen
    their weights.
    """

    def __init__(
        self,
        device: Device,
        efficiency: Efficiency,
        *,
        flops_per_second: float,
        weight_bytes: float,
        size: float,
        block_scaled: bool = False,
        widens: bool = False,
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
        blocks = efficiency.block_scaled if block_scaled else None
        self._product_start = self._start + (blocks.seconds if blocks else 0.0)
        self._rounding_seconds = self.elementwise(size + weight_bytes) if blocks else 0.0
        flops = gemm.flops * (blocks.flops if blocks else 1)
        self._edge = math.gcd(*(rows for rows, _ in gemm.tiles))
        self._tiles = [
            (rows // self._edge, columns, self._tile_seconds(rows, columns, flops)) for rows, columns in gemm.tiles
        ]
        of_four_bits = grouped.four_bit_seconds if weight_bytes < 1 and not widens else None
        self.experts_start = grouped.seconds if of_four_bits is None else of_four_bits
        widened, tiles = grouped.widened if widens else None, gemm.tiles
        if widened:
            tiles = (*tiles, (widened.rows, max(columns for _, columns in tiles)))
        self._grouped_tiles = [(*tile, self._tile_seconds(*tile, grouped.flops)) for tile in tiles]
        byte = 1 / (self._bandwidth * (widened.bytes if widened else grouped.bytes))
        self._grouped_weight, self._grouped_element = weight_bytes * byte, size * byte

    def _tile_seconds(self, rows: int, columns: int, share: float) -> float:
        """Return the seconds of an output tile per element of the inner dimension, on one processor at `share` of its
        peak.

        Small tiles read more operands per product (CUTLASS docs, efficient GEMM).
        """
        feeding = 1 + self._efficiency.gemm.tile_cost * _TILE_EDGE * (1 / rows + 1 / columns)
        return 2 * rows * columns * feeding / (self._flops * share)

    def gemm(self, rows: Any, inner: Any, outer: Any) -> Any:
        """Return the seconds of [rows, inner] x [inner, outer]; of several matmuls if some sizes are arrays."""
        memory = inner * outer * self._weight_seconds + rows * (inner + outer) * self._element_seconds
        around = self._product_start + rows * inner * self._rounding_seconds
        return around + smooth_max(self._computing(ceil(rows / self._edge), inner, outer), memory, self._ridge)

    def computing(self, rows: Any, inner: Any, outer: Any) -> Any:
        """Return the seconds of [rows, inner] x [inner, outer] without memory traffic, which is counted elsewhere."""
        return self._start + self._computing(ceil(rows / self._edge), inner, outer)

    def products(self, shapes: Sequence[tuple[float, float]]) -> SecondsByCount:
        """Return a function of rows: the sum of `gemm` over shapes (inner, outer).

        Compute time depends on the number of tiles alone; it is cached where rows are a single number.
        """
        starts, edge, power, root = len(shapes) * self._product_start, self._edge, self._ridge, 1 / self._ridge
        rounding = sum(inner for inner, _ in shapes) * self._rounding_seconds
        moved = [
            (inner * outer * self._weight_seconds, (inner + outer) * self._element_seconds) for inner, outer in shapes
        ]
        known: dict[int, list[tuple[float, float, float]]] = {}

        def parts(edges: int) -> list[tuple[float, float, float]]:
            """Return for each matmul the seconds of computing, of moving weights, and of moving a row."""
            computing = [self._computing(edges, inner, outer) for inner, outer in shapes]
            return [(compute, *moving) for compute, moving in zip(computing, moved, strict=True)]

        def seconds(rows: N) -> N:
            if isinstance(rows, np.ndarray):
                return sum_of([self.gemm(rows, one, other) for one, other in shapes])
            edges, total = math.ceil(rows / edge), starts + rows * rounding
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

    def _computing(self, edges: Any, inner: Any, outer: Any) -> Any:
        """Return the seconds of computing whole output tiles on all processors, for rows that span `edges` tile edges.

        If there are fewer tiles than processors, the inner dimension is split (stream-K: Osama et al.,
        arXiv:2301.03598); each piece pays a prologue of `gemm.prologue` elements.
        """
        processors, prologue, fastest = self._processors, self._prologue, math.inf + 0 * (edges + inner + outer)
        max_split = maximum(floor(inner / self._split), 1)
        for tile_edges, tile_columns, seconds in self._tiles:
            tiles = ceil(edges / tile_edges) * ceil(outer / tile_columns)
            split = minimum(maximum(processors // tiles, 1), max_split)
            in_pieces = seconds * (inner / split + prologue)
            whole = tiles / processors * seconds * (inner + prologue)
            fastest = minimum(where(tiles >= processors, whole, in_pieces), fastest)
        return fastest

    def grouped(self, rows: N, groups: N, inner: float, outer: float) -> N:
        """Return the seconds of a grouped GEMM: `rows` rows in `groups` groups, each with [inner, outer] weights.

        A tile holds rows of one group (Gale et al., MegaBlocks, arXiv:2211.15841, section 5): groups differ in size, so
        the last tile of each is half full on average. Weights are read once. The kernel's start is not counted.
        """
        computing = math.inf + 0 * rows
        for edge, columns, seconds in self._grouped_tiles:
            num_tiles = maximum(rows / edge + groups * (edge - 1) / (2 * edge), groups)
            waves = num_tiles * -(-outer // columns) / self._processors
            computing = minimum(computing, seconds * maximum(waves, 1))
        computing = computing * (inner + self._efficiency.grouped.prologue)
        memory = groups * inner * outer * self._grouped_weight + rows * (inner + outer) * self._grouped_element
        return smooth_max(computing, memory, self._efficiency.grouped.ridge)

    def grouped_gradient(self, rows: N, groups: N, inner: float, outer: float) -> N:
        """Return the seconds of a grouped GEMM for the weight gradients, each a product over the group's rows."""
        computing = math.inf + 0 * rows
        for edge, columns, seconds in self._grouped_tiles:
            waves = groups * -(-inner // edge) * -(-outer // columns) / self._processors
            computing = minimum(computing, seconds * maximum(waves, 1))
        computing = computing * (rows / groups + self._efficiency.grouped.prologue)
        memory = groups * inner * outer * self._grouped_weight + rows * (inner + outer) * self._grouped_element
        return smooth_max(computing, memory, self._efficiency.grouped.ridge)

    def attention(self, rows: N, tokens: N, context: N, heads: Heads, *, cache_bytes: float) -> N:
        """Return the seconds of causal attention over `rows` rows, each with `tokens` new and `context` cached tokens,
        limited to the window if there is one.

        Each block of queries attends to the keys before it, plus part of a tile beyond the diagonal (Dao,
        FlashAttention-2, arXiv:2307.08691, section 3.3) and beyond the far edge of a window. Blocks run in waves over
        the processors, with 2 FLOPs for each of the two products. One new token after cached ones is a decode step.
        """
        is_decoding = (tokens == 1) & (context > 0)
        if not np.any(is_decoding):
            return self._block_attention(rows, tokens, context, heads)
        decoding = self.decoding(heads, cache_bytes)(rows, context)
        return where(is_decoding, decoding, self._block_attention(rows, tokens, context, heads))

    def _block_attention(self, rows: N, tokens: N, context: N, heads: Heads) -> N:
        """Return the seconds of attention whose queries are processed in blocks."""
        (queries, keys, size, window), params = heads, self._efficiency.attention
        edge = params.block
        per_head = ceil(tokens / (2 * edge))
        waves = rows * queries * per_head / self._processors + params.tail
        num_keys = context + (tokens + params.tile) / 2
        if window:
            num_keys = minimum(num_keys, window.attended_tokens(tokens, context) + params.tile)
            context = minimum(context, window.num_tokens)
        flops = self._flops * params.flops
        block = 4 * (ceil(tokens / edge) * edge / per_head) * num_keys * size / flops
        elements = rows * size * (2 * tokens * queries + 2 * (context + tokens) * keys)
        moving = elements * self._size / (self._bandwidth * params.bytes)
        return params.seconds + smooth_max(maximum(waves, 1) * block, moving, params.ridge)

    def decoding(self, heads: Heads, cache_bytes: float) -> DecodeSeconds:
        """Return a function of rows and cached tokens: the seconds of attention of one new token a row.

        The cache is read once: its blocks are spread over the processors and joined (flash-decoding), at full bandwidth
        if enough processors are busy; besides there is work per key head and per query head of a row. With fewer query
        heads per key head than `decoding.group`, one processor reads the whole cache of a key head.
        """
        (queries, keys, size, window), processors, params = heads, self._processors, self._efficiency.decoding
        start, ridge = params.seconds, params.ridge
        per_token = 2 * keys * size * cache_bytes / (self._bandwidth * params.bytes)
        per_row = (params.row_seconds * keys + params.head_seconds * queries) / processors
        block = math.inf if queries < params.group * keys else params.block
        joined, saturating = start + params.join_seconds, processors * params.saturation

        def seconds(rows: N, context: N) -> N:
            blocks = rows * keys * maximum(ceil((context + 1) / block), 1)
            read, work = rows * (context + 1) * per_token, rows * per_row
            read = read * maximum(saturating / blocks, 1)
            return where(context + 1 > block, joined, start + 0 * read) + smooth_max(read, work, ridge)

        def windowed(rows: N, context: N) -> N:
            return seconds(rows, minimum(context, max_context))

        if window is None:
            return seconds
        max_context = window.num_tokens - 1
        return windowed

    def elementwise(self, num_bytes: N) -> N:
        """Return the seconds to read and write `num_bytes`."""
        return num_bytes / (self._bandwidth * self._efficiency.elementwise_bytes)


def smooth_max(one: N, other: N, power: float) -> N:
    """Return (a^p + b^p)^(1/p) of two numbers, of which one is positive, without overflow."""
    large, small = maximum(one, other), minimum(one, other)
    combined: N = large * (1 + (small / large) ** power) ** (1 / power)
    return combined


class Precision(NamedTuple):
    """Bytes of a weight, of an activation between kernels, and of a cached key or value, and the format of the head.

    `peak` is the format whose peak products reach. `block_scaled` and `widens` are as in `Kernels`.
    """

    weight_bytes: float
    size: int
    cache_bytes: int
    head: str
    peak: str
    block_scaled: bool = False
    widens: bool = False


PRECISIONS = {
    "fp32": Precision(4, 4, 4, "fp32", peak="fp32"),
    "bf16": Precision(2, 2, 2, "bf16", peak="bf16"),
    "fp8": Precision(1, 2, 1, "bf16", peak="fp8"),
    "fp4": Precision(0.5625, 2, 1, "bf16", peak="fp4"),
    "w4a16": Precision(0.5625, 2, 2, "bf16", peak="bf16", widens=True),
    "fp8-block": Precision(1, 2, 2, "bf16", peak="fp8", block_scaled=True),
}
"""fp8 and fp4 as inference engines use them: 16-bit between kernels, an fp8 cache; fp4 has an fp8 scale for each 16
weights (NVFP4; TensorRT-LLM docs, "Numerical Precision"). fp8-block has a scale for each block of weights, and the
cache in 16 bits that engines have by default. w4a16 has weights of 4 bits that kernels widen to 16."""

_TRAINED = ("fp32", "bf16")
"""Number formats in which models are trained."""


def precision_named(name: str, device: Device) -> Precision:
    """Return the format. Raises BadInput if it is unknown or the device has no peak for it."""
    if name not in PRECISIONS:
        raise BadInput(f"precision={name!r} is not known; use {' or '.join(PRECISIONS)}.")
    peak = PRECISIONS[name].peak
    if peak not in device.flops_per_second:
        raise BadInput(f"device {device.name} has no peak for {peak}; give flops_per_second.{peak}.")
    return PRECISIONS[name]


def element_bytes(precision: str) -> int:
    """Return the bytes per element of a trained model. Raises BadInput for a precision other than fp32 and bf16."""
    if precision not in _TRAINED:
        raise BadInput(f"precision={precision!r} is not known; use {' or '.join(_TRAINED)}.")
    return PRECISIONS[precision].size


_ROUNDING_KERNELS = 3
"""Kernels that round the input of each linear to 8 bits: a token's maximum, its scale, and the quotient
(runtime/model/fp8_linears.py)."""

_CASTING_KERNELS = 4
"""Further kernels of each linear if 8-bit floats are cast up to be multiplied: both factors, and both scales."""


class QuantisedLinears:
    """Seconds of the linears of a layer of a shard with 8-bit weights; their inputs are rounded to 8 bits as well.

    A GPU multiplies at its fp8 peak and reads one byte per weight. A CPU casts both factors up in every pass and
    multiplies as `kernels` do. With `is_fused`, the preceding kernels round the tokens.
    """

    def __init__(
        self, model: ModelSpec, device: Device, efficiency: Efficiency, kernels: Kernels, size: int, *, is_fused: bool
    ) -> None:
        """`size` is the number of bytes of an element between kernels."""
        shapes, linears, casts = linear_shapes(model), linears_of(model), device.kind == "cpu"
        if not casts:
            flops = device.flops_per_second["fp8"] * efficiency.sustained
            kernels = Kernels(device, efficiency, flops_per_second=flops, weight_bytes=1, size=size)
        per_input, per_output = (0 if is_fused else 2 * size + 1), 0
        if casts:
            per_input, per_output = per_input + 1 + size, 4 * size
        moved = per_input * linears.num_inputs + per_output * linears.num_outputs
        self._products, self._token_seconds = kernels.products(shapes), kernels.elementwise(moved)
        self._pass_seconds = kernels.elementwise((1 + size) * linears.num_weights) if casts else 0.0
        each = (0 if is_fused else _ROUNDING_KERNELS) + (_CASTING_KERNELS if casts else 0)
        self.num_kernels = each * len(shapes)

    def seconds(self, count: N) -> N:
        """Return the device seconds of one pass over `count` tokens."""
        return self._products(count) + count * self._token_seconds + self._pass_seconds


_SUM_ACCESSES = 3
"""Reads and writes of each output when one product is added to another."""

_KERNELS, _STARTED = 3, 2
"""Kernels of each adapted linear (two matmuls and a sum), and how many of them have their start-up time included
in `LowRank.seconds`."""


class LowRank:
    """Seconds of the adapters of some linears of one layer of a shard; they grow with the number of tokens.

    The gradients of A and of B are matmuls of their own, besides the gradients of their inputs (Hu et al., LoRA,
    arXiv:2106.09685, section 4.1).
    """

    def __init__(
        self,
        model: ModelSpec,
        kernels: Kernels,
        size: float,
        linears: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """`size` is the number of bytes of an element between kernels; `linears` are the (input size, output size) of
        the adapted linears, by default those of a layer with a plain MLP."""
        assert model.adapter is not None, model.name
        rank, linears = model.adapter.rank, model.adapted_linears if linears is None else linears
        self._shapes = [shape for inner, outer in linears for shape in ((inner, rank), (rank, outer))]
        self._kernels = kernels
        self._forward = kernels.products(self._shapes)
        self._gradients = kernels.products([(outer, inner) for inner, outer in self._shapes])
        self._adding_seconds = kernels.elementwise(size * _SUM_ACCESSES * sum(outer for _, outer in linears))
        self.num_kernels, self.num_started = _KERNELS * len(linears), _STARTED * len(linears)

    def seconds(self, count: N, *, trains: bool) -> N:
        """Return the device seconds of a layer for `count` tokens, forward or (`trains`) forward and backward.

        The sum has no cost backward: it passes its gradient on unchanged.
        """
        seconds = self._forward(count) + count * self._adding_seconds
        if trains:
            gemm = self._kernels.gemm
            weight_gradients = [gemm(inner, count, outer) for inner, outer in self._shapes]
            seconds = seconds + self._gradients(count) + sum_of(weight_gradients)
        return seconds


_MOVES = 4
"""Reads and writes of a hidden state that is dispatched to an expert and combined, besides those of the matmuls."""

_WIDTHS = 3
"""Elements that the activation moves, in expert widths: it reads gate and up projection, and writes their product."""

_BACKWARD = 2.0
"""Backward over forward traffic: it reads the saved input and the gradient, and writes a gradient."""

_CLAMP_WIDTHS = 8, 10
"""Elements that a clamped gate moves as kernels of its own, in expert widths, forward and backward: each half is
clamped and both are joined; the gradients pass two masks and are joined (Megatron-core 0.16.1,
fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl)."""

_BIAS_WIDTHS = 6, 8
"""Elements that adding the output biases of experts moves, in hidden sizes, forward and backward: a weighted bias for
each row, the sum, and the joined sums of all experts; backward besides the gradients of bias and weight (Megatron-core
0.16.1, transformer/moe/experts.py, TEGroupedMLP._apply_bias)."""


_BIAS_KERNELS = 2
"""Kernels for each expert of a rank where output biases are added one expert after the other: the bias times the
weights of its tokens, and the sum (Megatron-core 0.16.1, transformer/moe/experts.py, TEGroupedMLP._apply_bias). They
are shorter than their launches, and the host is not ahead, since it has just waited for the number of tokens of each
expert (Megatron-Bridge, perf_recipes/gpt_oss/gb300/gpt_oss.py at 007282ea: this "serializes the CPU behind the
GPU")."""


class Mixture:
    """Seconds of the experts of a mixture-of-experts layer on one rank.

    Experts are spread over `spread` replicas and sharded along their width by tensor parallelism; or they are whole,
    and spread over `folded` ranks of each replica as well (see `Layout`)."""

    def __init__(
        self,
        kernels: Kernels,
        experts: Experts,
        hidden_size: int,
        *,
        spread: int,
        folded: int = 1,
        size: float,
        separate_biases: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        """With `separate_biases`, biases and clamps of experts are kernels of their own in training. An `adapter` is on
        the linears of experts that it names; its products are grouped like theirs."""
        self.experts, width = experts, experts.ffn_size * folded
        self._kernels, self._start = kernels, kernels.experts_start
        self._spread, self._folded, self._ep = spread, folded, spread * folded
        widths = _WIDTHS * width * experts.num_matrices / 3
        self._copy_seconds = kernels.elementwise(size * (widths + _MOVES * hidden_size))
        self._shapes = (hidden_size, (experts.num_matrices - 1) * width), (width, hidden_size)
        moved = sum(_CLAMP_WIDTHS) * width + sum(_BIAS_WIDTHS) * hidden_size
        self._bias_seconds = kernels.elementwise(size * moved) if separate_biases else 0.0
        targets = [name in adapter.targets for name in MLP_LINEARS] if adapter else []
        adapted = [shape for shape, is_target in zip(self._shapes, targets, strict=False) if is_target]
        rank = adapter.rank if adapter else 0
        self._low_rank = [shape for inner, outer in adapted for shape in ((inner, rank), (rank, outer))]
        self._adding_seconds = kernels.elementwise(size * _SUM_ACCESSES * sum(outer for _, outer in adapted))
        self.num_adapter_kernels = _KERNELS * len(adapted)
        self.num_bias_kernels = _BIAS_KERNELS * experts.num_experts / self._ep if separate_biases else 0.0

    def seconds(self, count: N, *, trains: bool, is_frozen: bool = False) -> N:
        """Return the seconds on the busiest rank when each replica brings `count` tokens.

        Frozen experts have no weight gradients.
        """
        experts, tokens = self.experts, count * self._spread
        rows = count * experts.experts_per_token * experts.imbalance(tokens, self._ep) / self._folded
        return self.seconds_of_rows(rows, experts.num_selected(tokens) / self._ep, trains=trains, is_frozen=is_frozen)

    def seconds_of_rows(self, rows: N, groups: N, *, trains: bool = False, is_frozen: bool = False) -> N:
        """Return the seconds when `rows` routed tokens arrive at `groups` of this rank's experts."""
        grouped, moving = self._kernels.grouped, self._start + rows * self._copy_seconds
        seconds = moving
        for inner, outer in (*self._shapes, *self._low_rank):
            seconds = seconds + grouped(rows, groups, inner, outer)
        seconds = seconds + rows * self._adding_seconds
        if trains:
            seconds = seconds + _BACKWARD * moving + rows * self._bias_seconds
            for inner, outer in self._shapes:
                seconds = seconds + grouped(rows, groups, outer, inner)
                if not is_frozen:
                    seconds = seconds + self._kernels.grouped_gradient(rows, groups, inner, outer)
            for inner, outer in self._low_rank:
                seconds = seconds + grouped(rows, groups, outer, inner)
                seconds = seconds + self._kernels.grouped_gradient(rows, groups, inner, outer)
        return seconds
