"""Rows that continue what a cache has of them attend as whole rows do, and see nothing else that is in it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from meshwright.profiles.packing import num_blocks_for
from meshwright.runtime.model.attention import CoreAttention, Rotary
from meshwright.runtime.model.kv_cache import ContinuedRows, PagedCache
from tests.planner.jobs import model_spec
from tests.seeds import seeds

SPEC = replace(model_spec("actor"), num_kv_heads=2)
HEADS, KV_HEADS, SIZE = SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim
NUM_SLOTS, MAX_TOKENS = 9, 40
ROTARY = Rotary(SPEC, torch.device("cpu"))
ATTENTION = CoreAttention(first_layer=2, layer_number=4, spec=SPEC)  # the second layer of its stage


class Row(NamedTuple):
    """What a layer is given of a row's tokens: [T, 1, heads, D], and of keys and values [T, 1, kv_heads, D]."""

    query: Tensor
    key: Tensor
    value: Tensor

    def chunk(self, start: int, length: int) -> Row:
        return Row(*(heads[start : start + length] for heads in self))


def random_rows(lengths: Sequence[int], seed: int) -> list[Row]:
    draw = torch.Generator().manual_seed(seed)
    return [
        Row(*(torch.randn(length, 1, heads, SIZE, generator=draw) for heads in (HEADS, KV_HEADS, KV_HEADS)))
        for length in lengths
    ]


def used_cache(num_blocks: int = NUM_SLOTS * num_blocks_for(MAX_TOKENS)) -> PagedCache:
    """Every place holds what must not be seen."""
    cache = PagedCache(
        num_layers=2,
        num_blocks=num_blocks,
        num_rows=NUM_SLOTS,
        num_kv_heads=KV_HEADS,
        max_tokens=MAX_TOKENS,
        head_dim=SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for held in (cache.keys, cache.values):
        held.fill_(torch.nan)
    return cache


def continued(cache: PagedCache, rows: Sequence[int], cached: Sequence[int], lengths: Sequence[int]) -> ContinuedRows:
    """The rows with blocks for their tokens."""
    for row, start, length in zip(rows, cached, lengths, strict=True):
        assert cache.tables.allocate(row, start + length)
    return cache.continue_rows(rows, cached, lengths)


def attend(
    rows: Sequence[Row], cache: ContinuedRows | None = None, *, tail: int = 0, attention: CoreAttention = ATTENTION
) -> Tensor:
    """[S, 1, heads * D] of packed rows; what pads them is not a number."""
    padding = Row(*(torch.full((tail, *heads.shape[1:]), torch.nan) for heads in rows[0]))
    packed = Row(*(torch.cat(parts) for parts in zip(*rows, padding, strict=True)))
    packing = ROTARY.pack([len(row.query) for row in rows], torch.empty(0), tail=tail, cache=cache)
    found: Tensor = attention(*packed, packed_seq_params=packing)
    return found


def whole(row: Row) -> Tensor:
    """By the equation, over one head after the other."""
    (cos, sin), length = ROTARY.table(len(row.query), torch.empty(0)), len(row.query)
    turned = []
    for heads in row[:2]:
        low, high = heads.chunk(2, dim=-1)
        turned.append(heads * cos + torch.cat((-high, low), dim=-1) * sin)
    outputs = []
    for head in range(HEADS):
        group = head * KV_HEADS // HEADS
        scores = turned[0][:, 0, head] @ turned[1][:, 0, group].T / SIZE**0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ row.value[:, 0, group])
    return torch.cat(outputs, dim=-1).unsqueeze(1)


@seeds(2, all=8)
def test_rows_continued_in_pieces_attend_as_they_do_whole(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, MAX_TOKENS) for _ in range(NUM_SLOTS - 2)]
    rows, slots = random_rows(lengths, seed), draw.sample(range(NUM_SLOTS), len(lengths))
    cache, cached = used_cache(), [0] * len(lengths)
    found: list[list[Tensor]] = [[] for _ in rows]
    while unfinished := [index for index, length in enumerate(lengths) if cached[index] < length]:
        together = draw.sample(unfinished, draw.randint(1, len(unfinished)))
        sizes = [draw.randint(1, lengths[index] - cached[index]) for index in together]
        chunks = [rows[index].chunk(cached[index], size) for index, size in zip(together, sizes, strict=True)]
        before = [cached[index] for index in together]
        view = continued(cache, [slots[index] for index in together], before, sizes)
        outputs = attend(chunks, view, tail=draw.randint(0, 3))[: sum(sizes)].split(sizes)
        for index, size, output in zip(together, sizes, outputs, strict=True):
            found[index].append(output)
            cached[index] += size
    for row, pieces_of_row in zip(rows, found, strict=True):
        torch.testing.assert_close(torch.cat(pieces_of_row), whole(row), atol=1e-5, rtol=1e-5)


