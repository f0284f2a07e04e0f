"""The command that writes what users take away: a run's models, or a plan for other launchers and trainers."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.export.trainers import TRAINERS
from meshwright.profiles.errors import BadInput
from meshwright.runtime.api.running import export_models, export_scripts
from meshwright.runtime.commands.options import AsJson, Profile
from meshwright.runtime.commands.trainers.export_plan import to_trainer

EXAMPLES = """Example: meshwright export run --to hf -o models

writes models/actor and models/critic. Of a plan: meshwright export plan.json job.yaml --to torchrun -o scripts

then on each machine: scripts/node0.sh 10.0.0.1:29500 --steps 20 --out run

meshwright export plan.json job.yaml --to slurm -o scripts && sbatch scripts/run.sbatch --steps 20 --out run

meshwright export plan.json job.yaml --to verl -o for-verl
"""


class Target(StrEnum):
    """What `--to` may ask for."""

    HF = "hf"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    VERL = "verl"
    NEMO_RL = "nemo-rl"
    OPENRLHF = "openrlhf"
    SLIME = "slime"


def export(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN|PLAN.json", help="For hf the --out of a run, else a plan."),
    ],
    job: Annotated[
        Path | None,
        typer.Argument(metavar="[JOB.yaml]", help="The plan's job; not given for hf, may be left out for trainers."),
    ] = None,
    *,
    to: Annotated[
        Target,
        typer.Option(help="Models of a run, what starts the ranks of a plan, or another trainer's configuration."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="A new directory for what is written.")],
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that write hf, each an equal part of a model; by default 1."),
    ] = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Write the models that a run trained, the scripts that start a plan, or its configuration for another trainer.

    hf: the trained models of the run's newest checkpoint as Hugging Face directories, with tokenizer and chat template.

    torchrun, slurm: scripts, one per node or one for Slurm. The i-th script is the plan's node i. Plan and job are
    named by their absolute paths, which every machine must have.

    verl, nemo-rl, openrlhf, slime: a command and its configuration, each key with the field of the plan that it comes
    from, and what the trainer cannot say. It then gets the best plan that it can say.
    """
    if to.value in TRAINERS and ranks is None:
        to_trainer(source, job, output, to=to.value, profile=profile, as_json=as_json)
        return
    if to is Target.HF:
        paths = {"models": _models(source, job, output, ranks or 1)}
    elif ranks is not None:
        raise BadInput(f"--ranks {ranks}: it is of hf alone; with {to.value} ranks are those of the plan.")
    else:
        paths = {"scripts": _scripts(source, job, to, output)}
    typer.echo(json.dumps(paths, indent=2) if as_json else "\n".join(*paths.values()))


def _models(run: Path, job: Path | None, output: Path, num_ranks: int) -> list[str]:
    """The directories that were written."""
    if job is not None:
        raise BadInput(f"{job}: a run knows its job; give the directory of the run alone, as export RUN --to hf.")
    if not run.is_dir():
        raise BadInput(f"{run} is not the directory of a run; --to hf writes the models that a run trained.")
    return [str(path) for path in export_models(run, output, num_ranks=num_ranks)]


def _scripts(plan: Path, job: Path | None, to: Target, output: Path) -> list[str]:
    """The scripts that were written."""
    if job is None:
        raise BadInput(f"--to {to.value} needs the job too: export plan.json job.yaml --to {to.value}.")
    return [str(path) for path in export_scripts(plan, job, output, to=to.value)]
