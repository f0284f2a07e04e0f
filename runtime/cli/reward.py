"""The command that tries the rewards of a job on a few made-up responses, before anything starts."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from meshwright.planner.job.job import read_job
from meshwright.profiles.errors import RunFailed
from meshwright.runtime.api.measurements import try_rewards
from meshwright.runtime.cli import view_run
from meshwright.runtime.cli.options import AllowModule, AsJson, JobPath

EXAMPLES = "Example: meshwright reward try job.yaml --rows 10 --allow-module brevity"


class RewardAction(StrEnum):
    """What to do with the rewards of a job."""

    TRY = "try"


def reward(
    action: Annotated[RewardAction, typer.Argument(metavar="try", help="Score made-up responses; nothing is trained.")],
    job: JobPath,
    *,
    rows: Annotated[
        int, typer.Option(min=1, max=1000, help="Prompts of the job's data, each with its reference answer and itself.")
    ] = 10,
    allow_module: AllowModule = None,
    as_json: AsJson = False,
) -> None:
    """Try the rewards of a job: score the reference answers of a few prompts, and the prompts themselves.

    Exit code 4 if a call fails.
    """
    del action  # there is one
    trial = try_rewards(read_job(job), job.parent, num_prompts=rows, allow_modules=allow_module or ())
    if as_json:
        typer.echo(json.dumps(asdict(trial), indent=2))
    else:
        view_run.print_reward_trial(trial)
    if trial.num_failed:
        raise typer.Exit(RunFailed.exit_code)
