"""A run that is predicted beforehand: profiled, planned, and then run twice, calibrated in between."""

from __future__ import annotations

import datetime
import shutil

from benchmarks.accelerator.jobs import write_run_job
from benchmarks.accelerator.world import World
from benchmarks.host.score import STEP, Row, median_error, rows_of
from meshwright.planner.analysis.correct_table import calibrate, read_run
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.calls import model_of
from meshwright.planner.plan.job import read_job, resolve
from meshwright.planner.plan.plan import Plan, read_plan, write_plan
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.profiling.profiling import profile_job

_MINUTES, _TINY_MINUTES = 1.2, 0.05
"""To profile the job."""
_STEPS = 4
"""Of each run; the first is left out."""


def report(world: World, algorithm: str) -> str:
    """Each stage of the second run and its step beside what the profile predicts for the lengths that it met, and what
    it does once the first run has calibrated it. The plan is written before anything runs; runs that were cut off are
    begun anew, what was profiled is kept."""
    directory = world.directory(algorithm)
    size = {"batch_size": 16, "longest": 32} if world.tiny else {"batch_size": 128, "longest": 512}
    path = directory / "job.yaml"
    if not path.exists():
        write_run_job(directory, world, algorithm, **size)
    job = read_job(path)
    facts = resolve(job, directory)
    table = profile_job(facts, directory / "table.json", minutes=_TINY_MINUTES if world.tiny else _MINUTES)
    planned = directory / "plan.json"
    if not planned.exists():
        found = compile_plan(facts, model_of(facts, table))
        assert isinstance(found, Plan), found
        write_plan(planned, found)
    plan = read_plan(planned)
    first, second = directory / "first", directory / "second"
    for out in (first, second):
        if not (out / "summary.json").exists():
            shutil.rmtree(out, ignore_errors=True)
            run_plan(RunRequest(plan=plan, job=job, directory=directory, out=out, steps=_STEPS))
    corrected = calibrate(plan, read_run(plan, first), table, date=datetime.date.today().isoformat()).table
    told = (
        f"{size['batch_size']} responses of {size['longest']} tokens, planned at {plan.period_seconds:.3f} s a step.\n"
    )
    return told + _as_table(rows_of("profiled", plan, table, second), rows_of("calibrated", plan, corrected, second))


def _as_table(profiled: tuple[Row, ...], calibrated: tuple[Row, ...]) -> str:
    lines = [
        "\n| what | layout | measured s | predicted from the profile | error | once calibrated | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for before, after in zip(profiled, calibrated, strict=True):
        figures = f"{before.predicted:.3f} | {before.error:+.1%} | {after.predicted:.3f} | {after.error:+.1%}"
        lines.append(f"| {before.name} | {before.layout} | {before.measured:.3f} | {figures} |")
    for name, rows in (("profiled", profiled), ("calibrated", calibrated)):
        error = median_error([row for row in rows if row.name != STEP])
        lines.append(f"\n{name}: median absolute error {error:.1%} per stage")
    return "\n".join(lines)
