"""The part of `plan` that searches what another trainer can say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import typer

from meshwright.planner.plan.job import read_job, resolve
from meshwright.planner.plan.pin_files import read_pins
from meshwright.planner.plan.plan import write_plan
from meshwright.planner.search.refusal import NoPlan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.documents import canonical_json
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import StageGraph
from meshwright.runtime.api.elsewhere import plan_for
from meshwright.runtime.commands import show
from meshwright.runtime.commands.asked_to_stop import STOPPED, asked_to_stop
from meshwright.runtime.commands.given_table import table_in
from meshwright.runtime.commands.planning_memory import within_memory
from meshwright.runtime.commands.progress_bars import progress_bars


def require_alone(trainer: str, **others: object) -> None:
    """Raises BadInput for the first option that says how to search and that `--for` does itself."""
    for option, value in others.items():
        if value:
            raise BadInput(
                f"--{option} with --for {trainer}: the trainer fixes what is searched; leave one of them out."
            )


class Kept(NamedTuple):
    """What a plan has to keep: pins as they were given, a file of them, and choices that are forbidden."""

    pin: Sequence[str]
    pins: Path | None
    forbid: Sequence[str]

    def texts(self, graph: StageGraph) -> tuple[str, ...]:
        """All pins. Raises BadInput for a file that holds none."""
        return (*self.pin, *(read_pins(self.pins, graph) if self.pins else ()))


def plan_for_trainer(
    job: Path, output: Path, trainer: str, kept: Kept, *, profile: Path | None, limits: Limits, as_json: bool
) -> None:
    """Writes and shows the best plan that the trainer can say and that keeps the pins. Raises typer.Exit where none
    fits, and when stopped."""
    document = read_job(job)
    facts = resolve(document, job.parent)
    with within_memory(), asked_to_stop() as stop, progress_bars() as progress:
        found = plan_for(
            trainer,
            facts,
            table_in(profile),
            pins=kept.texts(facts.graph),
            forbid=kept.forbid,
            limits=replace(limits, stop=stop),
            job=document,
            progress=lambda done, total: progress(f"searching what {trainer} can say", done, total),
        )
    if isinstance(found, NoPlan):
        typer.echo(json.dumps(asdict(found), indent=2)) if as_json else show.no_plan(found)
        raise typer.Exit(3)
    write_plan(output, found)
    if as_json:
        typer.echo(canonical_json(found), nl=False)
    else:
        show.plan(found, output)
    if stop.is_set():
        show.search_stopped(found, output)
        raise typer.Exit(STOPPED)
