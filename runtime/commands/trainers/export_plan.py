"""The part of `export` that writes a plan as the configuration of another trainer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from meshwright.planner.plan.job import read_job
from meshwright.planner.plan.plan import read_plan
from meshwright.planner.search.refusal import NoPlan
from meshwright.runtime.api.elsewhere import export_plan
from meshwright.runtime.commands import show
from meshwright.runtime.commands.given_table import read_profile
from meshwright.runtime.commands.progress_bars import progress_bars
from meshwright.runtime.commands.trainers import show_trainers


def export_to_trainer(
    source: Path, job: Path | None, output: Path, *, to: str, profile: Path | None, as_json: bool
) -> None:
    """Write the configuration and show what is in it. Raises typer.Exit if no plan fits."""
    plan, document = read_plan(source), read_job(job) if job else None
    if job and document:
        as_generated = document.model_copy(update={"engine": plan.facts.engine})  # it will be the trainer's
        plan.require_made_for(as_generated, job.parent)
    with progress_bars() as progress:
        exported = export_plan(
            plan,
            output,
            to=to,
            job=document,
            directory=job.parent if job else Path(),
            table=read_profile(profile),
            progress=lambda done, total: progress(f"searching within the settings of {to}", done, total),
        )
    if isinstance(exported, NoPlan):
        typer.echo(json.dumps(asdict(exported), indent=2)) if as_json else show.print_no_plan(exported)
        raise typer.Exit(3)
    if as_json:
        typer.echo(exported.to_json())
    else:
        show_trainers.print_export(exported, output)
