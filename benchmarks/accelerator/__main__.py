"""What one device makes of its limits, and how well its runs are predicted.

    python -m benchmarks.accelerator --out DIR --device h200 --size 0.5B --size 1.5B [--minutes 2] [--steps 6]

For every size: a decode step of 64 rows as a share of the memory bandwidth's limit; forward and backward of a
micro-batch as a share of the arithmetic's peak; then the job is profiled for `--minutes`, planned, and run twice for
`--steps` PPO steps. The stages of the second run are set beside what the profile predicts for the lengths that it met,
and what the profile does when it is calibrated by the first. `--device local`
tries the same on a processor, whose limits are those that this host is taken to have. The demo's prompts must have
been made: `make demo`, or `python examples/tiny/make.py --out examples/tiny/build`. Against `transformers`:
`python -m benchmarks.generation`.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

import torch

from benchmarks.accelerator.jobs import LOCAL, SIZES, write_job
from benchmarks.accelerator.shares import Share, shares
from benchmarks.arguments import one_of
from benchmarks.demo import require_demo
from benchmarks.host.score import STEP, Row, median_error, rows_of
from meshwright.planner.analysis.correct_table import calibrate, read_run
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.calls import model_of
from meshwright.planner.plan.job import read_job, resolve
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import BadInput
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.profiling.profiling import profile_job


def main() -> int:
    """The exit code: 0, or 2 for what cannot be measured here."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for models, tables and runs")
    parser.add_argument("--device", default=LOCAL, help="a device as jobs name it, or local")
    parser.add_argument(
        "--size", action="append", type=one_of(SIZES), help=f"one of {', '.join(SIZES)}; may be repeated"
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="time to profile each job")
    parser.add_argument("--steps", type=int, default=6, help="PPO steps of each run; the first is left out")
    asked = parser.parse_args()
    try:
        require_demo()
        _measure(asked)
    except BadInput as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    return 0


def _measure(asked: argparse.Namespace) -> None:
    for size in asked.size or ["tiny"]:
        directory = asked.out.resolve() / size
        directory.mkdir(parents=True, exist_ok=True)
        path = write_job(directory, size, asked.device)
        print(f"\n## {size} on {asked.device}\n", flush=True)
        _show_shares(shares(resolve(read_job(path), directory)))
        _show_rows(_run(path, directory, asked.minutes, asked.steps))


def _run(path: Path, directory: Path, minutes: float, steps: int) -> dict[str, tuple[Row, ...]]:
    """Every stage of a second run and its step, as the profile predicts them, and once a first run has corrected it."""
    job = read_job(path)
    facts = resolve(job, directory)
    table = profile_job(facts, directory / "table.json", minutes=minutes)
    plan = compile_plan(facts, model_of(facts, table))
    assert isinstance(plan, Plan), plan
    calibrating, predicted = directory / "first", directory / "second"
    for out in (calibrating, predicted):
        run_plan(RunRequest(plan=plan, job=job, directory=directory, out=out, steps=steps))
    corrected = calibrate(plan, read_run(plan, calibrating), table, date=datetime.date.today().isoformat()).table
    return {
        "profiled": rows_of("profiled", plan, table, predicted),
        "calibrated": rows_of("calibrated", plan, corrected, predicted),
    }


def _show_shares(found: list[Share]) -> None:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "this host's processor"
    print(f"{name}, torch {torch.__version__}\n")
    print("| body | limit ms | measured ms | share of the limit | tokens/s |")
    print("|---|---|---|---|---|")
    for body, limit, measured in found:
        if measured.seconds is None:
            print(f"| {body} | {limit * 1e3:.2f} | {measured.reason} | | |")
            continue
        rate = measured.point.rows * measured.point.tokens / measured.seconds
        times = f"{limit * 1e3:.2f} | {measured.seconds * 1e3:.2f}"
        print(f"| {body} | {times} | {limit / measured.seconds:.0%} | {rate:.0f} |")


def _show_rows(tables: dict[str, tuple[Row, ...]]) -> None:
    print("\n| what | layout | measured s | profiled | error | calibrated | error |")
    print("|---|---|---|---|---|---|---|")
    for before, after in zip(*tables.values(), strict=True):
        figures = f"{before.predicted:.3f} | {before.error:+.1%} | {after.predicted:.3f} | {after.error:+.1%}"
        print(f"| {before.name} | {before.layout} | {before.measured:.3f} | {figures} |")
    for name, rows in tables.items():
        print(f"\n{name}: median absolute error {median_error([r for r in rows if r.name != STEP]):.1%} per stage")


if __name__ == "__main__":
    sys.exit(main())
