"""Profiles the tiny job on this machine, then predicts runs that were not profiled and compares.

    python -m benchmarks.host --out DIR [--rounds 3] [--minutes 3] [--steps 16]

Only the job of `examples/tiny` is profiled. Each run has another batch, other lengths and another layout; its stages
are predicted from the table at the mean lengths that the run met, and set beside their measured medians.

A machine that others use is slower in one minute than in the next, and a profile is minutes older than what it
predicts. So there are several rounds, each with a profile and runs of its own, and of a stage's errors the median
over the rounds counts. Peak memory, which no neighbour changes, is measured in the first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.demo import TINY
from benchmarks.host.memory import MemoryRow, memory_rows
from benchmarks.host.score import STEP, Row, median_error, median_rows, rows_of
from benchmarks.host.variations import VARIATIONS, Variation
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Job, read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.table import Table, read_table
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.profiling.profiling import profile_job

_MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for models, table and runs")
    parser.add_argument("--rounds", type=int, default=3, help="profiles, each with its own runs")
    parser.add_argument("--minutes", type=float, default=3.0, help="time to profile, at most, in each round")
    parser.add_argument(
        "--steps", type=int, default=16, help="PPO steps of each run; the first is left out, the next few are slower"
    )
    asked = parser.parse_args()
    if asked.rounds < 1:
        parser.error(f"--rounds of {asked.rounds} measures nothing; give 1 or more")
    out: Path = asked.out.resolve()
    subprocess.run([sys.executable, TINY / "make.py", "--out", out / "build"], check=True, stdout=subprocess.DEVNULL)
    rounds: list[list[Row]] = []
    memory: list[MemoryRow] = []
    for number in range(1, asked.rounds + 1):
        here = out / f"round-{number}"
        here.mkdir(exist_ok=True)
        table = _profile(out, here / "table.json", asked.minutes)
        rounds.append([])
        for variation in VARIATIONS:
            plan, directory = _run(variation, out, here, table, asked.steps)
            rounds[-1] += rows_of(variation.name, plan, table, directory)
            if number == 1:
                memory += memory_rows(variation.name, plan, table)
    _show(rounds)
    _show_memory(memory)


def _run(variation: Variation, out: Path, here: Path, table: Table, steps: int) -> tuple[Plan, Path]:
    """The plan of a variation and where its run is; runs it unless it is there."""
    directory = here / variation.name.replace(",", "").replace(" ", "-")
    job = _job(out, variation.workload)
    plan = _plan(variation, job, out, table)
    if not (directory / "summary.json").exists():
        run_plan(RunRequest(plan=plan, job=job, directory=out, out=directory, steps=steps))
    return plan, directory


def _profile(out: Path, path: Path, minutes: float) -> Table:
    """The table of the tiny job as it is; measured unless it is there."""
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
    model = cost_model_of(facts, table)
    plan = compile_plan(facts, model, pins=variation.pins)
    assert isinstance(plan, Plan), plan
    return plan


def _show(rounds: list[list[Row]]) -> None:
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores\n")
    print("| run | what | layout | predicted s | measured s | spread | error | in all rounds |")
    print("|---|---|---|---|---|---|---|---|")
    rows = median_rows(rounds)
    for row, *found in zip(rows, *rounds, strict=True):
        errors = ", ".join(f"{one.error:+.0%}" for one in found)
        figures = f"{row.predicted:.3f} | {row.measured:.3f} | {row.spread:.0%} | {row.error:+.1%} | {errors}"
        print(f"| {row.run} | {row.name} | {row.layout} | {figures} |")
    for number, found in enumerate(rounds, start=1):
        _show_errors(f"round {number}", found)
    _show_errors("median of the rounds", rows)


def _show_errors(name: str, rows: Sequence[Row]) -> None:
    stages, whole = [row for row in rows if row.name != STEP], [row for row in rows if row.name == STEP]
    print(f"\nmedian absolute error, {name}: {median_error(stages):.1%} per stage, {median_error(whole):.1%} per step")


def _show_memory(rows: list[MemoryRow]) -> None:
    print("\n| run | stage | rows x tokens | predicted MiB | measured MiB | error |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        figures = f"{row.predicted_bytes / _MIB:.1f} | {row.measured_bytes / _MIB:.1f} | {row.error:+.1%}"
        print(f"| {row.run} | {row.stage} | {row.shape} | {figures} |")
    print(f"\nmedian absolute error of peak memory: {statistics.median(abs(row.error) for row in rows):.1%}")


if __name__ == "__main__":
    main()
