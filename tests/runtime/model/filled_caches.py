"""Caches in which rows hold blocks in no order."""

from __future__ import annotations

import random

import torch

from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.model.kv_cache import PagedCache

KV_HEADS, SIZE, NUM_ROWS, MAX_TOKENS = 2, 16, 12, 200


def filled(
    seed: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None, num_layers: int = 1
) -> tuple[PagedCache, list[int]]:
    """A cache in which rows of some lengths lie in no order, of which some share a prefix; their lengths."""
    draw = random.Random(seed)
    cache = PagedCache(
        num_layers=num_layers,
        num_blocks=90,
        num_rows=NUM_ROWS,
        num_kv_heads=KV_HEADS,
        max_tokens=MAX_TOKENS,
        head_dim=SIZE,
        dtype=dtype,
        device=device or torch.device("cpu"),
    )
    torch.manual_seed(seed)
    for held in (cache.keys, cache.values):
        held.normal_()
    lengths = [draw.randrange(MAX_TOKENS) for _ in range(NUM_ROWS)]
    for _ in range(3):
        for row in draw.sample(range(NUM_ROWS), NUM_ROWS):
            cache.tables.release(row)
            source = draw.randrange(NUM_ROWS)
            shared = min(len(cache.tables.blocks_of_row(source)), lengths[row] // BLOCK_TOKENS) * BLOCK_TOKENS
            if seed % 2 and source != row:
                cache.tables.share(source, row, min(shared, lengths[source] // BLOCK_TOKENS * BLOCK_TOKENS))
            assert cache.tables.allocate(row, lengths[row] + 1)
    return cache, lengths


def with_room(spec: ModelSpec, num_rows: int, num_tokens: int, max_tokens: int) -> PagedCache:
    """A cache of 8 blocks for a model, in which each of some rows holds blocks for so many tokens."""
    cache = PagedCache(
        num_layers=spec.num_layers,
        num_blocks=8,
        num_rows=num_rows,
        num_kv_heads=spec.num_kv_heads,
        max_tokens=max_tokens,
        head_dim=spec.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for row in range(num_rows):
        assert cache.tables.allocate(row, num_tokens)
    return cache
