"""Untrained Hugging Face models of every family that is supported, small enough for a test.

Every parameter is random, norms and biases too, so that a weight loaded into the wrong place shows.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")

_MATRIX_STD = 0.08  # lively logits at these widths; 0.02 would leave the next token almost uniform
_VECTOR_STD = 0.1  # around each norm's and bias's initial value
_FAMILY_KEYS: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": None},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
}


def random_model(
    family: str = "llama",
    *,
    scalar_head: bool = False,
    seed: int = 0,
    vocab_size: int = 259,
    hidden_size: int = 64,
    ffn_size: int = 96,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    max_positions: int = 512,
    tied_embeddings: bool | None = None,
) -> PreTrainedModel:
    """A model in evaluation mode, the same for the same arguments; a sequence classifier if `scalar_head`.

    The last three ids of the vocabulary are bos, eos and pad. `tied_embeddings` of None is the family's own habit.
    """
    keys = dict(_FAMILY_KEYS.get(family, {}))
    if tied_embeddings is not None:
        keys["tie_word_embeddings"] = tied_embeddings
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=ffn_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim or hidden_size // num_heads,
        max_position_embeddings=max_positions,
        bos_token_id=vocab_size - 3,
        eos_token_id=vocab_size - 2,
        pad_token_id=vocab_size - 1,
        num_labels=1,
        **keys,
    )
    kind = AutoModelForSequenceClassification if scalar_head else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_config(config, dtype=torch.float32)
    _randomise(model, seed)
    return model.eval()


def save_random_model(directory: Path, family: str = "llama", *, scalar_head: bool = False, seed: int = 0) -> Path:
    """Writes `random_model(...)` as a Hugging Face directory and returns the directory."""
    random_model(family, scalar_head=scalar_head, seed=seed).save_pretrained(directory)
    return directory


def _randomise(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise * _VECTOR_STD)
            else:
                parameter.copy_(noise * _MATRIX_STD)
