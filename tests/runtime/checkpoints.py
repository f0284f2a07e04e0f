"""Tiny random Hugging Face checkpoints, and what transformers answers for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

SHAPE: dict[str, Any] = {
    "vocab_size": 260,  # not a multiple of the padding
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DELTA: dict[str, Any] = {
    "tie_word_embeddings": False,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
"""Three layers with a state and one with gated attention, which rotates a quarter of each head."""
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False, "rope_parameters": STRETCHED},
    "Mistral": {"tie_word_embeddings": False, "sliding_window": None},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"tie_word_embeddings": False, "head_dim": 32},
    "Gemma": {"tie_word_embeddings": True, "head_dim": 32, "num_key_value_heads": 4},
    "Olmo2": {"tie_word_embeddings": False},
    "Phi3": {"tie_word_embeddings": False, "partial_rotary_factor": 0.75},
    "Granite": {
        "tie_word_embeddings": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "Glm4": {"tie_word_embeddings": False, "head_dim": 16},
    "SmolLM3": {"tie_word_embeddings": True, "no_rope_layer_interval": 2},
    "Ministral": {"tie_word_embeddings": False, "sliding_window": 128, "head_dim": 16},
    "Gemma2": {
        "sliding_window": 6,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "Gemma3": {"sliding_window": 6, "head_dim": 32, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Olmo3": {"tie_word_embeddings": False, "sliding_window": 6},
    "Qwen3_5": DELTA,
}
WINDOWS: dict[str, dict[str, Any]] = {
    "Mistral": {"tie_word_embeddings": False, "sliding_window": 6},
    "Qwen2": {"tie_word_embeddings": True, "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": {"head_dim": 32, "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    "Phi3": {"tie_word_embeddings": False, "sliding_window": 6},
    "Ministral": {"sliding_window": 6, "head_dim": 16},
    "SmolLM3": {"no_rope_layer_interval": 2, "sliding_window": 6, "use_sliding_window": True},
}
"""Families in whose configs a window is optional, with a window."""
PLAIN = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma")
"""Families with two norms a layer, whole rotary embeddings and a stored tensor for each projection."""
BIASED_LLAMA = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}


def write_checkpoint(
    directory: Path, family: str = "Llama", *, head: str = "ForCausalLM", seed: int = 0, **changes: Any
) -> Path:
    """Saves a random model; every weight is drawn, also those that transformers starts at zero or one."""
    transformers.utils.logging.disable_progress_bar()
    shape = {**SHAPE, **(changes or FAMILIES[family])}
    if head != "ForCausalLM":
        shape["num_labels"] = 1
    text = "Text" if family in ("Gemma3", "Qwen3_5", "Qwen3_5Moe", "Llama4") else ""
    model_class = getattr(transformers, family + (text if head != "ForCausalLM" else "") + head)
    is_offset = family.startswith(("Gemma", "Qwen3Next", "Qwen3_5"))
    model = model_class(getattr(transformers, f"{family}{text}Config")(**shape))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if name.endswith("norm.weight") and not is_offset else 0.0
            if name.endswith("A_log"):
                centre = -3.0  # a state that is kept for many tokens
            parameter.copy_(centre + 0.1 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(directory)
    return directory


def tokens(rows: int = 3, length: int = 21, *, seed: int = 1) -> Tensor:
    """[rows, length] random tokens; the length is not a multiple of any tp."""
    return torch.randint(0, SHAPE["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def expected_logprobs(directory: Path, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """[B, S] as runtime.training.bodies.forward_logprobs has them: element t is of token t + 1, the last is zero."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logprobs = (model(ids).logits / temperature).log_softmax(-1)
    of_next = logprobs[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(of_next, (0, 1))


@torch.no_grad()
def expected_scores(directory: Path, ids: Tensor) -> Tensor:
    """[B, S], the score head on every token."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    return model.score(model.model(ids).last_hidden_state).squeeze(-1)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def name_end_tokens(directory: Path, *ids: int) -> None:
    """In both files, for transformers writes the family's own into generation_config.json."""
    edit_config(directory, eos_token_id=list(ids))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ids)}))
