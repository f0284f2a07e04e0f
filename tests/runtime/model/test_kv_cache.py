"""Rows that continue what a cache has of them attend as whole rows do, and see nothing else that is in it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from meshwright.runtime.model.attention import CoreAttention, Rotary
from meshwright.runtime.model.kv_cache import ContinuedRows, SlotCache
from tests.planner.jobs import model_spec

SPEC = replace(model_spec("actor"), num_kv_heads=2)
HEADS, KV_HEADS, SIZE = SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim
NUM_SLOTS, MAX_TOKENS = 9, 40
ROTARY = Rotary(SPEC, torch.device("cpu"))
ATTENTION = CoreAttention(first_layer=2, layer_number=4)  # the second layer of its stage


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


def used_cache() -> SlotCache:
    """Every place holds what must not be seen."""
    cache = SlotCache(
        num_layers=2,
        num_slots=NUM_SLOTS,
        num_kv_heads=KV_HEADS,
        max_tokens=MAX_TOKENS,
        head_dim=SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for held in (cache.keys, cache.values):
        held.fill_(torch.nan)
    return cache


def attend(rows: Sequence[Row], cache: ContinuedRows | None = None, *, tail: int = 0) -> Tensor:
    """[S, 1, heads * D] of packed rows; what pads them is not a number."""
    padding = Row(*(torch.full((tail, *heads.shape[1:]), torch.nan) for heads in rows[0]))
    packed = Row(*(torch.cat(parts) for parts in zip(*rows, padding, strict=True)))
    packing = ROTARY.pack([len(row.query) for row in rows], torch.empty(0), tail=tail, cache=cache)
    found: Tensor = ATTENTION(*packed, packed_seq_params=packing)
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


@pytest.mark.parametrize("seed", range(8))
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
        view = cache.continue_rows([slots[index] for index in together], before, sizes)
        outputs = attend(chunks, view, tail=draw.randint(0, 3))[: sum(sizes)].split(sizes)
        for index, size, output in zip(together, sizes, outputs, strict=True):
            found[index].append(output)
            cached[index] += size
    for row, pieces_of_row in zip(rows, found, strict=True):
        torch.testing.assert_close(torch.cat(pieces_of_row), whole(row), atol=1e-5, rtol=1e-5)


def test_a_slot_that_is_used_again_shows_nothing_of_its_last_row() -> None:
    cache, (first, second) = used_cache(), random_rows((MAX_TOKENS, 7), seed=0)
    attend([first], cache.continue_rows([3], [0], [MAX_TOKENS]))
    attend([second.chunk(0, 4)], cache.continue_rows([3], [0], [4]))
    found = attend([second.chunk(4, 3)], cache.continue_rows([3], [4], [3]))
    torch.testing.assert_close(found, whole(second)[4:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cached", [0, 5])
def test_no_row_sees_another(cached: int) -> None:
    """What the others hold, in the cache and in the sequence, changes nothing, not a bit."""
    rows, others = random_rows((9, 9, 9), seed=1), random_rows((9, 9, 9), seed=2)
    outputs = []
    for around in (rows, others):
        cache, mixed = used_cache(), [around[0], rows[1], around[2]]
        if cached:
            attend([row.chunk(0, cached) for row in mixed], cache.continue_rows([4, 5, 6], [0] * 3, [cached] * 3))
        rest = [row.chunk(cached, 9 - cached) for row in mixed]
        outputs.append(attend(rest, cache.continue_rows([4, 5, 6], [cached] * 3, [9 - cached] * 3)))
    alike, *apart = (torch.equal(*pair) for pair in zip(*(output.chunk(3)[1:] for output in outputs), strict=True))
    assert alike
    assert not any(apart)


def test_what_pads_the_sequence_is_not_cached_and_answers_zero() -> None:
    cache = used_cache()
    output = attend(random_rows((5, 2), seed=3), cache.continue_rows([0, 1], [0, 0], [5, 2]), tail=4)
    assert torch.equal(output[7:], torch.zeros(4, 1, HEADS * SIZE))
    written = cache.keys.isfinite().all(dim=-1).all(dim=2)  # [layers, slots, tokens]
    assert written.nonzero().tolist() == [[1, 0, token] for token in range(5)] + [[1, 1, token] for token in range(2)]


def test_cached_keys_and_values_are_read_where_they_lie() -> None:
    cache = used_cache()
    for seen in cache.continue_rows([2, 3, 7], [3, 3, 0], [2, 2, 6]).seen(1):
        for held, rows in zip((cache.keys, cache.values), seen, strict=True):
            assert rows.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()


def test_a_decode_step_in_bands_answers_each_row_as_if_it_were_alone() -> None:
    lengths = [390] * 6 + [20] * 8 + [200, 7] * 3
    draw = torch.Generator().manual_seed(0)
    caches = [
        SlotCache(
            num_layers=2,
            num_slots=len(lengths) + 3,
            num_kv_heads=KV_HEADS,
            max_tokens=400,
            head_dim=SIZE,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for _ in range(2)
    ]
    for held in (caches[0].keys, caches[0].values):
        held.normal_(generator=draw)
    caches[1].keys.copy_(caches[0].keys)
    caches[1].values.copy_(caches[0].values)
    shape = len(lengths), KV_HEADS
    query = torch.randn(*shape, HEADS // KV_HEADS, SIZE, generator=draw)
    key, value = (torch.randn(*shape, SIZE, generator=draw) for _ in range(2))
    together = caches[0].decode(2, torch.tensor(lengths), max(lengths))
    assert len(together.bands) > 1
    found = together.attend(1, query, key, value)
    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        alone = caches[1].decode(2 + row, torch.tensor([length]), length).attend(1, query[own], key[own], value[own])
        torch.testing.assert_close(found[own], alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(caches[0].keys, caches[1].keys, rtol=0, atol=0)
