"""A run that is predicted beforehand: profiled, planned, and then run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from benchmarks.accelerator.jobs import write_run_job
from benchmarks.accelerator.long_tail import REWARD_MODULE, write_long_tail_job
from benchmarks.accelerator.world import World, tell
from benchmarks.host.score import STEP, Row, median_error, rows_of
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan, write_plan
from meshwright.profiles.table import Table
from meshwright.profiles.trace import read_spans
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.profiling.profiling import num_missing, profile_job

_TINY_MINUTES = 0.05


class _Size(NamedTuple):
    """Of a run; its first step is left out."""

    minutes: float
    """To profile the job."""
    steps: int


_SIZES = {"ppo": _Size(0.8, 4), "grpo": _Size(0.6, 3)}


def report(world: World, algorithm: str) -> str:
    """Each stage of the run and its step beside what the profile and what equations alone predict for the lengths that
    it met.

    The plan is written before anything runs. What was profiled is kept where the part is cut off. ppo has four copies
    of a small model, all weights trained, and responses of one length; grpo an adapter of a large one, and lengths with
    a long tail.
    """
    directory, size = world.directory(algorithm), _SIZES[algorithm]
    with world.room(algorithm) as room:
        asked = _write_job(world, algorithm, directory, room)
        tell(f"weights and job are written: {asked}")
        job = read_job(directory / "job.yaml")
        facts = resolve(job, directory)
        minutes = _TINY_MINUTES if world.tiny else size.minutes
        table = profile_job(facts, directory / "table.json", minutes=minutes)
        tell(f"profiled: {len(table.measurements)} bodies, {num_missing(facts, table)} missing")
        plan, out = compile_plan(facts, cost_model_of(facts, table)), room / "run"
        assert isinstance(plan, Plan), plan
        write_plan(directory / "plan.json", plan)
        tell(f"planned at {plan.period_seconds:.3f} s a step")
        run_plan(
            RunRequest(
                plan=plan,
                job=job,
                directory=directory,
                out=out,
                steps=size.steps,
                allowed_modules=(REWARD_MODULE,) if job.rewards else (),
            )
        )
        tell("the run has ended, and its last checkpoint is written")
        for name in ("trace.jsonl", "metrics.jsonl"):
            shutil.copy(out / name, directory)
        return f"{asked}, planned at {plan.period_seconds:.3f} s a step.\n{_predicted(plan, table, out)}\n{_met(out)}"


def _write_job(world: World, algorithm: str, directory: Path, room: Path) -> str:
    """What the job asks, in words."""
    if algorithm == "grpo":
        return write_long_tail_job(directory, world, room / "weights")
    size = {"batch_size": 16, "longest": 32} if world.tiny else {"batch_size": 128, "longest": 512}
    write_run_job(directory, world, algorithm, **size)
    return f"{size['batch_size']} responses of {size['longest']} tokens"


def _predicted(plan: Plan, table: Table, run: Path) -> str:
    """A table of Markdown."""
    profiled, equations = (rows_of(name, plan, costs, run) for name, costs in (("profile", table), ("equations", None)))
    lines = [
        "\n| what | layout | measured s | predicted from the profile | error | by equations alone | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for one, other in zip(profiled, equations, strict=True):
        figures = f"{one.predicted:.3f} | {one.error:+.1%} | {other.predicted:.3f} | {other.error:+.1%}"
        lines.append(f"| {one.name} | {one.layout} | {one.measured:.3f} | {figures} |")
    return "\n".join([*lines, *_errors(profiled), *_errors(equations)])


def _errors(rows: tuple[Row, ...]) -> list[str]:
    error = median_error([row for row in rows if row.name != STEP])
    return [f"\n{rows[0].run}: median absolute error {error:.1%} per stage"]


def _met(run: Path) -> str:
    """What the steps of a run have drawn, and their seconds, in which no checkpoint is."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    longest = [0.0] * len(steps)
    for span in read_spans(run / "trace.jsonl"):
        longest[span.step] = max(longest[span.step], span.facts.get("num_longest_tokens", 0.0))
    lines = [
        "\n| step | s, without checkpoints | response tokens, mean | longest | cut | tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for step, most in zip(steps, longest, strict=True):
        figures = f"{step['seconds']:.2f} | {step['response_tokens']:.0f} | {most:.0f}"
        lines.append(
            f"| {step['step']} | {figures} | {step['truncated_fraction']:.1%} | {step['tokens_per_second']:.0f} |"
        )
    return "\n".join(lines)
