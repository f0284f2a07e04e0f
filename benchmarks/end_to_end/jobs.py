"""The two long-tailed jobs that whole steps are measured on. Both hardly learn, so that lengths stay what they are.

`tiny` is `examples/tiny` with its tail uncut: on a processor its training takes most of a step. `deep` has models so
narrow and deep that a decoded token costs its launches, as on a GPU, and a small batch: generation then takes most of
a step, and most of that is spent on the last few responses.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.demo import BUILD, TINY, require_demo

JOBS = ("tiny", "deep")

_STALENESS = {"tiny": 4, "deep": 8}

_MEAN_RESPONSE = 64
_LONGEST_RESPONSE = 512


def job_of(name: str, directory: Path) -> Path:
    """Writes the job's file, and what models it needs, into `directory`. Raises BadInput without the demo's models."""
    require_demo()
    job = _tiny() if name == "tiny" else _deep(directory)
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(job | {"staleness": _STALENESS[name]}), encoding="utf-8")
    return path


def _tiny() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((TINY / "job.yaml").read_text(encoding="utf-8"))
    job["models"] = {
        role: {"path": str(BUILD / source["path"].split("/")[-1])} for role, source in job["models"].items()
    }
    job["data"] = {"prompts": str(BUILD / "prompts.jsonl"), "tokenizer": str(BUILD / "tokenizer")}
    job["workload"]["response"] = {"max": 384, "median": 35, "p99": 237}
    job["ppo"] |= {"actor_learning_rate": 1e-9, "critic_learning_rate": 1e-9}
    return job


def _deep(directory: Path) -> dict[str, Any]:
    job = _tiny()
    actor, reward = directory / "actor", directory / "reward"
    _write_models(actor, reward)
    job["models"] = {role: {"path": str(actor if role in ("actor", "ref") else reward)} for role in job["models"]}
    job["workload"] |= {"batch_size": 16, "num_minibatches": 1, "response": {"max": _LONGEST_RESPONSE, **_geometric()}}
    return job


def _geometric() -> dict[str, Any]:
    """Lengths of responses that end with the same probability after every token: a histogram by eights."""
    width, ends = 8, 1 / _MEAN_RESPONSE
    bounds = range(0, _LONGEST_RESPONSE, width)
    shares = {low + width // 2: (1 - ends) ** low - (1 - ends) ** (low + width) for low in bounds}
    left = 1 - math.fsum(shares.values())
    return {"histogram": [*([tokens, share] for tokens, share in shares.items()), [_LONGEST_RESPONSE, left]]}


@torch.no_grad()
def _write_models(actor: Path, reward: Path) -> None:
    """Random models of 12 layers of 32 columns; every token of the actor's ends its response with one probability.

    The first column of every embedding is 1, so the hidden state always has a large part there, which only the
    end-of-sequence token's row of the head reads.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = LlamaConfig.from_pretrained(BUILD / "actor", **sizes, **heads, max_position_embeddings=1024)
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.weight[:, 0] = 1.0
    model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[config.eos_token_id] = 0.0
    tokens = torch.randint(config.eos_token_id - 1, (16, 256))
    hidden, others = model.model(tokens).last_hidden_state, model(tokens).logits.exp().sum(-1) - 1
    wanted = (others / (_MEAN_RESPONSE - 1)).log().mean()
    model.lm_head.weight[config.eos_token_id, 0] = wanted / hidden[..., 0].mean()
    model.save_pretrained(actor)
    LlamaForSequenceClassification(LlamaConfig.from_pretrained(actor, num_labels=1)).save_pretrained(reward)
