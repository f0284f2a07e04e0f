"""A calculator task from job to run: how far the predicted step lies from the measured one, done as a user would.

    python -m benchmarks.turns --out DIR [--minutes 2] [--calibrating 8] [--steps 16] [--lessons 400]

A model of the tiny job's shape is taught sums with a calculator, two to four turns each. The job is profiled, planned
and run; what that run measured corrects the table and gives the lengths, and the plan that follows from both is run
from the beginning. Its period is predicted, its steps are measured; the first step of a run is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.turns.sums import MOST_POSITIONS, draw_summands, prompt_of, taught_model
from examples.tiny.byte_tokenizer import byte_tokenizer
from meshwright.planner.plan.plan import read_plan
from meshwright.profiles.trace import read_spans

_NUM_PROMPTS = 256


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a new directory for the model and the runs")
    parser.add_argument("--minutes", type=float, default=2.0, help="for the profile")
    parser.add_argument("--calibrating", type=int, default=8, help="steps of the run that corrects the table")
    parser.add_argument("--steps", type=int, default=16, help="of the run that is compared")
    parser.add_argument("--lessons", type=int, default=400, help="batches that the model is taught by")
    asked = parser.parse_args()
    out: Path = asked.out.resolve()
    out.mkdir(parents=True)
    job = write_job(out, asked.lessons)
    profile_and_run(out, job, asked.minutes, asked.calibrating, asked.steps)
    print(report(out), flush=True)


def write_job(out: Path, lessons: int) -> Path:
    """A GRPO job of the taught model, its prompts and their answers."""
    torch.set_num_threads(1)
    taught_model(lessons).save_pretrained(out / "actor")
    byte_tokenizer(MOST_POSITIONS).save_pretrained(out / "tokenizer")
    draw = random.Random(1)
    asked = [draw_summands(draw) for _ in range(_NUM_PROMPTS)]
    lines = [json.dumps({"prompt": prompt_of(summands), "answer": str(sum(summands))}) for summands in asked]
    (out / "prompts.jsonl").write_text("\n".join(lines))
    path = out / "job.yaml"
    path.write_text(yaml.safe_dump(_job()))
    return path


def _job() -> dict[str, Any]:
    """As one would write it who knows the task and not the model."""
    workload = {
        "batch_size": 32,
        "group_size": 4,
        "prompt": {"max": 12, "histogram": [[5, 1], [7, 1], [9, 1]]},
        "response": {"max": 12, "histogram": [[1, 1], [7, 1], [8, 1]]},
        "turns": {
            "number": {"max": 4, "histogram": [[2, 1], [3, 1], [4, 1]]},
            "result": {"max": 4, "histogram": [[1, 1], [2, 1]]},
            "max_tokens": 60,
        },
    }
    return {
        "algorithm": "grpo",
        "models": {"actor": {"path": "actor"}},
        "cluster": {"device": "local", "ranks_per_node": 2},
        "precision": "fp32",
        "workload": workload,
        "grpo": {"actor_learning_rate": 1e-5, "kl_coefficient": 0.0},
        "tool": {"function": "calculator", "call_end": ">>", "workers": 4, "failure_answer": "error"},
        "rewards": [{"name": "maths", "function": "maths_answer"}],
        "data": {"prompts": "prompts.jsonl", "tokenizer": "tokenizer"},
    }


def profile_and_run(out: Path, job: Path, minutes: float, calibrating: int, steps: int) -> None:
    """Both plans and both runs, by the commands that a user gives."""
    table, corrected = out / "table.json", out / "corrected.json"
    _give("profile", job, "-o", table, "--minutes", minutes)
    _give("plan", job, "--profile", table, "-o", out / "first.json")
    _give("run", out / "first.json", job, "--steps", calibrating, "--out", out / "calibrating")
    _give("calibrate", out / "first.json", out / "calibrating", "--profile", table, "-o", corrected)
    _give("plan", job, "--profile", corrected, "--from-trace", out / "calibrating", "-o", out / "second.json")
    _give("run", out / "second.json", job, "--steps", steps, "--out", out / "run")


def _give(*words: object) -> None:
    command = Path(sys.executable).with_name("meshwright")
    subprocess.run([str(command), *map(str, words)], check=True)


def report(out: Path) -> str:
    """Predicted beside measured, of a step and of each stage, for both plans and their runs."""
    lines = [f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores"]
    for plan_name, run_name in (("first", "calibrating"), ("second", "run")):
        plan, run = read_plan(out / f"{plan_name}.json"), out / run_name
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
        score, told = (statistics.fmean(line[key] for line in metrics) for key in ("score", "tool_tokens"))
        lines += ["", f"{run_name}: {len(metrics)} steps, score {score:.2f}, {told:.1f} tokens told a rollout", ""]
        lines += ["| what | predicted, s | measured, s | predicted over measured |", "|---|---|---|---|"]
        lines.append(_row("a step", plan.period_seconds, statistics.median(line["seconds"] for line in metrics)))
        for placement in plan.placements:
            measured = _median_seconds(run / "trace.jsonl", placement.stage)
            lines.append(_row(placement.stage, placement.cost.total, measured))
    return "\n".join(lines)


def _row(what: str, predicted: float, measured: float) -> str:
    return f"| {what} | {predicted:.3f} | {measured:.3f} | {predicted / measured:.3f} |"


def _median_seconds(trace: Path, stage: str) -> float:
    """Of a stage over the steps behind the first, each by the rank that took longest."""
    longest: dict[int, float] = {}
    for span in read_spans(trace):
        if span.instruction == stage and span.step:
            longest[span.step] = max(span.seconds, longest.get(span.step, 0.0))
    return statistics.median(longest.values())


if __name__ == "__main__":
    main()
