"""A small PPO job on random checkpoints, planned under pins, for tests that run it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import yaml

from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.runtime.execution.request import RunRequest
from tests.runtime.checkpoints import name_end_tokens, write_checkpoint

VOCAB_SIZE = 32
EOS = 1

NUM_HELD_OUT = 16
"""Number of prompts that a run evaluates before and after: as many as a batch has, since each takes a test's time."""

TINY = {
    "name": "tiny",
    "kind": "cpu",
    "memory_bytes": 1024,
    "memory_bytes_per_second": 1e9,
    "flops_per_second": {"fp32": 1e9, "bf16": 1e9},
    "launch_seconds": 0.0,
    "source": "made up for tests",
}
"""A device on which nothing fits."""

OF_TIME = {"seconds", "tokens_per_second", "overhead"}
"""Metrics that tell how fast a run was, and nothing of what was learned."""


def write_job(directory: Path, *, num_ranks: int, nodes: int = 1, **ppo: object) -> Path:
    """A job with an actor, a reward model and prompts; the other two roles start from their weights.

    With several nodes it has `num_ranks` on each, and TCP between them.
    """
    if not (directory / "actor").exists():
        for role, head in (("actor", "ForCausalLM"), ("reward", "ForSequenceClassification")):
            write_checkpoint(directory / role, head=head, vocab_size=VOCAB_SIZE)
            name_end_tokens(directory / role, EOS)
        _write_prompts(directory)
    job = {
        "models": {
            "actor": {"path": "actor"},
            "critic": {"path": "reward"},
            "ref": {"path": "actor"},
            "reward": {"path": "reward"},
        },
        "cluster": {
            "device": "local",
            "nodes": nodes,
            "ranks_per_node": num_ranks,
            "network": {"seconds": 100e-6, "bytes_per_second": 1.25e9},
        },
        "precision": "fp32",
        "workload": {
            "batch_size": 16,
            "prompt": {"max": 8, "fixed": 6},
            "response": {"max": 24, "median": 12, "p99": 24},
            "num_minibatches": 2,
        },
        "ppo": {"actor_learning_rate": 3e-4, "critic_learning_rate": 3e-4, "entropy_coefficient": 0.01, **ppo},
        "data": {"prompts": "prompts.jsonl", "held_out": "held_out.jsonl", "tokenizer": "tokenizer"},
    }
    path = directory / f"job-{num_ranks if nodes == 1 else f'{nodes}x{num_ranks}'}.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def edited_job(job: Path, section: str, **changes: object) -> Path:
    """The job with other values in one of its sections, in a file beside it."""
    document = yaml.safe_load(job.read_text())
    document[section] = {**document[section], **changes}
    path = job.with_name("edited.yaml")
    path.write_text(yaml.safe_dump(document))
    return path


def request(path: Path, out: Path, *pins: str, steps: int = 3, resume: bool = False) -> RunRequest:
    """What to run: the best plan under the pins, by analytic costs."""
    job = read_job(path)
    facts = resolve(job, path.parent)
    return RunRequest(plan=best_plan(facts, pins), job=job, directory=path.parent, out=out, steps=steps, resume=resume)


_PLANS: dict[tuple[str, tuple[str, ...]], Plan] = {}


def best_plan(facts: Facts, pins: tuple[str, ...] = ()) -> Plan:
    """The best plan under the pins by analytic costs, searched once for the same facts."""
    key = (facts.model_dump_json(), pins)
    if key not in _PLANS:
        found = compile_plan(facts, cost_model_of(facts), pins=pins)
        assert isinstance(found, Plan)
        _PLANS[key] = found
    return _PLANS[key]


def _write_prompts(directory: Path) -> None:
    words = [f"w{number}" for number in range(VOCAB_SIZE - 2)]
    vocabulary = {"<unk>": 0, "<eos>": EOS, **{word: number + 2 for number, word in enumerate(words)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (directory / "tokenizer").mkdir()
    tokenizer.save(str(directory / "tokenizer" / "tokenizer.json"))
    draw = random.Random(0)
    prompts: Sequence[str] = [" ".join(draw.choices(words, k=draw.randint(3, 8))) for _ in range(40)]
    lines = [json.dumps({"id": f"p{number}", "prompt": prompt}) for number, prompt in enumerate(prompts)]
    (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "held_out.jsonl").write_text("\n".join(lines[:NUM_HELD_OUT]) + "\n")
