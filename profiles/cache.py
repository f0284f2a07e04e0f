"""How generation keeps keys and values: blocks of tokens, and how many prompt tokens go through a model together.

Both floors read it: what is planned is what is held.
"""

from __future__ import annotations

BLOCK_TOKENS = 32
"""Tokens of a block. Fewer waste less at the end of a row, and attention takes longer: of 16, a third on a CPU core."""

PREFILL_TOKENS = 16384
"""That go through the model in one pass of a prefill at most; it bounds the working set of many rows."""


def blocks_of(num_tokens: int) -> int:
    """Blocks that so many tokens of one row take."""
    return -(-num_tokens // BLOCK_TOKENS)


def most_packed(rows_at_a_time: int, longest_prompt: int) -> int:
    """Tokens of one pass of a prefill at most, where so many rows may be admitted together."""
    return min(PREFILL_TOKENS, rows_at_a_time * max(1, longest_prompt))
