"""Decode attention of one token per row over a paged KV cache, and kernels that write to the cache.

Rows that only pad a step have no cached token and block 0, which belongs to no sequence.

Attention is split over the keys of a row and the parts are joined: with m the largest score of a part, l its sum of
exp(s - m) and o that of exp(s - m) v, the output is sum o / sum l, all rescaled to the row's m (Dao et al.,
arXiv:2205.14135, section 3.1; Flash-Decoding). Programs of neighbouring rows run side by side, so that blocks which the
samples of a prompt share are read from memory once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS

_MIN_PART, _MAX_PART = 128, 512
"""Bounds on the tokens of a part: with fewer, joining costs more than it saves; with more, multiprocessors are idle
while the longest row runs."""
_PROGRAMS_PER_PROCESSOR = 8
"""Minimum number of programs per multiprocessor that a step's attention is split into, if its rows are long enough.
Half of them lie beyond the end of their row if lengths are spread evenly. With this number and the sizes below, the
attention of a layer over 64 rows of 1,000 tokens took 18.5 us instead of 20.0 for Qwen2.5-0.5B and about 74 us instead
of 85 for Llama-3.1-8B, and over 128 rows of 300 tokens 13.5 us instead of 17.9 (H200, 2026-11-26)."""
_TILE = 128
"""Tokens whose keys and values a program loads at a time."""
_WARPS, _STAGES = 4, 3
_MIN_QUERIES = 16
"""Minimum number of queries in a tile that tensor cores multiply."""
_LOG2_E = 1.4426950408889634
_ALL_TOKENS = 2**30
"""A window that is longer than any row."""


def rotate_and_store(
    heads: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    angles: tuple[Tensor, Tensor],
    reads: tuple[Tensor, Tensor],
) -> None:
    """Apply the rotary embedding to the queries and the key of `heads` [B, kv_heads, queries + 2, D]. Write the queries
    to `query` [B, kv_heads, queries, D], and the key and the value to a layer's blocks [blocks, kv_heads, tokens, D].
    `angles` are cos and sin [positions, D / 2], `reads` the lengths [B] and the block tables [B, n] of rows."""
    (cos, sin), (lengths, tables) = angles, reads
    num_rows, kv_heads, per_group, size = heads.shape
    _rotate_and_store[num_rows, kv_heads](
        heads, query, keys, values, cos, sin, lengths, tables, tables.stride(0), keys, values,
        QUERIES=per_group - 2, SIZE=size, HALF=triton.next_power_of_2(size // 2), TOKENS=BLOCK_TOKENS, PACKED=False,
        num_warps=1,
    )  # fmt: skip


def rotate_and_store_packed(
    heads: Tensor,
    rotated: tuple[Tensor, Tensor, Tensor],
    cached: tuple[Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor],
) -> None:
    """Do the same as `rotate_and_store` for packed tokens [S]: `places` are their positions [S] and the blocks [S] that
    cache them, in the keys and values `cached`. Queries, keys and values are written to `rotated` too: [S, kv_heads,
    queries, D], and [S, kv_heads, D] twice."""
    (query, key, value), (keys, values), (cos, sin), (positions, blocks) = rotated, cached, angles, places
    num_tokens, kv_heads, per_group, size = heads.shape
    _rotate_and_store[num_tokens, kv_heads](
        heads, query, keys, values, cos, sin, positions, blocks, 1, key, value,
        QUERIES=per_group - 2, SIZE=size, HALF=triton.next_power_of_2(size // 2), TOKENS=BLOCK_TOKENS, PACKED=True,
        num_warps=1,
    )  # fmt: skip


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    reads: tuple[Tensor, Tensor],
    split: KeySplit,
    *,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Return [B, heads * D] from rotated queries [B, kv_heads, queries, D]; the new tokens must be in the blocks.

    With a `window`, a token attends to this many tokens up to itself; scores s are cap x tanh(s / cap), unless `cap` is
    0.
    """
    lengths, tables = reads
    num_seen = window or _ALL_TOKENS
    num_rows, kv_heads, queries, size = query.shape
    shape = {
        "QUERIES": queries,
        "QUERY_TILE": max(_MIN_QUERIES, triton.next_power_of_2(queries)),
        "SIZE": size,
        "SIZE_TILE": triton.next_power_of_2(size),
    }
    _attend_part[num_rows, kv_heads, split.num_parts](
        query, keys, values, lengths, tables, tables.stride(0), split.sums, split.scores, split.answer,
        size**-0.5 / cap if cap else size**-0.5 * _LOG2_E, cap * _LOG2_E, num_seen, split.tokens, split.num_parts,
        **shape, TOKENS=BLOCK_TOKENS, TILE=_TILE, IS_WHOLE=split.num_parts == 1, IS_CAPPED=cap > 0,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    if split.num_parts > 1:
        _join_parts[num_rows, kv_heads](
            lengths, split.sums, split.scores, split.answer, num_seen, split.tokens, split.num_parts, **shape,
            num_warps=4,
        )  # fmt: skip
    return split.answer.view(num_rows, -1)


class KeySplit:
    """The split of each row's keys into parts, with buffers for the parts' results, which the layers of a step use one
    after the other."""

    def __init__(self, query: Tensor, num_tokens: int, num_processors: int) -> None:
        """The queries [B, kv_heads, queries, D] belong to rows of at most `num_tokens` tokens."""
        num_rows, kv_heads, queries, size = query.shape
        parts_per_head = triton.cdiv(_PROGRAMS_PER_PROCESSOR * num_processors, num_rows * kv_heads)
        even = triton.next_power_of_2(triton.cdiv(num_tokens, parts_per_head))
        self.tokens = min(max(even, _MIN_PART), _MAX_PART)
        self.num_parts = triton.cdiv(num_tokens, self.tokens)
        self.answer = query.new_empty(num_rows, kv_heads, queries, size)
        parts = (num_rows, kv_heads, self.num_parts, queries) if self.num_parts > 1 else (1, 1, 1, 1)
        self.sums = query.new_empty(*parts, size, dtype=torch.float32)
        self.scores = query.new_empty(2, *parts, dtype=torch.float32)
        """The largest scores, and the sums of exponentials, base 2."""


@triton.jit(do_not_specialize=["table_width"])
def _rotate_and_store(
    heads, query, keys, values, cos, sin, lengths, tables, table_width, own_keys, own_values,
    QUERIES: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    row, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    position = tl.load(lengths + row)
    low = tl.arange(0, HALF)
    is_low = low < SIZE // 2
    row_cos = tl.load(cos + position * (SIZE // 2) + low, mask=is_low, other=0.0).to(tl.float32)
    row_sin = tl.load(sin + position * (SIZE // 2) + low, mask=is_low, other=0.0).to(tl.float32)
    entry = tables + row if PACKED else tables + row * table_width + position // TOKENS
    block = tl.load(entry).to(tl.int64)
    place = ((block * num_heads + head) * TOKENS + position % TOKENS) * SIZE
    source = heads + (row * num_heads + head) * (QUERIES + 2) * SIZE
    for index in tl.static_range(QUERIES + 1):
        first = tl.load(source + index * SIZE + low, mask=is_low, other=0.0).to(tl.float32)
        second = tl.load(source + index * SIZE + SIZE // 2 + low, mask=is_low, other=0.0).to(tl.float32)
        if index < QUERIES:
            target = query + ((row * num_heads + head) * QUERIES + index) * SIZE
        else:
            target = keys + place
        dtype = target.dtype.element_ty
        rotated_low = (first * row_cos - second * row_sin).to(dtype)
        rotated_high = (second * row_cos + first * row_sin).to(dtype)
        tl.store(target + low, rotated_low, mask=is_low)
        tl.store(target + SIZE // 2 + low, rotated_high, mask=is_low)
        if PACKED:  # noqa: SIM102 - conditions of Triton are not joined
            if index == QUERIES:
                own_key = own_keys + (row * num_heads + head) * SIZE
                tl.store(own_key + low, rotated_low, mask=is_low)
                tl.store(own_key + SIZE // 2 + low, rotated_high, mask=is_low)
    for half in tl.static_range(2):
        value = tl.load(source + (QUERIES + 1) * SIZE + half * (SIZE // 2) + low, mask=is_low, other=0.0)
        tl.store(values + place + half * (SIZE // 2) + low, value, mask=is_low)
        if PACKED:
            own_value = own_values + (row * num_heads + head) * SIZE
            tl.store(own_value + half * (SIZE // 2) + low, value, mask=is_low)


@triton.jit(do_not_specialize=["table_width", "num_seen", "part_tokens", "num_parts"])
def _attend_part(
    query, keys, values, lengths, tables, table_width, sums, scores, answer, scale, cap, num_seen, part_tokens,
    num_parts, QUERIES: tl.constexpr, QUERY_TILE: tl.constexpr, SIZE: tl.constexpr, SIZE_TILE: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr, IS_WHOLE: tl.constexpr, IS_CAPPED: tl.constexpr,
):  # fmt: skip
    row, head, part, num_heads = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    num_tokens = tl.load(lengths + row) + 1
    end = tl.minimum((part + 1) * part_tokens, num_tokens)
    begin = tl.maximum(part * part_tokens, num_tokens - num_seen)
    if begin >= end:
        return
    query_index, dimension = tl.arange(0, QUERY_TILE), tl.arange(0, SIZE_TILE)
    is_query, is_dimension = query_index < QUERIES, dimension < SIZE
    first_query = (row * num_heads + head) * QUERIES
    output_index = (first_query + query_index)[:, None] * SIZE + dimension[None, :]
    is_output = is_query[:, None] & is_dimension[None, :]
    queries = tl.load(query + output_index, mask=is_output, other=0.0)
    highest = tl.full([QUERY_TILE], -float("inf"), tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    summed = tl.zeros([QUERY_TILE, SIZE_TILE], tl.float32)
    for first in range(begin, end, TILE):
        token = first + tl.arange(0, TILE)
        is_seen = token < end
        block = tl.load(tables + row * table_width + token // TOKENS, mask=is_seen, other=0).to(tl.int64)
        place = ((block * num_heads + head) * TOKENS + token % TOKENS) * SIZE
        where = place[:, None] + dimension[None, :]
        is_loaded = is_seen[:, None] & is_dimension[None, :]
        key = tl.load(keys + where, mask=is_loaded, other=0.0)
        value = tl.load(values + where, mask=is_loaded, other=0.0)
        scored = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        if IS_CAPPED:
            scored = (2 * tl.sigmoid(2 * scored) - 1) * cap  # cap * tanh(scored)
        scored = tl.where(is_seen[None, :], scored, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scored, 1))
        weight = tl.exp2(scored - new_highest[:, None])
        rescale = tl.exp2(highest - new_highest)
        total = total * rescale + tl.sum(weight, 1)
        summed = summed * rescale[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        highest = new_highest
    if IS_WHOLE:
        tl.store(answer + output_index, (summed / total[:, None]).to(answer.dtype.element_ty), mask=is_output)
    else:
        part_index = ((row * num_heads + head) * num_parts + part) * QUERIES + query_index
        tl.store(sums + part_index[:, None] * SIZE + dimension[None, :], summed, mask=is_output)
        tl.store(scores + part_index, highest, mask=is_query)
        num_scores = tl.num_programs(0) * num_heads * num_parts * QUERIES
        tl.store(scores + num_scores + part_index, total, mask=is_query)


@triton.jit(do_not_specialize=["num_seen", "part_tokens", "num_parts"])
def _join_parts(
    lengths, sums, scores, answer, num_seen, part_tokens, num_parts,
    QUERIES: tl.constexpr, QUERY_TILE: tl.constexpr, SIZE: tl.constexpr, SIZE_TILE: tl.constexpr,
):  # fmt: skip
    row, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    num_tokens = tl.load(lengths + row) + 1
    first_used, num_used = tl.maximum(num_tokens - num_seen, 0) // part_tokens, tl.cdiv(num_tokens, part_tokens)
    query_index, dimension = tl.arange(0, QUERY_TILE), tl.arange(0, SIZE_TILE)
    is_query = query_index < QUERIES
    is_output = is_query[:, None] & (dimension < SIZE)[None, :]
    highest = tl.full([QUERY_TILE], -float("inf"), tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    summed = tl.zeros([QUERY_TILE, SIZE_TILE], tl.float32)
    num_scores = tl.num_programs(0) * num_heads * num_parts * QUERIES
    for part in range(first_used, num_used):
        part_index = ((row * num_heads + head) * num_parts + part) * QUERIES + query_index
        part_highest = tl.load(scores + part_index, mask=is_query, other=0.0)
        new_highest = tl.maximum(highest, part_highest)
        rescale, part_rescale = tl.exp2(highest - new_highest), tl.exp2(part_highest - new_highest)
        total = total * rescale + tl.load(scores + num_scores + part_index, mask=is_query, other=1.0) * part_rescale
        part_sums = tl.load(sums + part_index[:, None] * SIZE + dimension[None, :], mask=is_output, other=0.0)
        summed = summed * rescale[:, None] + part_sums * part_rescale[:, None]
        highest = new_highest
    output_index = ((row * num_heads + head) * QUERIES + query_index)[:, None] * SIZE + dimension[None, :]
    tl.store(answer + output_index, (summed / total[:, None]).to(answer.dtype.element_ty), mask=is_output)
