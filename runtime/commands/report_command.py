"""The command that draws a plan and its runs as one HTML file: reads documents, calls the planner, writes the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.analysis.compare import step_ends
from meshwright.planner.analysis.whatif import whatif
from meshwright.planner.plan.cluster_sizes import size_settings
from meshwright.planner.plan.plan import Plan, read_plan, write_plan
from meshwright.planner.plan.settings import Setting
from meshwright.planner.plan.verify import require_valid
from meshwright.planner.report.contents import Contents
from meshwright.planner.report.report import report as drawn
from meshwright.planner.report.sweep import swept_field
from meshwright.planner.simulation.sampled import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.profiles.chrome_trace import chrome_trace
from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.profiles.trace import Run, Span, read_spans, write_spans
from meshwright.runtime.commands.given_table import remodel, table_in
from meshwright.runtime.commands.options import PlanPath, Profile, Seed, Steps
from meshwright.runtime.commands.sizes_option import parse_sizes
from meshwright.runtime.records.outputs import Output, OutputKind, require_directory, require_outputs

EXAMPLE = "Example: meshwright report plan.json run -o report.html --sizes 8,16,32 --trace timeline.json"

_KIB = 2**10


def report(
    plan: PlanPath,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR...", help="The --out of a `run` or a `rehearse` of this plan; several are compared."
        ),
    ] = None,
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the page goes.")] = Path("report.html"),
    sizes: Annotated[
        str | None, typer.Option(help="Numbers of ranks to plan the job on as well, as 8,16,32; each takes a search.")
    ] = None,
    steps: Steps = 20,
    seed: Seed = 0,
    profile: Profile = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Where one timeline for Perfetto goes, the simulation and every DIR side by side."),
    ] = None,
) -> None:
    """Draw a plan, its simulation and its runs as one HTML file that needs no network."""
    traces = [directory / name for directory in runs or () for name in ("trace.jsonl", "plan.json")]
    timeline = Output("--trace", trace, OutputKind.TIMELINE) if trace else None
    require_outputs(Output("-o", output, OutputKind.PAGE), timeline, inputs=(plan, profile, *traces))
    document = read_plan(plan)
    require_valid(document)
    asked = size_settings(document.facts.cluster, parse_sizes(sizes)) if sizes is not None else ()
    found = _read_runs(document, runs or ())
    model_of = remodel(table_in(profile))
    simulation = simulate(document, Sampled(document, model_of, seed=seed), steps=steps, traced=True)
    planned = whatif(document, asked, model_of, replan=True) if asked else None
    page = drawn(Contents(plan=document, simulation=simulation, runs=found, sizes=planned))
    write_atomically(output, page)
    typer.echo(f"{output}: {output.stat().st_size / _KIB:.0f} KiB; open it in a browser")
    if trace:
        pools = {pool.name: pool.ranks for pool in document.pools}
        write_atomically(trace, chrome_trace([Run(spans=simulation.spans, pools=pools), *found]))
        typer.echo(f"{trace}: {1 + len(found)} runs side by side; open it in Perfetto")


def require_new(directory: Path) -> None:
    """Raises BadInput for a directory that holds something already, and for one that cannot be made."""
    require_directory("--out", directory)
    if directory.exists() and any(directory.iterdir()):
        what = "the trace of a run" if (directory / "trace.jsonl").exists() else "files"
        raise BadInput(f"--out {directory} holds {what}, and nothing is overwritten; name a new directory.")


def write_run(plan: Plan, spans: Sequence[Span], directory: Path) -> None:
    """Leaves the plan and the trace in a directory, as a run does."""
    write_plan(directory / "plan.json", plan)
    write_spans(directory / "trace.jsonl", spans)


def require_plot(path: Path, settings: Sequence[Setting]) -> None:
    """Raises BadInput before any costing for a plot that could not be drawn after it."""
    if path.suffix != ".html":
        raise BadInput(f"--plot {path} is not an HTML file; name one that ends in .html.")
    swept_field(settings)


def _read_runs(plan: Plan, directories: Sequence[Path]) -> tuple[Run, ...]:
    """The runs in these directories, named by them."""
    for place, directory in enumerate(directories):
        if directory.resolve() in [other.resolve() for other in directories[:place]]:
            raise BadInput(f"{directory} is given twice; give every run once.")
    return tuple(_read_run(plan, directory) for directory in directories)


def _read_run(plan: Plan, directory: Path) -> Run:
    """Raises BadInput for a directory without a trace, a trace without a whole step, and a run of another plan."""
    path = directory / "trace.jsonl"
    if not path.exists():
        what = "holds no trace.jsonl" if directory.is_dir() else "is not a directory"
        raise BadInput(f"{directory} {what}; give the --out of `meshwright run` or of `meshwright rehearse`.")
    if read_plan(directory / "plan.json") != plan:
        raise BadInput(f"{directory} is a run of another plan; report the plan.json that it holds.")
    spans = read_spans(path)
    if not step_ends(spans):
        raise BadInput(f"trace {path} has no step that was trained; let the run finish one.")
    return Run(spans=spans, pools={pool.name: pool.ranks for pool in plan.pools}, name=str(directory))
