"""The command that rehearses a plan with real processes that wait instead of computing."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.plan.plan import read_plan
from meshwright.profiles.documents import write_atomically
from meshwright.runtime.api.reports import timeline
from meshwright.runtime.api.runs import rehearse as rehearse_plan
from meshwright.runtime.api.runs import simulate as simulate_plan
from meshwright.runtime.cli import view_time
from meshwright.runtime.cli.call import read_profile_for
from meshwright.runtime.cli.options import (
    AsJson,
    DurationsFrom,
    DurationsOption,
    PlanPath,
    Profile,
    Seed,
    Steps,
    finite,
    timeline_output,
)
from meshwright.runtime.records.outputs import require_outputs

EXAMPLES = "Example: meshwright rehearse plan.json --steps 3"


def rehearse(
    plan: PlanPath,
    steps: Steps = 3,
    speed: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            max=1e6,
            callback=finite,
            help="Wait the predicted seconds times this; by default long enough for waits to dominate.",
        ),
    ] = None,
    ranks_per_process: Annotated[
        int | None,
        typer.Option(min=1, max=2**20, help="Ranks per process; by default as many as leave 16 processes."),
    ] = None,
    durations: DurationsOption = DurationsFrom.PLANNED,
    seed: Seed = 0,
    profile: Profile = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a timeline for Perfetto here, with the simulation beside it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new directory for the trace, which `report` reads.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the plan with real processes and messages that wait instead of computing."""
    require_outputs(timeline_output(trace), inputs=(plan, profile))
    document = read_plan(plan)
    table, sampled = read_profile_for(durations, profile), durations is DurationsFrom.SAMPLED
    rehearsal = rehearse_plan(
        document,
        table,
        steps=steps,
        speed=speed,
        seed=seed,
        ranks_per_process=ranks_per_process,
        sampled=sampled,
        out=out,
    )
    if trace:
        simulation = simulate_plan(document, table, steps=steps, seed=seed, sampled=sampled, traced=True)
        write_atomically(trace, timeline(document, simulation, rehearsal))
    if as_json:
        typer.echo(json.dumps(asdict(replace(rehearsal, spans=())), indent=2))
    else:
        view_time.print_rehearsal(rehearsal, trace)
