"""Models of published shapes with random weights, and the jobs that are run and profiled with them."""

from __future__ import annotations

import gc
import json
import random
import string
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks.accelerator.world import World
from meshwright.profiles.algorithms import PPO_GRAPH

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
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
"""Of Qwen2.5, https://arxiv.org/abs/2412.15115 table 1, of Llama-3.1-8B, and one to try the commands with."""

_QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
MODELS = {"qwen2.5-0.5b": (_QWEN, "0.5B"), "qwen2.5-1.5b": (_QWEN, "1.5B"), "llama-3.1-8b": (_LLAMA, "8B")}
"""What config.json of https://huggingface.co/Qwen/Qwen2.5-0.5B, Qwen/Qwen2.5-1.5B and meta-llama/Llama-3.1-8B says,
but for Llama's stretched positions, and which size each has."""

RUN_MODEL = "qwen2.5-0.5b"
"""Of which runs are predicted and repeated: four copies of it, one trained twice over, go onto one GPU."""

_GROUP_SIZE = 8

LONGEST_PROMPT = 48
"""Letters, each of which is a token."""


def config_of(world: World, name: str, **changes: object) -> dict[str, Any]:
    """A model's config.json; at the tiny size where the world is."""
    family, size = MODELS[name]
    return {**family, **SIZES["tiny" if world.tiny else size], **changes}


def write_weights(
    directory: Path, config: dict[str, Any], dtype: torch.dtype, kind: str, *, scalar_head: bool = False
) -> Path:
    """A random model in Hugging Face form, drawn on a device of this kind.

    Log-probabilities of its tokens differ: weights are twice the usual, where the config says nothing of them.
    """
    usual = {"pad_token_id": 0, "eos_token_id": 1, "initializer_range": 0.04, "num_labels": 1}
    found = AutoConfig.for_model(**{**usual, **config})
    torch.manual_seed(0)
    made_by = AutoModelForSequenceClassification if scalar_head else AutoModelForCausalLM
    with torch.device(kind):
        made_by.from_config(found, dtype=dtype).save_pretrained(directory)
    free_device_memory()
    return directory


def free_device_memory() -> None:
    """Gives back what models that are gone held of the device, which other processes are to use."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write_run_job(
    directory: Path, world: World, algorithm: str, *, batch_size: int, longest: int, rate: float = 1e-9
) -> Path:
    """Writes a job for one device under ppo or grpo, with its models, tokenizer and prompts; every response has
    `longest` tokens."""
    config = config_of(world, RUN_MODEL)
    actor = write_weights(directory / "actor", config, world.dtype, world.kind)
    reward = write_weights(directory / "reward", config, world.dtype, world.kind, scalar_head=True)
    in_graph = ("actor", "critic", "ref", "reward") if algorithm == "ppo" else ("actor", "ref", "reward")
    trained = ("actor", "critic") if algorithm == "ppo" else ("actor",)
    workload = {
        "batch_size": batch_size,
        "prompt": {"max": LONGEST_PROMPT, "median": 26, "p99": LONGEST_PROMPT},
        "response": {"max": longest, "fixed": longest},  # random models hardly ever end a response
        "num_minibatches": 2,
        **({"group_size": _GROUP_SIZE} if algorithm == "grpo" else {}),
    }
    job = {
        "algorithm": algorithm,
        "models": {role: {"path": str(actor if role in ("actor", "ref") else reward)} for role in in_graph},
        "cluster": cluster_of(world, ranks=1),
        "precision": world.precision,
        "workload": workload,
        algorithm: {f"{role}_learning_rate": rate for role in trained},
        "data": write_data(directory, config["vocab_size"]),
    }
    return written(directory, job)


def write_data(directory: Path, vocab_size: int) -> dict[str, str]:
    """Prompts of letters and their tokenizer, as jobs name them."""
    tokenizer, prompts = directory / "tokenizer.json", directory / "prompts.jsonl"
    _bytes(vocab_size).save(str(tokenizer))
    draw = random.Random(0)
    words = ("".join(draw.choices(string.ascii_letters, k=draw.randint(8, LONGEST_PROMPT))) for _ in range(512))
    prompts.write_text("\n".join(json.dumps({"prompt": word}) for word in words), encoding="utf-8")
    return {"prompts": str(prompts), "tokenizer": str(tokenizer)}


def write_profile_job(directory: Path, world: World, name: str) -> Path:
    """A job with four models of one shape, no weights, on a node of eight of the device, or of two processors: its
    profile has the shards of every tp that divides the model."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(world, name)), encoding="utf-8")
    prompt, longest = (16, 32) if world.tiny else (1024, 2048)
    job = {
        "models": {role.value: {"path": "."} for role in PPO_GRAPH.roles},
        "cluster": cluster_of(world, ranks=2 if world.kind == "cpu" else 8),
        "precision": world.precision,
        "workload": {
            "batch_size": 8 if world.tiny else 256,
            "prompt": {"max": prompt, "fixed": prompt},
            "response": {"max": longest, "fixed": longest // 2},
        },
    }
    return written(directory, job)


def cluster_of(world: World, ranks: int) -> dict[str, Any]:
    """One node of this device."""
    return {"device": world.in_jobs, "nodes": 1, "ranks_per_node": ranks, "network": "ib-ndr-400"}


def written(directory: Path, job: dict[str, Any]) -> Path:
    """The file of a job."""
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


def _bytes(vocab_size: int) -> Tokenizer:
    """Of bytes, with as many tokens as the models have rows: what is no token would never be drawn."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"unused {number}" for number in range(len(letters), vocab_size))]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
