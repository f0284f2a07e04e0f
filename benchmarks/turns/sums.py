"""Sums that are worked out with a calculator, and a small model that is taught to call it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from examples.tiny.byte_tokenizer import BOS, EOS, PAD, VOCAB_SIZE

MOST_POSITIONS = 128
_SUMMANDS, _BATCH = (2, 3, 4), 32

Drawn = tuple[str, bool]
"""A piece of a lesson, and whether the model has to draw it, or is told."""


def draw_summands(draw: random.Random) -> tuple[int, ...]:
    """Digits, two to four of them."""
    return tuple(draw.randint(1, 9) for _ in range(draw.choice(_SUMMANDS)))


def prompt_of(summands: Sequence[int]) -> str:
    """What the model is asked."""
    return "+".join(map(str, summands)) + "="


def lesson_of(summands: Sequence[int]) -> list[Drawn]:
    """The prompt, then a call for each further summand and what the calculator answers: `3+5+9=<<3+5>>8<<8+9>>17`."""
    pieces, total = [(prompt_of(summands), False)], summands[0]
    for summand in summands[1:]:
        pieces.append((f"<<{total}+{summand}>>", True))
        total += summand
        pieces.append((str(total), False))
    return pieces


def taught_model(steps: int, seed: int = 0) -> LlamaForCausalLM:
    """A model of the tiny job's shape after so many batches of lessons; what it has to draw counts, the end too."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MOST_POSITIONS,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model, draw = LlamaForCausalLM(config), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        tokens, wanted = _batch([lesson_of(draw_summands(draw)) for _ in range(_BATCH)])
        logits = model(tokens).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def _batch(lessons: Sequence[Sequence[Drawn]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, S], padded, and those of them that the model has to draw, PAD elsewhere. A token is a byte."""
    tokens, wanted = [], []
    for lesson in lessons:
        whole = [(BOS, False), *((byte, drawn) for text, drawn in lesson for byte in text.encode()), (EOS, True)]
        tokens.append([token for token, _ in whole])
        wanted.append([token if drawn else PAD for token, drawn in whole])
    return _padded(tokens), _padded(wanted)


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])
