"""Small jobs whose rewards are on hosts: GRPO, RLOO or PPO of a random actor, without a reward model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from meshwright.planner.job.job import read_job, resolve
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from tests.runtime.small_job import best_plan, write_job

LEARNS = {"actor_learning_rate": 3e-3, "kl_coefficient": 0.0}


def write_rewarded(
    directory: Path, *rewards: dict[str, Any], algorithm: str = "grpo", num_ranks: int = 2, **changes: Any
) -> Path:
    """The job; the answer of a prompt is its first word. `changes` are other keys of the job."""
    path = write_job(directory, num_ranks=num_ranks)
    for prompts in (directory / "prompts.jsonl", directory / "held_out.jsonl"):
        lines = [json.loads(line) for line in prompts.read_text().splitlines()]
        told = [json.dumps({**line, "answer": line["prompt"].split()[0]}) for line in lines]
        prompts.write_text("".join(f"{line}\n" for line in told))
    job = yaml.safe_load(path.read_text())
    del job["models"]["reward"], job["ppo"]
    if algorithm != "ppo":
        del job["models"]["critic"]
        job["workload"]["group_size"] = 4
    settings = LEARNS if algorithm != "ppo" else {**LEARNS, "critic_learning_rate": 3e-3}
    job |= {"algorithm": algorithm, algorithm: settings, "rewards": list(rewards), **changes}
    path.write_text(yaml.safe_dump(job))
    return path


def rewarded(path: Path, out: Path, *pins: str, steps: int, resume: bool = False) -> RunRequest:
    """What to run: the best plan under the pins, by analytic costs, with functions of the tests."""
    job = read_job(path)
    facts = resolve(job, path.parent)
    plan = best_plan(facts, pins)
    return RunRequest(
        plan=plan,
        job=job,
        directory=path.parent,
        out=out,
        steps=steps,
        resume=resume,
        allowed_modules=("tests.runtime.rewarding",),
    )


def stopped_and_resumed(asked: RunRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics of a run of four steps, and of the same one that lost its last two and went on from the second."""
    run_plan(asked)
    part = replace(asked, out=asked.out.with_name("part"), checkpoint_every=2)
    run_plan(part)
    shutil.rmtree(part.out / "checkpoints" / "step-000004")
    run_plan(replace(part, resume=True))
    return lines(asked.out), lines(part.out)


def lines(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run, step by step."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
