"""The command that trains by a plan."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.planner.job.job import Job, read_job
from meshwright.planner.job.model_paths import parse_model_paths
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.profiles.errors import STOPPED, BadInput
from meshwright.profiles.table import Table
from meshwright.runtime.api.measurements import predict_at_observed_lengths
from meshwright.runtime.api.runs import run as train
from meshwright.runtime.cli import view_run
from meshwright.runtime.cli.call import read_profile
from meshwright.runtime.cli.options import AllowModule, JobPath, ModelPaths, PlanPath, finite
from meshwright.runtime.launch.rendezvous import Rendezvous, read_token
from meshwright.runtime.records.lasting_output import lasting_output
from meshwright.runtime.records.restarts import Stopped

EXAMPLES = """Example: meshwright run plan.json examples/tiny/job.yaml --steps 20 --out run

meshwright run plan2.json job.yaml --steps 40 --out run --resume --max-restarts 5

meshwright run plan.json job.yaml --steps 2000 --out run --replan-every 50

meshwright run plan.json job.yaml --model actor=/scratch/models/Qwen2.5-7B --steps 20 --out run
"""

SampleAgain = Annotated[bool, typer.Option(help="With --resume: sample responses in flight again.")]
CheckpointEvery = Annotated[int, typer.Option(min=0, max=10**9, help="Steps between checkpoints; 0 disables this.")]
CheckpointMinutes = Annotated[
    float, typer.Option(min=0, max=10**6, callback=finite, help="Minutes between checkpoints; 0 disables this.")
]
ExportEvery = Annotated[
    int,
    typer.Option(
        min=0,
        max=10**9,
        help="Steps between exports of the trained models as Hugging Face directories; also at the end.",
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(min=0, max=10**6, help="Number of restarts of a failed run from its last checkpoint."),
]
ReplanEvery = Annotated[
    int,
    typer.Option(min=0, max=10**9, help="Steps between searches for a better plan from here; 0 disables this."),
]
SampleEvery = Annotated[
    int,
    typer.Option(min=0, max=10**9, help="Steps between samples of responses as texts; 0 disables this."),
]
PlannedWith = Annotated[
    Path | None,
    typer.Option(
        "--profile", help="The table that the plan was made with, to re-plan and to predict at the observed lengths."
    ),
]
NodeRank = Annotated[
    int | None, typer.Option(min=0, help="Which node of the plan this machine is; by default assigned by address.")
]
TokenFile = Annotated[
    Path | None, typer.Option(help="A secret token that all machines share; by default the one in MESHWRIGHT_TOKEN.")
]


def run(
    plan: PlanPath,
    job: JobPath,
    steps: Annotated[
        int, typer.Option(min=1, max=10**9, help="Total number of steps, including those before a resume.")
    ],
    out: Annotated[Path, typer.Option(help="Directory of metrics, trace and checkpoints.")],
    resume: Annotated[bool, typer.Option(help="Continue from the last checkpoint in --out.")] = False,
    resample: SampleAgain = False,
    checkpoint_every: CheckpointEvery = 0,
    checkpoint_minutes: CheckpointMinutes = 10.0,
    keep: Annotated[
        int, typer.Option(min=1, max=10**9, help="Checkpoints to keep, besides the best by held-out reward.")
    ] = 2,
    export_every: ExportEvery = 0,
    max_restarts: MaxRestarts = 0,
    replan_every: ReplanEvery = 0,
    sample_every: SampleEvery = 10,
    profile: PlannedWith = None,
    model: ModelPaths = None,
    allow_module: AllowModule = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines; call run on each.")] = 1,
    rendezvous: Annotated[
        str, typer.Option(help="host:port of the rendezvous: one of the machines, and a free port there.")
    ] = "127.0.0.1:0",
    node_rank: NodeRank = None,
    token_file: TokenFile = None,
) -> None:
    """Train by a plan, and compare measured with predicted times.

    On SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C it saves a checkpoint after the current step and exits with code 75; continue
    with --resume. A second SIGTERM, SIGHUP or Ctrl-C stops it at once.

    With --max-restarts a failed run restarts on the remaining nodes. With --replan-every it switches to another plan if
    that is faster at the observed lengths and speeds and the remaining steps repay the switch.

    Models may be elsewhere than where the job was planned: the plan is held to their shapes, the tokenizer, the chat
    template and the end tokens. With --model a model is read from another directory than the job's, and so are the
    other models and the tokenizer that the job has in the same directory.

    Under torchrun it joins as the rank that torchrun has started, and takes neither --nodes nor --rendezvous.
    """
    with lasting_output():
        _train_and_show(
            read_plan(plan),
            read_job(job),
            out,
            steps=steps,
            directory=job.parent,
            checkpoint_every=checkpoint_every,
            checkpoint_minutes=checkpoint_minutes,
            keep=keep,
            export_every=export_every,
            resume=resume,
            resample=resample,
            max_restarts=max_restarts,
            replan_every=replan_every,
            sample_every=sample_every,
            table=read_profile(profile),
            models=parse_model_paths(model or ()),
            allow_modules=allow_module or (),
            rendezvous=Rendezvous.parse(rendezvous, nodes, node_rank, read_token(token_file)),
        )


def _train_and_show(
    plan: Plan, job: Job, out: Path, *, steps: int, export_every: int, table: Table | None, **options: Any
) -> None:
    summary = train(plan, job, out, steps=steps, export_every=export_every, table=table, **options)
    if isinstance(summary, Stopped):
        view_run.print_run_stopped(summary.done, steps, summary.saved, out)
        raise typer.Exit(STOPPED)
    if summary is not None:
        view_run.print_run_summary(summary, out, partial(_at_observed_lengths, plan, out, table))
        if export_every:
            typer.echo(f"the trained models are in {out / 'models'} as Hugging Face directories")
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        typer.echo(f"this machine is done; the summary is in {out}, and on the output of the machine of rank 0")


def _at_observed_lengths(plan: Plan, out: Path, table: Table | None) -> dict[str, float]:
    """Return the predicted seconds at the lengths of the run; none if the plan was replaced during the run, or if its
    costs are not known here."""
    try:
        return predict_at_observed_lengths(plan, out, table)
    except BadInput:
        return {}
