"""Attention of one token of every row over a paged cache, and the way into it of prompts.

Rows that only round up a step have no cached token and block 0, which is nobody's.

Attention is split over the keys of a row and the parts joined: with m the largest score of a part, l its sum of
exp(s - m) and o that of exp(s - m) v, the answer is sum o / sum l, all at the row's own m (Dao et al.,
arXiv:2205.14135, section 3.1; Flash-Decoding). Programs of neighbouring rows run side by side, so that blocks which
the samples of a prompt share come from memory once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS

_LEAST_PART, _MOST_PART = 128, 512
"""Tokens of a part: fewer are not worth joining, more leave processors idle behind the longest row."""
_PROGRAMS_PER_PROCESSOR = 8
"""That a step's attention is cut into at least, where its rows are long enough: half of them are beyond the end of
their row where lengths are spread evenly. With it and the sizes below a layer of 64 rows of 1,000 tokens took 18.5 us
for 20.0 of Qwen2.5-0.5B and some 74 for 85 of Llama-3.1-8B, of 128 rows of 300 tokens 13.5 for 17.9 (H200,
2026-11-26)."""
_TILE = 128
"""Tokens whose keys and values are in a processor at once."""
_WARPS, _STAGES = 4, 3
_LEAST_QUERIES = 16
"""Of a tile that matrix units multiply."""
_LOG2_E = 1.4426950408889634


def turn_and_store(
    heads: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    angles: tuple[Tensor, Tensor],
    reads: tuple[Tensor, Tensor],
) -> None:
    """Turns the queries and the key of `heads` [B, kv_heads, queries + 2, D] by the angles of their positions, and puts
    the queries into `query` [B, kv_heads, queries, D], the key and the value into a layer's blocks [blocks, kv_heads,
    tokens, D]. `angles` are cos and sin [positions, D / 2], `reads` the lengths [B] and the tables [B, n] of rows."""
    (cos, sin), (lengths, tables) = angles, reads
    num_rows, kv_heads, per_group, size = heads.shape
    _turn_and_store[num_rows, kv_heads](
        heads, query, keys, values, cos, sin, lengths, tables, tables.stride(0), keys, values,
        QUERIES=per_group - 2, SIZE=size, HALF=triton.next_power_of_2(size // 2), TOKENS=BLOCK_TOKENS, PACKED=False,
        num_warps=1,
    )  # fmt: skip


def turn_and_keep(
    heads: Tensor,
    turned: tuple[Tensor, Tensor, Tensor],
    cached: tuple[Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor],
) -> None:
    """As `turn_and_store` of tokens [S] that lie packed: `places` are their positions [S] and the blocks [S] in which
    they are kept, of the keys and values `cached`. Queries, keys and values go into `turned` too: [S, kv_heads,
    queries, D] and [S, kv_heads, D] twice."""
    (query, key, value), (keys, values), (cos, sin), (positions, blocks) = turned, cached, angles, places
    num_tokens, kv_heads, per_group, size = heads.shape
    _turn_and_store[num_tokens, kv_heads](
        heads, query, keys, values, cos, sin, positions, blocks, 1, key, value,
        QUERIES=per_group - 2, SIZE=size, HALF=triton.next_power_of_2(size // 2), TOKENS=BLOCK_TOKENS, PACKED=True,
        num_warps=1,
    )  # fmt: skip


def attend(query: Tensor, keys: Tensor, values: Tensor, reads: tuple[Tensor, Tensor], room: PartsOfRows) -> Tensor:
    """[B, heads * D] from turned queries [B, kv_heads, queries, D]; the new tokens are in the blocks."""
    lengths, tables = reads
    num_rows, kv_heads, queries, size = query.shape
    shape = {
        "QUERIES": queries,
        "ROOM": max(_LEAST_QUERIES, triton.next_power_of_2(queries)),
        "SIZE": size,
        "SIZE_ROOM": triton.next_power_of_2(size),
    }
    _attend_part[num_rows, kv_heads, room.num_parts](
        query, keys, values, lengths, tables, tables.stride(0), room.sums, room.scores, room.answer,
        size**-0.5 * _LOG2_E, room.tokens, room.num_parts,
        **shape, TOKENS=BLOCK_TOKENS, TILE=_TILE, IS_WHOLE=room.num_parts == 1, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    if room.num_parts > 1:
        _join_parts[num_rows, kv_heads](
            lengths, room.sums, room.scores, room.answer, room.tokens, room.num_parts, **shape, num_warps=4
        )
    return room.answer.view(num_rows, -1)


class PartsOfRows:
    """How attention is cut, and room for what parts say, for the layers of a step one after the other."""

    def __init__(self, query: Tensor, num_tokens: int, num_processors: int) -> None:
        """For turned queries [B, kv_heads, queries, D] of rows of at most so many tokens."""
        num_rows, kv_heads, queries, size = query.shape
        wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * num_processors, num_rows * kv_heads)
        even = triton.next_power_of_2(triton.cdiv(num_tokens, wanted))
        self.tokens = min(max(even, _LEAST_PART), _MOST_PART)
        self.num_parts = triton.cdiv(num_tokens, self.tokens)
        self.answer = query.new_empty(num_rows, kv_heads, queries, size)
        parts = (num_rows, kv_heads, self.num_parts, queries) if self.num_parts > 1 else (1, 1, 1, 1)
        self.sums = query.new_empty(*parts, size, dtype=torch.float32)
        self.scores = query.new_empty(2, *parts, dtype=torch.float32)
        """The largest, and the sums of exponentials, base 2."""


@triton.jit(do_not_specialize=["table_width"])
def _turn_and_store(
    heads, query, keys, values, cos, sin, lengths, tables, table_width, own_keys, own_values,
    QUERIES: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    row, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    position = tl.load(lengths + row)
    low = tl.arange(0, HALF)
    is_low = low < SIZE // 2
    turn_cos = tl.load(cos + position * (SIZE // 2) + low, mask=is_low, other=0.0).to(tl.float32)
    turn_sin = tl.load(sin + position * (SIZE // 2) + low, mask=is_low, other=0.0).to(tl.float32)
    entry = tables + row if PACKED else tables + row * table_width + position // TOKENS
    block = tl.load(entry).to(tl.int64)
    place = ((block * num_heads + head) * TOKENS + position % TOKENS) * SIZE
    own = heads + (row * num_heads + head) * (QUERIES + 2) * SIZE
    for index in tl.static_range(QUERIES + 1):
        first = tl.load(own + index * SIZE + low, mask=is_low, other=0.0).to(tl.float32)
        second = tl.load(own + index * SIZE + SIZE // 2 + low, mask=is_low, other=0.0).to(tl.float32)
        if index < QUERIES:
            target = query + ((row * num_heads + head) * QUERIES + index) * SIZE
        else:
            target = keys + place
        kind = target.dtype.element_ty
        turned_low = (first * turn_cos - second * turn_sin).to(kind)
        turned_high = (second * turn_cos + first * turn_sin).to(kind)
        tl.store(target + low, turned_low, mask=is_low)
        tl.store(target + SIZE // 2 + low, turned_high, mask=is_low)
        if PACKED:  # noqa: SIM102 - conditions of Triton are not joined
            if index == QUERIES:
                own_key = own_keys + (row * num_heads + head) * SIZE
                tl.store(own_key + low, turned_low, mask=is_low)
                tl.store(own_key + SIZE // 2 + low, turned_high, mask=is_low)
    for half in tl.static_range(2):
        value = tl.load(own + (QUERIES + 1) * SIZE + half * (SIZE // 2) + low, mask=is_low, other=0.0)
        tl.store(values + place + half * (SIZE // 2) + low, value, mask=is_low)
        if PACKED:
            own_value = own_values + (row * num_heads + head) * SIZE
            tl.store(own_value + half * (SIZE // 2) + low, value, mask=is_low)


@triton.jit(do_not_specialize=["table_width", "part_tokens", "num_parts"])
def _attend_part(
    query, keys, values, lengths, tables, table_width, sums, scores, answer, scale, part_tokens, num_parts,
    QUERIES: tl.constexpr, ROOM: tl.constexpr, SIZE: tl.constexpr, SIZE_ROOM: tl.constexpr, TOKENS: tl.constexpr,
    TILE: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    row, head, part, num_heads = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    num_tokens = tl.load(lengths + row) + 1
    begin = part * part_tokens
    if begin >= num_tokens:
        return
    end = tl.minimum(begin + part_tokens, num_tokens)
    one, number = tl.arange(0, ROOM), tl.arange(0, SIZE_ROOM)
    is_query, is_number = one < QUERIES, number < SIZE
    of_row = (row * num_heads + head) * QUERIES
    mine = (of_row + one)[:, None] * SIZE + number[None, :]
    is_mine = is_query[:, None] & is_number[None, :]
    asked = tl.load(query + mine, mask=is_mine, other=0.0)
    highest = tl.full([ROOM], -float("inf"), tl.float32)
    total = tl.zeros([ROOM], tl.float32)
    summed = tl.zeros([ROOM, SIZE_ROOM], tl.float32)
    for first in range(begin, end, TILE):
        token = first + tl.arange(0, TILE)
        is_seen = token < end
        block = tl.load(tables + row * table_width + token // TOKENS, mask=is_seen, other=0).to(tl.int64)
        place = ((block * num_heads + head) * TOKENS + token % TOKENS) * SIZE
        where = place[:, None] + number[None, :]
        is_held = is_seen[:, None] & is_number[None, :]
        key = tl.load(keys + where, mask=is_held, other=0.0)
        value = tl.load(values + where, mask=is_held, other=0.0)
        scored = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        scored = tl.where(is_seen[None, :], scored, -float("inf"))
        higher = tl.maximum(highest, tl.max(scored, 1))
        weight = tl.exp2(scored - higher[:, None])
        kept = tl.exp2(highest - higher)
        total = total * kept + tl.sum(weight, 1)
        summed = summed * kept[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        highest = higher
    if IS_WHOLE:
        tl.store(answer + mine, (summed / total[:, None]).to(answer.dtype.element_ty), mask=is_mine)
    else:
        of_part = ((row * num_heads + head) * num_parts + part) * QUERIES + one
        tl.store(sums + of_part[:, None] * SIZE + number[None, :], summed, mask=is_mine)
        tl.store(scores + of_part, highest, mask=is_query)
        behind = tl.num_programs(0) * num_heads * num_parts * QUERIES
        tl.store(scores + behind + of_part, total, mask=is_query)


@triton.jit(do_not_specialize=["part_tokens", "num_parts"])
def _join_parts(
    lengths, sums, scores, answer, part_tokens, num_parts,
    QUERIES: tl.constexpr, ROOM: tl.constexpr, SIZE: tl.constexpr, SIZE_ROOM: tl.constexpr,
):  # fmt: skip
    row, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    num_used = tl.cdiv(tl.load(lengths + row) + 1, part_tokens)
    one, number = tl.arange(0, ROOM), tl.arange(0, SIZE_ROOM)
    is_query = one < QUERIES
    is_mine = is_query[:, None] & (number < SIZE)[None, :]
    highest = tl.full([ROOM], -float("inf"), tl.float32)
    total = tl.zeros([ROOM], tl.float32)
    summed = tl.zeros([ROOM, SIZE_ROOM], tl.float32)
    behind = tl.num_programs(0) * num_heads * num_parts * QUERIES
    for part in range(num_used):
        of_part = ((row * num_heads + head) * num_parts + part) * QUERIES + one
        said = tl.load(scores + of_part, mask=is_query, other=0.0)
        higher = tl.maximum(highest, said)
        kept, taken = tl.exp2(highest - higher), tl.exp2(said - higher)
        total = total * kept + tl.load(scores + behind + of_part, mask=is_query, other=1.0) * taken
        part_sums = tl.load(sums + of_part[:, None] * SIZE + number[None, :], mask=is_mine, other=0.0)
        summed = summed * kept[:, None] + part_sums * taken[:, None]
        highest = higher
    mine = ((row * num_heads + head) * QUERIES + one)[:, None] * SIZE + number[None, :]
    tl.store(answer + mine, (summed / total[:, None]).to(answer.dtype.element_ty), mask=is_mine)
