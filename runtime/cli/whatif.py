"""The command that answers what-if questions about a plan."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.job.whatif_settings import parse_settings
from meshwright.planner.plan.plan import read_plan
from meshwright.planner.report.whatif_pages import swept_field
from meshwright.planner.solver.result import Limits
from meshwright.profiles.documents import write_atomically
from meshwright.runtime.api.analyses import whatif as predict
from meshwright.runtime.api.reports import plot as draw_plot
from meshwright.runtime.cli import view_time
from meshwright.runtime.cli.call import limit_memory, read_profile
from meshwright.runtime.cli.options import AsJson, Gap, PlanPath, Price, Profile
from meshwright.runtime.records.outputs import Output, OutputKind, require_outputs

EXAMPLES = "Example: meshwright whatif plan.json --set cluster.nodes=8 --set workload.response.p99=2048,4096"


def whatif(
    plan: PlanPath,
    setting: Annotated[
        list[str], typer.Option("--set", help="A field of the job, as field=value or field=value,value,...")
    ],
    replan: Annotated[
        bool, typer.Option(help="Search for the best plan of each question, instead of costing this plan.")
    ] = False,
    gap: Gap = None,
    profile: Profile = None,
    price: Price = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Write an HTML plot of step time and tokens/s against the first field with several values here."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict a plan with another cluster, workload, precision or other models."""
    require_outputs(Output("--plot", plot, OutputKind.PAGE) if plot else None, inputs=(plan, profile))
    document = read_plan(plan)
    settings = parse_settings(setting)
    if plot:
        swept_field(settings)  # refuses settings that cannot be drawn before anything is costed
    table = read_profile(profile)
    with limit_memory():
        prediction = predict(document, settings, table, replan=replan, price=price, limits=Limits(gap=gap))
    if plot:
        write_atomically(plot, draw_plot(prediction))
    if as_json:
        typer.echo(json.dumps(asdict(prediction), indent=2))
    else:
        view_time.print_whatif(prediction, plot)