def test_a_slot_that_is_used_again_shows_nothing_of_its_last_row() -> None:
    cache, (first, second) = used_cache(), random_rows((MAX_TOKENS, 7), seed=0)
    attend([first], continued(cache, [3], [0], [MAX_TOKENS]))
    attend([second.chunk(0, 4)], continued(cache, [3], [0], [4]))
    found = attend([second.chunk(4, 3)], continued(cache, [3], [4], [3]))
    torch.testing.assert_close(found, whole(second)[4:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cached", [0, 5])
def test_no_row_sees_another(cached: int) -> None:
    """What the others hold, in the cache and in the sequence, changes nothing, not a bit."""
    rows, others = random_rows((9, 9, 9), seed=1), random_rows((9, 9, 9), seed=2)
    outputs = []
    for around in (rows, others):
        cache, mixed = used_cache(), [around[0], rows[1], around[2]]
        if cached:
            attend([row.chunk(0, cached) for row in mixed], continued(cache, [4, 5, 6], [0] * 3, [cached] * 3))
        rest = [row.chunk(cached, 9 - cached) for row in mixed]
        outputs.append(attend(rest, continued(cache, [4, 5, 6], [cached] * 3, [9 - cached] * 3)))
    alike, *apart = (torch.equal(*pair) for pair in zip(*(output.chunk(3)[1:] for output in outputs), strict=True))
    assert alike
    assert not any(apart)


def test_what_pads_the_sequence_is_not_cached_and_answers_zero() -> None:
    cache = used_cache()
    output = attend(random_rows((5, 2), seed=3), continued(cache, [0, 1], [0, 0], [5, 2]), tail=4)
    assert torch.equal(output[7:], torch.zeros(4, 1, HEADS * SIZE))
    written = cache.keys.isfinite().all(dim=-1).all(dim=2)  # [layers, blocks, tokens]
    assert written.nonzero().tolist() == [[1, 1, token] for token in range(5)] + [[1, 2, token] for token in range(2)]


def test_what_is_read_of_a_row_is_what_another_cache_gets() -> None:
    one, other, [row] = used_cache(), used_cache(), random_rows((MAX_TOKENS,), seed=4)
    attend([row.chunk(0, 36)], continued(one, [3], [0], [36]))
    other.tables.restore(5, one.tables.blocks_of_row(3).tolist())
    other.write(5, *(heads.clone() for heads in one.read(3, 36)))
    for cache, slot in ((one, 3), (other, 5)):
        view = continued(cache, [slot], [36], [4])
        torch.testing.assert_close(attend([row.chunk(36, 4)], view), whole(row)[36:], atol=1e-5, rtol=1e-5)


def test_a_row_that_shares_a_prompt_reads_what_the_other_had_and_goes_on_alone() -> None:
    cache, (row, other) = used_cache(), random_rows((MAX_TOKENS, MAX_TOKENS), seed=5)
    attend([row.chunk(0, 36)], continued(cache, [0], [0], [36]))
    cache.tables.share(0, 1, 36)
    assert cache.tables.allocate(1, 37)
    cache.share(0, 1, 36)
    together = Row(*(torch.cat([first[:36], second[36:]]) for first, second in zip(row, other, strict=True)))
    for slot, expected in ((0, row), (1, together)):
        view = continued(cache, [slot], [36], [4])
        torch.testing.assert_close(attend([expected.chunk(36, 4)], view), whole(expected)[36:], atol=1e-5, rtol=1e-5)
    assert cache.tables.num_used == 3


def test_a_row_whose_blocks_are_moved_has_the_same_past() -> None:
    cache, (row, other) = used_cache(), random_rows((MAX_TOKENS, MAX_TOKENS), seed=6)
    attend([row.chunk(0, 36)], continued(cache, [0], [0], [36]))
    attend([other.chunk(0, 36)], continued(cache, [1], [0], [36]))
    cache.tables.release(0)
    before = cache.tables.blocks_of_row(1).tolist()
    cache.compact()
    assert cache.tables.blocks_of_row(1).tolist() != before
    attended = attend([other.chunk(36, 4)], continued(cache, [1], [36], [4]))
    torch.testing.assert_close(attended, whole(other)[36:], atol=1e-5, rtol=1e-5)
