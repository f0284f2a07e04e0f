"""Profiles the tiny job on this machine, then predicts runs that were not profiled and compares.

    python -m benchmarks.host --out DIR [--minutes 3] [--steps 8]

Only the job of `examples/tiny` is profiled. Each run has another batch, other lengths and another layout; its stages
are predicted from the table at the mean lengths that the run met, and set beside their measured medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

import yaml

from benchmarks.demo import TINY
from benchmarks.host.memory import MemoryRow, memory_rows
from benchmarks.host.score import STEP, Row, median_error, rows_of
from benchmarks.host.variations import VARIATIONS, Variation
from meshwright.cost_models.blended import cost_model
from meshwright.planner.compile import compile_plan
from meshwright.planner.job import Job, read_job, resolve
from meshwright.planner.plan import Plan
from meshwright.profiles.table import Table, read_table
from meshwright.runtime.profiling import profile_job
from meshwright.runtime.request import RunRequest
from meshwright.runtime.train import run_plan

_MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for models, table and runs")
    parser.add_argument("--minutes", type=float, default=3.0, help="time to profile")
    parser.add_argument("--steps", type=int, default=8, help="PPO steps of each run; the first is left out")
    asked = parser.parse_args()
    out: Path = asked.out.resolve()
    subprocess.run([sys.executable, TINY / "make.py", "--out", out / "build"], check=True, stdout=subprocess.DEVNULL)
    table = _profile(out, asked.minutes)
    rows: list[Row] = []
    memory: list[MemoryRow] = []
    for variation in VARIATIONS:
        directory = out / variation.name.replace(",", "").replace(" ", "-")
        job = _job(out, variation.workload)
        plan = _plan(variation, job, out, table)
        if not (directory / "summary.json").exists():
            run_plan(RunRequest(plan=plan, job=job, directory=out, out=directory, steps=asked.steps))
        rows += rows_of(variation.name, plan, table, directory)
        memory += memory_rows(variation.name, plan, table)
    _show(rows)
    _show_memory(memory)


def _profile(out: Path, minutes: float) -> Table:
    """The table of the tiny job as it is; measured once for a directory."""
    path = out / "table.json"
    if not path.exists():
        profile_job(resolve(_job(out, {}), out), path, minutes=minutes)
    return read_table(path)


def _job(out: Path, workload: dict[str, object]) -> Job:
    """The tiny job on the models under `out`, without held-out prompts, with another workload where one is given."""
    document = yaml.safe_load((TINY / "job.yaml").read_text())
    document["data"].pop("held_out")
    document["workload"] = workload or document["workload"]
    path = out / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return read_job(path)


def _plan(variation: Variation, job: Job, out: Path, table: Table) -> Plan:
    facts = resolve(job, out)
    model = cost_model(facts.cluster, facts.workload, facts.precision, table)
    plan = compile_plan(facts, model, pins=variation.pins)
    assert isinstance(plan, Plan), plan
    return plan


def _show(rows: list[Row]) -> None:
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores\n")
    print("| run | what | layout | predicted s | measured s | spread | error |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        figures = f"{row.predicted:.3f} | {row.measured:.3f} | {row.spread:.0%} | {row.error:+.1%}"
        print(f"| {row.run} | {row.name} | {row.layout} | {figures} |")
    stages = [row for row in rows if row.name != STEP]
    whole = [row for row in rows if row.name == STEP]
    print(f"\nmedian absolute error: {median_error(stages):.1%} per stage, {median_error(whole):.1%} per step")


def _show_memory(rows: list[MemoryRow]) -> None:
    print("\n| run | stage | rows x tokens | predicted MiB | measured MiB | error |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        figures = f"{row.predicted_bytes / _MIB:.1f} | {row.measured_bytes / _MIB:.1f} | {row.error:+.1%}"
        print(f"| {row.run} | {row.stage} | {row.shape} | {figures} |")
    print(f"\nmedian absolute error of peak memory: {statistics.median(abs(row.error) for row in rows):.1%}")


if __name__ == "__main__":
    main()
