"""The command that writes a run's models, or a plan for other launchers and trainers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.job.job import read_job
from meshwright.planner.job.model_paths import parse_model_paths
from meshwright.planner.plan.plan import read_plan
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.trainers.registry import TRAINERS
from meshwright.profiles.errors import BadInput, Infeasible
from meshwright.runtime.api.runs import export_models, export_scripts
from meshwright.runtime.api.trainers import export_plan
from meshwright.runtime.cli import view_plan, view_trainers
from meshwright.runtime.cli.call import progress_bars, read_profile
from meshwright.runtime.cli.options import AsJson, ModelPaths, Profile


def export_to_trainer(
    source: Path,
    job: Path | None,
    output: Path,
    *,
    to: str,
    models: Mapping[str, Path],
    profile: Path | None,
    as_json: bool,
) -> None:
    """Write the configuration of a trainer for a plan, and print a summary. Raises typer.Exit if no plan fits."""
    plan, document = read_plan(source), read_job(job) if job else None
    if job and document:
        as_generated = document.model_copy(update={"engine": plan.facts.engine})  # --for plans by the trainer's engine
        plan.require_made_for(as_generated, job.parent)
    with progress_bars() as progress:
        exported = export_plan(
            plan,
            output,
            to=to,
            job=document,
            directory=job.parent if job else Path(),
            models=models,
            table=read_profile(profile),
            progress=lambda done, total: progress(f"searching within the settings of {to}", done, total),
        )
    if isinstance(exported, NoPlan):
        typer.echo(json.dumps(asdict(exported), indent=2)) if as_json else view_plan.print_no_plan(exported)
        raise typer.Exit(Infeasible.exit_code)
    if as_json:
        typer.echo(exported.to_json())
    else:
        view_trainers.print_export(exported, output)


EXAMPLES = """Example: meshwright export run --to hf -o models

which writes models/actor and models/critic.

meshwright export plan.json job.yaml --to torchrun -o scripts

and on each machine: scripts/node0.sh 10.0.0.1:29500 --steps 20 --out run

meshwright export plan.json job.yaml --to slurm -o scripts && scripts/run.sbatch --steps 20 --out run

meshwright export plan.json job.yaml --to k8s -o scripts && scripts/jobset.sh --steps 20 --out run | kubectl apply -f -

meshwright export plan.json job.yaml --to ray -o scripts

and then: ray job submit --working-dir . -- python scripts/ray_job.py --steps 20 --out /shared/run

meshwright export plan.json job.yaml --to verl -o for-verl
"""


class Target(StrEnum):
    """The values of `--to`."""

    HF = "hf"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    K8S = "k8s"
    RAY = "ray"
    VERL = "verl"
    NEMO_RL = "nemo-rl"
    OPENRLHF = "openrlhf"
    SLIME = "slime"
    SKYRL = "skyrl"
    AREAL = "areal"


def export(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN|PLAN.json", help="The --out of a run for hf, a plan for all others."),
    ],
    job: Annotated[
        Path | None,
        typer.Argument(metavar="[JOB.yaml]", help="The job of the plan; not for hf, optional for trainers."),
    ] = None,
    *,
    to: Annotated[
        Target,
        typer.Option(help="Trained models, launch scripts, or the configuration of another trainer."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="A new directory for the output.")],
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes that write hf, each an equal part of a model; by default 1."),
    ] = None,
    model: ModelPaths = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Write the trained models of a run, launch scripts of a plan, or its configuration for another trainer.

    hf: the models of the run's newest checkpoint as Hugging Face directories, with tokenizer and chat template.

    torchrun, slurm, k8s, ray: one script per node, a script that submits itself, one that prints a JobSet for kubectl,
    and one for `ray job submit`. Plan, job, models, queue, image and the like are variables at the head of a script.

    verl, nemo-rl, openrlhf, slime, skyrl, areal: a command and its configuration, with the source of each key, and the
    choices of the plan that the trainer has no setting for. If there are any, the best plan within its settings is
    written instead.
    """
    models = parse_model_paths(model or ())
    if to.value in TRAINERS and ranks is None:
        export_to_trainer(source, job, output, to=to.value, models=models, profile=profile, as_json=as_json)
        return
    if to is Target.HF:
        paths = {"models": _models(source, job, output, ranks or 1, models)}
    elif ranks is not None:
        raise BadInput(f"--ranks {ranks} is for hf alone; with {to.value} the ranks are those of the plan.")
    else:
        paths = {"scripts": _scripts(source, job, to, output, models)}
    typer.echo(json.dumps(paths, indent=2) if as_json else "\n".join(*paths.values()))


def _models(run: Path, job: Path | None, output: Path, num_ranks: int, models: Mapping[str, Path]) -> list[str]:
    """Write the models and return their directories."""
    if job is not None:
        raise BadInput(f"{job}: a run knows its job; give the directory of the run alone, as export RUN --to hf.")
    if not run.is_dir():
        raise BadInput(f"{run} is not the directory of a run; give the --out of `meshwright run`.")
    return [str(path) for path in export_models(run, output, num_ranks=num_ranks, models=models)]


def _scripts(plan: Path, job: Path | None, to: Target, output: Path, models: Mapping[str, Path]) -> list[str]:
    """Write the scripts and return their paths."""
    if job is None:
        raise BadInput(f"--to {to.value} needs the job too: export plan.json job.yaml --to {to.value}.")
    return [str(path) for path in export_scripts(plan, job, output, to=to.value, models=models)]
