"""A GRPO job of an adapter whose responses end by themselves, after lengths with a long tail.

A random model draws nearly every token alike, so with one of so many tokens an end token each draw ends a response
with the same small chance, and lengths are geometric: most are short, and the longest of a batch is several times the
median.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.accelerator.jobs import LONGEST_PROMPT, cluster_of, config_of, write_data, write_weights, written
from benchmarks.accelerator.world import World

MODEL = "llama-3.1-8b"
REWARD_MODULE = "benchmarks.accelerator.paid"
"""Of the function that pays, which a run has to allow."""

_DRAWS_PER_END, _TINY_DRAWS_PER_END = 185, 8
"""The mean length, if nothing cut responses: half of them have 128 tokens at most, one in a hundred 850."""
_LONGEST, _TINY_LONGEST = 1024, 32
_GROUPS, _TINY_GROUPS, _GROUP_SIZE = 8, 2, 8
_ADAPTER = {"rank": 32, "alpha": 64}
_RATE = 1e-5
_FLAT = 0.02
"""Deviation of weights with which the likeliest of tokens are a few times as likely as the others."""
_BIN = 8
"""Tokens between two lengths of the histogram that the plan is made for."""


def write_long_tail_job(directory: Path, world: World, weights: Path) -> str:
    """Writes the job, with the model in another directory, and answers what it asks in a sentence."""
    longest, mean = (_TINY_LONGEST, _TINY_DRAWS_PER_END) if world.tiny else (_LONGEST, _DRAWS_PER_END)
    config = config_of(world, MODEL, initializer_range=_FLAT)
    ends = end_tokens(config["vocab_size"], mean)
    write_weights(weights, {**config, "eos_token_id": ends}, world.dtype, world.kind)
    batch_size = _GROUP_SIZE * (_TINY_GROUPS if world.tiny else _GROUPS)
    job: dict[str, Any] = {
        "algorithm": "grpo",
        "models": {"actor": {"path": str(weights), "adapter": _ADAPTER}, "ref": {"path": str(weights)}},
        "cluster": cluster_of(world, ranks=1),
        "precision": world.precision,
        "workload": {
            "batch_size": batch_size,
            "group_size": _GROUP_SIZE,
            "prompt": {"max": LONGEST_PROMPT, "median": 26, "p99": LONGEST_PROMPT},
            "response": {"max": longest, "histogram": geometric(len(ends) / config["vocab_size"], longest)},
            "num_minibatches": 2,
        },
        "rewards": [
            {"name": "even", "function": f"{REWARD_MODULE}:share_of_even", "latency_seconds": {"fixed": 0.001}}
        ],
        "grpo": {"actor_learning_rate": _RATE},
        "data": write_data(directory, config["vocab_size"]),
    }
    written(directory, job)
    return (
        f"{MODEL} with an adapter of rank {_ADAPTER['rank']}, {batch_size} responses of {longest} tokens at most; each "
        f"draw ends one with a chance of 1 in {config['vocab_size'] / len(ends):.0f}"
    )


def end_tokens(vocab_size: int, draws_per_end: int) -> list[int]:
    """The last of the vocabulary, which no prompt of letters has, so many that one draw in so many is one of them."""
    return list(range(vocab_size - vocab_size // draws_per_end, vocab_size))


def geometric(chance: float, longest: int) -> list[list[float]]:
    """Pairs of tokens and weight: lengths of responses that each draw ends with this chance, cut at the longest."""
    left = [(1 - chance) ** tokens for tokens in range(0, longest + 1, _BIN)]
    middles = range(_BIN // 2, longest, _BIN)
    pairs = [[tokens, one - other] for tokens, (one, other) in zip(middles, pairwise(left), strict=True)]
    return [*pairs, [longest, left[-1]]]
