"""Short runs of the runtime itself: of a small job in this process, and of the demo on all cores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from benchmarks.demo import TINY
from benchmarks.small_worlds import END, VOCAB_SIZE, write_words
from benchmarks.truncation.treatments import Treatment, treated
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Job, read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.execution.train import run_plan

FROZEN = 1e-30
"""A learning rate that moves no weight."""

Lines = list[dict[str, Any]]


def write_models(directory: Path) -> None:
    """An untrained policy, an untrained critic, a reward model whose score is always 1, and prompts."""
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "eos_token_id": END,
        "num_labels": 1,
    }
    config = transformers.LlamaConfig(**shape)
    transformers.LlamaForCausalLM(config).save_pretrained(directory / "actor")
    transformers.LlamaForSequenceClassification(config).save_pretrained(directory / "critic")
    write_constant_reward(directory / "critic", directory / "reward")
    write_words(directory)


def write_constant_reward(source: Path, directory: Path) -> Path:
    """A reward model whose score is 1 whatever it reads: the source's shape, layers that add nothing to embeddings that
    are all alike, and a head that sums them to 1."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            silent = name.endswith(("o_proj.weight", "down_proj.weight", "bias"))
            parameter.fill_(0.0 if silent else 1.0 / model.config.hidden_size if name == "score.weight" else 1.0)
    model.save_pretrained(directory)
    return directory


def run_alone(
    models: Path, out: Path, steps: int, treatment: Treatment, *, max_response: int, ppo: Mapping[str, Any]
) -> Lines:
    """The metrics of a run on the models of `write_models`, where cut responses are treated so."""
    out.mkdir(parents=True)
    document = {
        "models": {role: {"path": role} for role in ("actor", "critic", "reward")} | {"ref": {"path": "actor"}},
        "cluster": {"device": "local", "ranks_per_node": 1},
        "precision": "fp32",
        "workload": {
            "batch_size": 32,
            "prompt": {"max": 8, "fixed": 6},
            "response": {"max": max_response, "fixed": max_response},
            "num_minibatches": 2,
        },
        "ppo": {"actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3, **ppo, **treatment.settings},
        "data": {"prompts": "prompts.jsonl", "tokenizer": "tokenizer.json"},
    }
    job = _read(document, out)
    with treated(treatment):
        run = RankRun(RunRequest(plan=_plan(job, models), job=job, directory=models, out=out, steps=steps))
        run.recorder.open(0)
        for turn in run.periods:
            run.run_period(turn)
        run.finish()
        run.close()
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def rise_of_demo(out: Path, seed: int, steps: int) -> tuple[float, float]:
    """What the demo's held-out reward rises by in a run on all cores, and the standard error; `ppo.seed` is another."""
    out.mkdir(parents=True)
    document = yaml.safe_load((TINY / "job.yaml").read_text())
    document["ppo"]["seed"] = seed
    job = _read(document, out)
    summary = run_plan(RunRequest(plan=_plan(job, TINY), job=job, directory=TINY, out=out / "run", steps=steps))
    assert summary is not None
    rise = summary.improvement()
    assert rise is not None
    return rise


def _read(document: Mapping[str, Any], out: Path) -> Job:
    path = out / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return read_job(path)


def _plan(job: Job, directory: Path) -> Plan:
    """By analytic costs, which change no result."""
    facts = resolve(job, directory)
    plan = compile_plan(facts, cost_model_of(facts))
    assert isinstance(plan, Plan), plan
    return plan
