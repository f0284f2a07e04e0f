"""Measured tokens per second of whole PPO steps on this machine: our plan against the best synchronous single layout.

    python -m benchmarks.end_to_end deep --out benchmarks/end_to_end/deep_<cpu>_<date>.md

The jobs are in `jobs.py`; every plan has the same ranks. The machine is profiled once, each plan is found on that
profile, and the plans run in turns: a pair is one run of each, and a figure is the median over the pairs. Steps at
both ends of a run are left out: a run has `--steps` of them behind those in which what is in flight grows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.end_to_end.jobs import JOBS, job_of
from benchmarks.search import by_hand
from meshwright.cost_models.protocol import CostModel
from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts, Job, read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.simulate import first_step
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.table import Table, read_table
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan

RAMP = 8
"""Steps left out at both ends of every run; at its start also those in which what is in flight still grows."""

_NOTHING_RUNS_ON = ("actor_generate.overcommit=0", "actor_generate.batches_in_flight=1")
_NOTHING_STREAMS = tuple(f"{stage}.chunk_tokens=0" for stage in ("reward_score", "ref_logprob", "critic_value"))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One plan over all pairs; tokens are response tokens."""

    name: str
    tokens_per_second: tuple[float, ...]
    predicted_step_seconds: float
    step_seconds: float
    max_staleness: float

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)


def main() -> int:
    """The exit code: 0, or 2 for what cannot be measured here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--table", type=Path, help="a profile of the job, instead of a new one")
    parser.add_argument("--out", type=Path, help="where the report goes; printed in any case")
    asked = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(asked.job, Path(scratch), asked.pairs, asked.steps, asked.table)
    except BadInput as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    text = _report(asked.job, found, asked.pairs, asked.steps)
    print(text)
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    return 0


def measure(name: str, scratch: Path, pairs: int, steps: int, table_path: Path | None) -> list[Measured]:
    """Every plan of the job in turns, `pairs` times."""
    path = job_of(name, scratch)
    if table_path is None:
        table_path = scratch / "table.json"
        command = Path(sys.executable).with_name("meshwright")
        subprocess.run([command, "profile", path, "-o", table_path], check=True)
    job = read_job(path)
    plans = plans_of(resolve(job, path.parent), read_table(table_path))
    lines: dict[str, list[list[dict[str, Any]]]] = {plan_name: [] for plan_name in plans}
    for pair in range(pairs):
        for plan_name, plan in plans.items():
            lines[plan_name].append(steady_steps(plan, job, path.parent, scratch / f"{pair} {plan_name}", steps))
    return [_measured(plan_name, plan, lines[plan_name]) for plan_name, plan in plans.items()]


def plans_of(facts: Facts, table: Table) -> Mapping[str, Plan]:
    """The plans that are compared, each the best of what it may use."""
    model = cost_model_of(facts, table)
    fresh = facts.model_copy(update={"staleness": 0})
    single = by_hand.single_layout(facts, model)
    assert single is not None
    return {
        "single layout, synchronous": single,
        "a layout per stage, synchronous": best_of(fresh, model, *_NOTHING_STREAMS),
        "and streaming": best_of(fresh, model),
        "and working ahead": best_of(facts, model, *_NOTHING_RUNS_ON),
        "and overcommit or batches in flight: our plan": best_of(facts, model),
    }


def best_of(facts: Facts, model: CostModel, *pins: str) -> Plan:
    """The best plan that the pins leave."""
    plan = best_plan(
        facts, model, pins=parse_pins(pins, PPO_GRAPH), limits=Limits(gap=0.01, max_deterministic_time=20.0)
    )
    assert isinstance(plan, Plan), plan
    return plan


def steady_steps(plan: Plan, job: Job, directory: Path, out: Path, steps: int) -> list[dict[str, Any]]:
    """Runs the plan; what it says of `steps` steps but for the last `RAMP`, behind those in which it gets under way."""
    used = job.model_copy(update={"staleness": plan.facts.staleness})
    first = max(RAMP, first_step(plan))
    run_plan(RunRequest(plan=plan, job=used, directory=directory, out=out, steps=first + steps))
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][first:-RAMP]


def _measured(name: str, plan: Plan, runs: list[list[dict[str, Any]]]) -> Measured:
    tokens = plan.facts.workload.batch_size
    return Measured(
        name=name,
        tokens_per_second=tuple(
            sum(line["response_tokens"] * tokens for line in run) / sum(line["seconds"] for line in run) for run in runs
        ),
        predicted_step_seconds=plan.period_seconds,
        step_seconds=statistics.median(line["seconds"] for run in runs for line in run),
        max_staleness=max(line.get("max_staleness", 0.0) for run in runs for line in run),
    )


def _report(job: str, found: list[Measured], pairs: int, steps: int) -> str:
    first, machine = found[0], f"{psutil.cpu_count()} shared cores"
    lines = [
        f"# End to end: response tokens per second of PPO steps, job {job}",
        "",
        f"Measured on {machine}, {datetime.date.today()}: `python -m benchmarks.end_to_end {job} --pairs {pairs} "
        f"--steps {steps}`. Medians of {pairs} paired runs; the ratio is the median of the pairs' ratios.",
        "",
        "| plan | tokens/s | of the first | step s | predicted s | oldest token, updates |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        ratio = statistics.median(a / b for a, b in zip(one.tokens_per_second, first.tokens_per_second, strict=True))
        lines.append(
            f"| {one.name} | {one.median:.0f} | {ratio:.2f} | {one.step_seconds:.3f} | "
            f"{one.predicted_step_seconds:.3f} | {one.max_staleness:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
