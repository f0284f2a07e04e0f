"""How far the held-out reward of the demo's actor rises under each algorithm, or its divergence falls, over some seeds.

    python -m benchmarks.algorithms --out DIR [--seeds 5] [--steps 20] [--rank 8]

Models, prompts, batch and the actor's learning rate are the demo's; algorithms without a critic take `GROUP_SIZE`
samples of a prompt. Distillation has the demo's actor as the teacher of a student that is the same model without its
last layer, and what it rises by is what the divergence to the teacher falls by, in nats a token. With a rank the actor
is trained by an adapter, at `ADAPTER_RATE` times the rate. Each is planned by analytic costs, which change no result,
and run on all cores.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import yaml

from benchmarks.algorithms.shortened import write_shortened
from benchmarks.demo import BUILD, TINY, require_demo
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Job, read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan

GROUP_SIZE = 8
ADAPTER_RATE = 10
"""The best rate of an adapter over that of all weights (Schulman et al., LoRA Without Regret, 2025)."""
SETTINGS = {"ppo": "ppo", "grpo": "grpo", "rloo": "rloo", "reinforce++": "reinforce", "distill": "distill"}
"""By algorithm, the key of its settings."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a new directory for the runs")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each algorithm")
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--only", choices=tuple(SETTINGS), action="append", help="one algorithm; may be given again")
    parser.add_argument("--rank", type=int, help="of an adapter of the actor; by default all weights are trained")
    asked = parser.parse_args()
    require_demo()
    out: Path = asked.out.resolve()
    out.mkdir(parents=True)
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores; {asked.steps} steps\n")
    print("| algorithm | seed | rise | standard error | standard errors |\n|---|---|---|---|---|")
    for algorithm in asked.only or SETTINGS:
        for seed in range(asked.seeds):
            rise, error = rise_under(algorithm, out / f"{algorithm}-{seed}", seed, asked.steps, rank=asked.rank)
            print(f"| {algorithm} | {seed} | {rise:.3f} | {error:.3f} | {rise / error:.1f} |", flush=True)


def rise_under(algorithm: str, out: Path, seed: int, steps: int, *, rank: int | None = None) -> tuple[float, float]:
    """What the held-out reward rises by in a run, or the divergence falls by, and the standard error."""
    out.mkdir(parents=True)
    job = _job(algorithm, seed, out / "job.yaml", rank)
    facts = resolve(job, TINY)
    plan = compile_plan(facts, cost_model_of(facts))
    assert isinstance(plan, Plan), plan
    summary = run_plan(RunRequest(plan=plan, job=job, directory=TINY, out=out / "run", steps=steps))
    assert summary is not None
    rise = summary.improvement()
    assert rise is not None
    return rise


def _job(algorithm: str, seed: int, path: Path, rank: int | None) -> Job:
    """The demo's under an algorithm, with an adapter of the rank where one is given."""
    document: dict[str, Any] = yaml.safe_load((TINY / "job.yaml").read_text())
    settings = document.pop("ppo")
    if algorithm != "ppo":
        del document["models"]["critic"]
        document["workload"]["group_size"] = GROUP_SIZE
        settings = {"actor_learning_rate": settings["actor_learning_rate"]}
    if algorithm == "distill":
        del document["workload"]["group_size"]
        student = write_shortened(BUILD / "actor", path.parent / "student")
        document["models"] = {"actor": {"path": str(student)}, "teacher": document["models"]["actor"]}
    if rank is not None:
        document["models"]["actor"]["adapter"] = {"rank": rank, "alpha": 2.0 * rank}
        settings["actor_learning_rate"] *= ADAPTER_RATE
    path.write_text(
        yaml.safe_dump({**document, "algorithm": algorithm, SETTINGS[algorithm]: {**settings, "seed": seed}})
    )
    return read_job(path)


if __name__ == "__main__":
    main()
