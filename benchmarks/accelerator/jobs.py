"""Jobs of one device: random models of a published size, and the demo's prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.demo import BUILD

LOCAL = "local"

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
}
"""Of Qwen2.5, https://arxiv.org/abs/2412.15115 table 1, and one to try the commands with."""

_POSITIONS = 4096


def write_job(directory: Path, size: str, device: str) -> Path:
    """Writes a job for one `device` with four models of this size below `directory`; the demo's prompts exist."""
    actor, reward = directory / "actor", directory / "reward"
    dtype = torch.float32 if device == LOCAL else torch.bfloat16
    config = LlamaConfig(**SIZES[size], tie_word_embeddings=True, max_position_embeddings=_POSITIONS, pad_token_id=0)
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(dtype).save_pretrained(actor)
    scalar = LlamaConfig.from_pretrained(actor, num_labels=1)
    LlamaForSequenceClassification(scalar).to(dtype).save_pretrained(reward)
    tokenizer = directory / "tokenizer.json"
    _bytes(SIZES[size]["vocab_size"]).save(str(tokenizer))
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(_job(actor, reward, tokenizer, device)), encoding="utf-8")
    return path


def _bytes(vocab_size: int) -> Tokenizer:
    """Of bytes, with as many tokens as the models have rows: what is no token would never be drawn."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"unused {number}" for number in range(len(letters), vocab_size))]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _job(actor: Path, reward: Path, tokenizer: Path, device: str) -> dict[str, Any]:
    on_gpu = {"device": device, "nodes": 1, "ranks_per_node": 1, "network": "ib-ndr-400"}
    longest = 64 if device == LOCAL else 1024
    return {
        "models": {
            role: {"path": str(actor if role in ("actor", "ref") else reward)}
            for role in ("actor", "critic", "ref", "reward")
        },
        "cluster": LOCAL if device == LOCAL else on_gpu,
        "precision": "fp32" if device == LOCAL else "bf16",
        "workload": {
            "batch_size": 16 if device == LOCAL else 256,
            "prompt": {"max": 48, "median": 23, "p99": 47},
            "response": {"max": longest, "fixed": longest},  # random models hardly ever end a response
            "num_minibatches": 2,
        },
        "ppo": {"actor_learning_rate": 1e-9, "critic_learning_rate": 1e-9},
        "data": {"prompts": str(BUILD / "prompts.jsonl"), "tokenizer": str(tokenizer)},
    }
