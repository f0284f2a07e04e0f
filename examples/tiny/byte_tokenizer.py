"""A tokenizer that needs no training: token b is byte b, then `<bos>`, `<eos>` and `<pad>`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 259
_SPECIAL = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}


def byte_tokenizer(max_positions: int) -> PreTrainedTokenizerFast:
    """The tokenizer in Hugging Face form. It puts `<bos>` first, pads on the right and adds no `<eos>`.

    Any text comes back from `decode(..., skip_special_tokens=True)`, text that spells a special token included.
    """
    vocab = {_printable(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="right",
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def encode(text: str) -> list[int]:
    """`<bos>` and the bytes of `text`: what the tokenizer gives, without the way through it."""
    return [BOS, *text.encode()]


def right_padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Token ids [B, S], padded on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])


def _printable(byte: int) -> str:
    """The character by which byte-level BPE writes a byte: itself where it is visible, else the next from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte) if byte in visible else chr(256 + sum(1 for other in range(byte) if other not in visible))
