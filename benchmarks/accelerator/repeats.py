"""One run three times over: what is learned and the weights that are left have the same bits, or not."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.accelerator.jobs import write_run_job
from benchmarks.accelerator.world import World
from benchmarks.survival.kills import learned
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan

REPEATS, STEPS = 3, 2
_RATE = 1e-4
"""By which Adam moves a weight in an update: more than bf16 drops."""


def report(world: World) -> str:
    """In one sentence."""
    found = list(_digests(world))
    alike = "the same bits" if len(set(found)) == 1 else f"DIFFERENT BITS, {len(set(found))} kinds of them"
    return (
        f"{REPEATS} runs of {STEPS} PPO steps: records and exported weights have {alike} ("
        + ", ".join(digest[:12] for digest in found)
        + ")."
    )


def _digests(world: World) -> Iterator[str]:
    directory = world.directory("repeats")
    size = {"batch_size": 16, "longest": 24} if world.tiny else {"batch_size": 64, "longest": 256}
    job = read_job(write_run_job(directory, world, "ppo", **size, rate=_RATE))
    facts = resolve(job, directory)
    plan = compile_plan(facts, cost_model_of(facts))
    assert isinstance(plan, Plan), plan
    for repeat in range(REPEATS):
        out = directory / str(repeat)
        shutil.rmtree(out, ignore_errors=True)
        run_plan(RunRequest(plan=plan, job=job, directory=directory, out=out, steps=STEPS, export_every=STEPS))
        yield digest_of(out)
        shutil.rmtree(out)  # of which checkpoints take tens of gigabytes


def digest_of(run: Path) -> str:
    """Of what a run has recorded of each step, without what the clock says, and of the weights that it exported."""
    weights = sorted(path for path in run.rglob("model*.safetensors") if "checkpoint" not in str(path))
    assert weights, f"{run} has exported nothing"
    found = hashlib.sha256(repr(learned(run)).encode())
    for path in weights:
        found.update(path.read_bytes())
    return found.hexdigest()
