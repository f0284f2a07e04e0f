"""The command that answers what-if questions about a plan, and plans a job under many settings."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.analysis.plan_summary import DEFAULT_NUM_STEPS
from meshwright.planner.analysis.sweep import read_sweep, sweep_json
from meshwright.planner.job.whatif_settings import parse_settings, parse_sweep
from meshwright.planner.plan.plan import read_plan
from meshwright.planner.report.whatif_pages import swept_field
from meshwright.planner.solver.result import Limits
from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import STOPPED, BadInput, Infeasible
from meshwright.runtime.api.analyses import whatif as predict
from meshwright.runtime.api.reports import plot as draw_plot
from meshwright.runtime.api.sweeps import sweep
from meshwright.runtime.cli import view_search, view_time
from meshwright.runtime.cli.call import limit_memory, progress_bars, read_profile, stop_on_signal
from meshwright.runtime.cli.options import AsJson, Gap, NumSteps, Price, Profile, finite
from meshwright.runtime.explorer.source import read_source
from meshwright.runtime.records.outputs import Output, OutputKind, require_outputs

EXAMPLES = """Example: meshwright whatif plan.json --set cluster.nodes=8 --set workload.response.p99=2048,4096

meshwright whatif job.yaml --sweep cluster.nodes=1:8 --sweep staleness=0:2 --price 2.5 --plot sweep.html

meshwright whatif job.yaml --sweep cluster.nodes=8:64:8 --sweep workload.response.scale=1,2 --time-limit 600 --json
"""


def whatif(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN.json|JOB.yaml", help="A plan; with --sweep a job, or a plan with its pins.")
    ],
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the job, as field=value or field=value,value,...")
    ] = None,
    *,
    ranges: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            help="Plan several values of a field, as field=first:last, field=first:last:step or field=value,value; all "
            "combinations of several fields.",
        ),
    ] = None,
    replan: Annotated[
        bool, typer.Option(help="Search for the best plan of each question, instead of costing this plan.")
    ] = False,
    gap: Gap = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=1e6,
            callback=finite,
            help="Time limit of a sweep in seconds; points that are not finished by then are left out.",
        ),
    ] = None,
    profile: Profile = None,
    price: Price = None,
    per_steps: NumSteps = DEFAULT_NUM_STEPS,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Write an HTML plot here: step time and tokens/s against the first field with several values or, of a "
            "sweep, step time against GPUs and against cost."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Write the points of a sweep here as they are finished; if the file has some of them, only the others "
            "are planned.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict a plan with another cluster, workload, precision or other models.

    With --sweep, plan every point of a grid and mark the Pareto front of step time, GPUs and cost. Ctrl-C then keeps
    the points that are finished, and with -o the same command continues from them.
    """
    began = time.monotonic()
    if bool(setting) == bool(ranges):
        raise BadInput(
            "whatif needs either --set, which predicts a plan with other values, or --sweep, which plans each of them "
            "(a value that stays is --sweep field=value); give one of the two."
        )
    require_outputs(
        Output("--plot", plot, OutputKind.PAGE) if plot else None,
        Output("-o", output, OutputKind.SWEEP) if output else None,
        inputs=(plan, profile),
    )
    if ranges:
        limits = Limits(gap=gap) if time_limit is None else Limits.for_seconds(time_limit, gap=gap, began=began)
        _plan_sweep(
            plan,
            ranges,
            limits=limits,
            profile=profile,
            price=price,
            num_steps=per_steps,
            plot=plot,
            output=output,
            as_json=as_json,
        )
        return
    if time_limit is not None or per_steps != DEFAULT_NUM_STEPS or output:
        raise BadInput("--time-limit, --per-steps and -o are options of a sweep; leave them out, or give --sweep.")
    document = read_plan(plan)
    settings = parse_settings(setting or ())
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


def _plan_sweep(
    path: Path,
    ranges: list[str],
    *,
    limits: Limits,
    profile: Path | None,
    price: float | None,
    num_steps: int,
    plot: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Plan, write, print and draw a sweep.

    Exits with the code of no plan where no point has one, and with that of a stop where Ctrl-C ended it.
    """
    settings = parse_sweep(ranges)
    source = read_source(path, profile=profile, gap=limits.gap)
    finished = read_sweep(output) if output and output.exists() and output.stat().st_size else None
    with limit_memory(), stop_on_signal() as stop, progress_bars() as progress:
        found = sweep(
            source.facts,
            settings,
            source.table,
            pins=source.pins,
            price=price,
            num_steps=num_steps,
            limits=replace(limits, stop=stop),
            job=source.job,
            progress=progress,
            finished=finished,
            on_points=(lambda found: write_atomically(output, sweep_json(found))) if output else None,
        )
    is_planned = any(point.plan for point in found.points)
    if plot and is_planned:
        write_atomically(plot, draw_plot(found))
    if as_json:
        typer.echo(sweep_json(found), nl=False)
    else:
        view_search.print_sweep(found, output)
        if plot:
            typer.echo(f"plot in {plot}; open it in a browser" if is_planned else "no point has a plan to draw.")
    if stop.is_set():
        raise typer.Exit(STOPPED)
    if not is_planned:
        raise typer.Exit(Infeasible.exit_code)
