"""What both sides generate: random checkpoints, and prompts whose responses have long-tailed lengths."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.accelerator.jobs import SIZES

BATCH = 32
LONGEST_PROMPT, LONGEST_RESPONSE = 48, 256
_MEDIAN_RESPONSE = 32
_P99_STANDARD_NORMAL = 2.326

SHAPES: dict[str, dict[str, tuple[dict[str, int], tuple[int, ...]]]] = {
    "cpu": {
        "demo's actor: 4 layers of 128": (
            {
                "vocab_size": 259,
                "hidden_size": 128,
                "intermediate_size": 352,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
            (BATCH, 4 * BATCH),
        ),
        "small: 8 layers of 256": (
            {
                "vocab_size": 4096,
                "hidden_size": 256,
                "intermediate_size": 704,
                "num_hidden_layers": 8,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
            },
            (BATCH,),
        ),
    },
    "cuda": {"0.5B": (SIZES["0.5B"], (BATCH, 4 * BATCH)), "1.5B": (SIZES["1.5B"], (BATCH,))},
}
"""By the kind of device: models, and the counts of prompts that each is given."""


@dataclass(frozen=True)
class Work:
    """Prompts, and how many tokens each response must have."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def batches(self) -> list[Work]:
        """In the order given, `BATCH` at a time: lengths are not known beforehand."""
        starts = range(0, len(self.prompts), BATCH)
        return [Work(self.prompts[i : i + BATCH], self.lengths[i : i + BATCH]) for i in starts]


def draw_work(num_prompts: int, vocab_size: int, seed: int) -> Work:
    """Log-normal response lengths whose 99th percentile is the longest allowed; prompts of 16 tokens and more."""
    draw = random.Random(f"{seed}/{num_prompts}")
    sigma = math.log(LONGEST_RESPONSE / _MEDIAN_RESPONSE) / _P99_STANDARD_NORMAL
    lengths = (round(draw.lognormvariate(math.log(_MEDIAN_RESPONSE), sigma)) for _ in range(num_prompts))
    prompts = (draw.choices(range(vocab_size), k=draw.randint(16, LONGEST_PROMPT)) for _ in range(num_prompts))
    return Work(
        lengths=tuple(min(max(length, 1), LONGEST_RESPONSE) for length in lengths),
        prompts=tuple(map(tuple, prompts)),
    )


def write_checkpoint(
    directory: Path, shape: dict[str, Any], seed: int, positions: int = LONGEST_PROMPT + LONGEST_RESPONSE
) -> Path:
    """A random model in Hugging Face form, for sequences of so many tokens."""
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=positions)).save_pretrained(directory)
    return directory
