"""The command that draws a plan and its runs as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.analysis.plan_summary import DEFAULT_NUM_STEPS
from meshwright.planner.job.whatif_settings import size_settings
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.profiles.trace import Run
from meshwright.runtime.api.analyses import whatif
from meshwright.runtime.api.reports import report as draw_report
from meshwright.runtime.api.reports import timeline
from meshwright.runtime.api.run_files import read_run, read_training_curves
from meshwright.runtime.api.runs import simulate
from meshwright.runtime.cli.call import read_profile
from meshwright.runtime.cli.options import NumSteps, PlanPath, Price, Profile, Seed, Steps, parse_sizes, timeline_output
from meshwright.runtime.records.outputs import Output, OutputKind, require_outputs

EXAMPLES = "Example: meshwright report plan.json run -o report.html --sizes 8,16,32 --trace timeline.json"

_KIB = 2**10  # bytes


def report(
    plan: PlanPath,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR...", help="The --out of a `run` or a `rehearse` of this plan; several are compared."
        ),
    ] = None,
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the page here.")] = Path("report.html"),
    sizes: Annotated[
        str | None, typer.Option(help="Also plan the job on these numbers of ranks, as 8,16,32; each takes a search.")
    ] = None,
    steps: Steps = 20,
    seed: Seed = 0,
    price: Price = None,
    per_steps: NumSteps = DEFAULT_NUM_STEPS,
    profile: Profile = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a timeline for Perfetto here, with the simulation and every DIR side by side."),
    ] = None,
) -> None:
    """Draw a plan, its simulation and its runs as one self-contained HTML file."""
    traces = [directory / name for directory in runs or () for name in ("trace.jsonl", "plan.json")]
    require_outputs(Output("-o", output, OutputKind.PAGE), timeline_output(trace), inputs=(plan, profile, *traces))
    document = read_plan(plan)
    settings = size_settings(document.facts.cluster, parse_sizes(sizes)) if sizes is not None else ()
    measured_runs = _read_runs(document, runs or ())
    table = read_profile(profile)
    simulation = simulate(document, table, steps=steps, seed=seed, traced=True)
    planned_sizes = whatif(document, settings, table, replan=True) if settings else None
    training_curves = [read_training_curves(directory) for directory in runs or ()]
    write_atomically(
        output,
        draw_report(
            document,
            simulation,
            runs=measured_runs,
            training_curves=training_curves,
            sizes=planned_sizes,
            table=table,
            price=price,
            num_steps=per_steps,
        ),
    )
    typer.echo(f"{output}: {output.stat().st_size / _KIB:.0f} KiB; open it in a browser")
    if trace:
        write_atomically(trace, timeline(document, simulation, *measured_runs))
        typer.echo(f"{trace}: {1 + len(measured_runs)} runs side by side; open it in Perfetto")


def _read_runs(plan: Plan, directories: Sequence[Path]) -> tuple[Run, ...]:
    """Read the runs in these directories; each is named by its directory."""
    for index, directory in enumerate(directories):
        if directory.resolve() in [other.resolve() for other in directories[:index]]:
            raise BadInput(f"{directory} is given twice; give every run once.")
    return tuple(read_run(directory, plan) for directory in directories)
