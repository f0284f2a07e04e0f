"""What benchmarks on a processor begin with: a process that is the only rank, and words for models of a few tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import tokenizers
import torch.distributed as dist

from meshwright.runtime.device import host

VOCAB_SIZE, END = 32, 1
"""An untrained policy ends a response with every 32nd token or so."""


def join_alone(device: str = "cpu") -> None:
    """Makes this process the only rank there is."""
    host.choose(device)
    dist.init_process_group(host.backend(), store=dist.HashStore(), rank=0, world_size=1)


def write_words(directory: Path) -> None:
    """A tokenizer of `VOCAB_SIZE` words, and prompts of six of them each."""
    words = {f"w{number}": number for number in range(2, VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<end>": END, **words}, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    draw = random.Random(0)
    prompts = [json.dumps({"prompt": " ".join(draw.choices([*words], k=6))}) for _ in range(256)]
    (directory / "prompts.jsonl").write_text("\n".join(prompts))
