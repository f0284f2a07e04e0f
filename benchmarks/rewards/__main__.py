"""How much of a slow judge a plan hides, and how far a reward that can be verified rises.

    python -m benchmarks.rewards judge --out DIR [--quicker 10] [--staleness 1] [--steps 6]
    python -m benchmarks.rewards learn --out DIR [--seeds 5] [--steps 20]

The models are random. `judge` trains under GRPO with 64 sequences a step, scored by an HTTP server on this machine
whose calls take 2 s on average and 20 s at their 99th percentile. What is hidden is the part, of what the server takes
for a step's samples if they are all asked about at once, that training does not wait for scores. `--quicker` divides
all latencies.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import yaml

from benchmarks.rewards.judging import Calls, seconds_at_once, served
from examples.tiny.byte_tokenizer import byte_tokenizer
from examples.tiny.random_models import random_model
from meshwright.planner.analysis.optional_features import host_rewards
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.stages import ENVIRONMENT
from meshwright.profiles.trace import read_spans
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.records.record import RunSummary

BATCH_SIZE, GROUP_SIZE = 64, 4
ALGORITHMS = ("grpo", "rloo", "ppo")
LETTERS = {"name": "letters", "function": "benchmarks.rewards.words:share_of_letters"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewards", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("judge", "learn"))
    parser.add_argument("--out", type=Path, required=True, help="a new directory for models and runs")
    parser.add_argument("--quicker", type=float, default=1.0, help="divides the judge's latencies")
    parser.add_argument("--response", type=int, default=384, help="longest response of the judge's job, in tokens")
    parser.add_argument("--staleness", type=int, default=1, help="bound of the judge's job")
    parser.add_argument("--layers", type=int, default=8, help="of the judge's job's model")
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each algorithm")
    asked = parser.parse_args()
    out: Path = asked.out.resolve()
    out.mkdir(parents=True)
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores; {asked.steps} steps\n")
    if asked.what == "judge":
        judged(out, asked)
    else:
        learned(out, asked.seeds, asked.steps)


def judged(out: Path, asked: argparse.Namespace) -> None:
    """What training waits for a slow judge, beside what that takes for a step's samples at once."""
    _write_models(out, num_layers=asked.layers)
    steps, latency = asked.steps, LatencySpec(mean=2.0 / asked.quicker, p99=20.0 / asked.quicker)
    judge = {"name": "judge", "latency_seconds": latency.model_dump(exclude_none=True), "workers": BATCH_SIZE}
    calls = Calls(latency)
    with served(calls) as url:
        rewards = [{**judge, "url": url, "timeout_seconds": 1000.0}]
        request = _request(out, "run", rewards, _workload(asked.response), steps, staleness=asked.staleness)
        assert isinstance(run_plan(request), RunSummary)
    assert len(set(calls.scored)) == steps * BATCH_SIZE + _NUM_HELD_OUT, "a sample was lost"
    told = host_rewards(request.plan)
    assert told is not None
    at_once = statistics.fmean(seconds_at_once(latency, BATCH_SIZE, steps))
    waited = statistics.fmean(_waited(request.out))
    lines = [json.loads(line) for line in (request.out / "metrics.jsonl").read_text().splitlines()]
    print("\n| | seconds |\n|---|---|")
    print(f"| the judge, {BATCH_SIZE} samples of a step at once | {at_once:.2f} |")
    print(f"| training waits for it, of a step | {waited:.2f} |")
    print(f"| a step | {statistics.fmean(line['seconds'] for line in lines):.2f} |")
    print(f"\nhidden: {1 - waited / at_once:.1%} measured, {told.hidden_share:.1%} predicted", flush=True)


def _waited(out: Path) -> list[float]:
    """For each step the longest that a rank waited for scores."""
    waited: dict[int, float] = {}
    for span in read_spans(out / "trace.jsonl"):
        if span.instruction == f"receive {ENVIRONMENT} -> actor_train":
            waited[span.step] = max(span.seconds, waited.get(span.step, 0.0))
    return list(waited.values())


def learned(out: Path, seeds: int, steps: int) -> None:
    """The rise of the held-out reward under each algorithm."""
    _write_models(out, num_layers=2)
    print("| algorithm | seed | rise | standard error | standard errors |\n|---|---|---|---|---|")
    for algorithm in ALGORITHMS:
        for seed in range(seeds):
            name = f"{algorithm}-{seed}"
            request = _request(out, name, [LETTERS], _workload(32), steps, algorithm=algorithm, seed=seed)
            summary = run_plan(request)
            assert isinstance(summary, RunSummary)
            rise, error = summary.improvement() or (0.0, 1.0)
            print(f"| {algorithm} | {seed} | {rise:.3f} | {error:.3f} | {rise / error:.1f} |", flush=True)


_NUM_HELD_OUT = 64


def _write_models(out: Path, num_layers: int) -> None:
    for name, has_head in (("actor", False), ("critic", True)):
        random_model(num_layers=num_layers, scalar_head=has_head).save_pretrained(out / name)
    byte_tokenizer(512).save_pretrained(out / "tokenizer")
    for name, first in (("prompts", 0), ("held_out", 1000)):
        lines = (json.dumps({"id": str(n), "prompt": f"number {first + n}"}) for n in range(_NUM_HELD_OUT))
        (out / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def _workload(response: int) -> dict[str, Any]:
    """A random model ends a response at any token with about the same probability: lengths fall off from the start."""
    lengths = {"max": response, "median": 0.6 * response, "p99": 3.0 * response}
    return {"batch_size": BATCH_SIZE, "prompt": {"max": 16, "fixed": 12}, "response": lengths, "num_minibatches": 2}


def _request(
    out: Path,
    name: str,
    rewards: list[dict[str, Any]],
    workload: dict[str, Any],
    steps: int,
    *,
    algorithm: str = "grpo",
    seed: int = 0,
    staleness: int = 0,
) -> RunRequest:
    """A run of a job, by the plan for it."""
    models = {"actor": {"path": "actor"}}
    settings = {"actor_learning_rate": 3e-3, "kl_coefficient": 0.0, "seed": seed}
    if algorithm == "ppo":
        models |= {"critic": {"path": "critic"}, "ref": {"path": "actor"}}
        settings["critic_learning_rate"] = 3e-3
    else:
        workload = {**workload, "group_size": GROUP_SIZE}
    job = {
        "algorithm": algorithm,
        "models": models,
        "cluster": {"device": "local", "ranks_per_node": 2},
        "precision": "fp32",
        "workload": workload,
        "staleness": staleness,
        algorithm: settings,
        "rewards": rewards,
        "data": {"prompts": "prompts.jsonl", "held_out": "held_out.jsonl", "tokenizer": "tokenizer"},
    }
    path = out / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job))
    read = read_job(path)
    facts = resolve(read, out)
    found = compile_plan(facts, cost_model_of(facts))
    assert isinstance(found, Plan), found
    allowed = ("benchmarks.rewards.words",)
    return RunRequest(plan=found, job=read, directory=out, out=out / name, steps=steps, allowed_modules=allowed)


if __name__ == "__main__":
    main()
