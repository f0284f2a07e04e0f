"""The command that finds how many devices a job needs, and plans it on several sizes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.job.job import read_job
from meshwright.planner.solver.result import Limits
from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import Infeasible
from meshwright.runtime.api.analyses import fit as fit_job
from meshwright.runtime.api.files import resolve
from meshwright.runtime.api.planning import with_observed_lengths
from meshwright.runtime.api.reports import fit_plot
from meshwright.runtime.cli import view_search
from meshwright.runtime.cli.call import FromTrace, TraceFields, limit_memory, progress_bars, read_lengths, read_profile
from meshwright.runtime.cli.options import AsJson, Gap, JobPath, Price, Profile, parse_sizes
from meshwright.runtime.records.outputs import Output, OutputKind, require_outputs

EXAMPLES = """Example: meshwright fit job.yaml

meshwright fit job.yaml --sizes 8,16,32,64 --price 2.5 --plot sizes.html

meshwright fit job.yaml --from-trace run
"""


def fit(
    job: JobPath,
    *,
    sizes: Annotated[
        str | None,
        typer.Option(help="Numbers of devices to plan on, as 8,16,32; by default the smallest and its doublings."),
    ] = None,
    price: Price = None,
    gap: Gap = None,
    profile: Profile = None,
    from_trace: FromTrace = None,
    trace_field: TraceFields = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write an HTML plot of step time against the number of devices here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the smallest number of devices for a job, and the best plan on each of several sizes."""
    require_outputs(Output("--plot", plot, OutputKind.PAGE) if plot else None, inputs=(job, profile))
    table, num_ranks, observed = read_profile(profile), parse_sizes(sizes), read_lengths(from_trace, trace_field)
    facts = resolve(read_job(job), job.parent, table)
    facts = with_observed_lengths(facts, observed) if observed else facts
    with limit_memory(), progress_bars() as progress:
        result = fit_job(facts, table, sizes=num_ranks, price=price, limits=Limits(gap=gap), progress=progress)
    if plot and result.answers:
        write_atomically(plot, fit_plot(result))
    if as_json:
        typer.echo(json.dumps(asdict(result), indent=2))
    else:
        view_search.print_fit(result, plot)
    if result.min_ranks is None:
        raise typer.Exit(Infeasible.exit_code)
