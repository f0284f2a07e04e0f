"""The command that writes what starts a plan elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.export import slurm_script, torchrun_scripts
from meshwright.planner.job import read_job, require_job
from meshwright.planner.plan import Plan, read_plan
from meshwright.planner.verify import verify
from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.runtime.options import AsJson, JobPath, PlanPath

EXAMPLES = """Example: meshwright export plan.json job.yaml --to torchrun -o scripts

then on each machine: scripts/node0.sh 10.0.0.1:29500 --steps 20 --out run

meshwright export plan.json job.yaml --to slurm -o scripts && sbatch scripts/run.sbatch --steps 20 --out run
"""


class Launcher(StrEnum):
    TORCHRUN = "torchrun"
    SLURM = "slurm"


_SCRIPTS: Mapping[Launcher, Callable[[Plan, Path, Path], Mapping[str, str]]] = {
    Launcher.TORCHRUN: torchrun_scripts,
    Launcher.SLURM: slurm_script,
}


def export(
    plan: PlanPath,
    job: JobPath,
    to: Annotated[Launcher, typer.Option(help="What starts the ranks.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="A new directory for the scripts.")],
    as_json: AsJson = False,
) -> None:
    """Write the scripts that start a plan on its machines, one per node or one for Slurm.

    The i-th script is the plan's node i. Plan and job are named by their absolute paths, which every machine must have.
    """
    document = read_plan(plan)
    for sentence in verify(document):
        raise BadInput(f"plan: {sentence}")
    require_job(document.facts, read_job(job), job.resolve().parent)
    if output.exists():
        raise BadInput(f"{output} exists already; export overwrites nothing, so name another directory.")
    scripts = _SCRIPTS[to](document, plan.resolve(), job.resolve())
    output.mkdir(parents=True)
    for name, text in scripts.items():
        write_atomically(output / name, text)
        (output / name).chmod(0o755)
    paths = [str(output / name) for name in scripts]
    typer.echo(json.dumps({"scripts": paths}, indent=2) if as_json else "\n".join(paths))
