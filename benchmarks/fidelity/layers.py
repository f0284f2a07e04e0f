"""The four products of a layer's weights as a framework ran them, one after the other with what lies between.

What a product alone reaches, and what it reaches in a row of them, differ by the constant `sustained`, which is fitted
to training iterations; these rows are not used for it.
"""

from __future__ import annotations

from benchmarks.fidelity.primitives import device_of, kernels_of
from benchmarks.fidelity.rows import Row, count, number
from benchmarks.fidelity.score import Answer
from meshwright.cost_models.cost import Tally

_BUSY = 64
"""Tokens from which on a device is busy computing."""


def is_busy(row: Row) -> bool:
    """Whether a pass has many tokens."""
    return count(row, "num_tokens") >= _BUSY


def layer_products(stem: str, row: Row) -> Answer:
    """Queries, keys and values; the output of attention; up and gate; and down. A rank has at least one key head."""
    tokens, tp, hidden = (count(row, name) for name in ("num_tokens", "num_tensor_parallel_workers", "n_embd"))
    heads, ffn = count(row, "n_head"), count(row, "n_expanded_embd")
    key_heads = max(count(row, "n_kv_head"), tp)
    gated = row["use_gated_mlp"] == "True"
    shapes = {
        "attn_pre_proj": (hidden, (heads + 2 * key_heads) * (hidden / heads) / tp),
        "attn_post_proj": (hidden / tp, hidden),
        "mlp_up_proj": (hidden, (1 + gated) * ffn / tp),
        "mlp_down_proj": (ffn / tp, hidden),
    }
    kernels, tally = kernels_of(device_of(stem), sustained=True), Tally()
    for name, (inner, outer) in shapes.items():
        tally.add(name, kernels.gemm(tokens, inner, outer))
    measured = sum(number(row, f"{name}_ms") for name in shapes) / 1e3
    cost = tally.cost()
    label = f"{stem.removeprefix('primitives/').removesuffix('_mlp')}, {tokens} tokens, tp {tp}"
    return Answer(label=label, measured=measured, predicted=cost.total, terms=cost)
