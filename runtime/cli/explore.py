"""The command that serves a local page on which a job is changed and its plan answers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.analysis.plan_summary import DEFAULT_NUM_STEPS
from meshwright.planner.analysis.sensitivity import interval_sentence
from meshwright.planner.analysis.sweep import sweep_json
from meshwright.planner.plan.pin_files import read_pins
from meshwright.planner.plan.plan import Plan, write_plan
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import STOPPED, BadInput, Infeasible
from meshwright.runtime.api.analyses import compare, summary
from meshwright.runtime.api.sweeps import sweep
from meshwright.runtime.cli import view_plan, view_search
from meshwright.runtime.cli.call import limit_memory, progress_bars, stop_on_signal
from meshwright.runtime.cli.options import Gap, NumSteps, PinTexts, Price, Profile
from meshwright.runtime.explorer.searches import Refusal, Searches
from meshwright.runtime.explorer.server import ExplorerServer, serve
from meshwright.runtime.explorer.source import Source, read_source
from meshwright.runtime.explorer.state import State, state_of
from meshwright.runtime.records.outputs import Output, OutputKind, require_outputs

EXAMPLES = """Example: meshwright explore job.yaml

meshwright explore plan.json --price 2.5

meshwright explore job.yaml --set cluster.nodes=4 --set workload.response.scale=2 -o plan.json

meshwright explore job.yaml --grid cluster.nodes=1,2,4 --grid staleness=0,1 --price 2.5 -o grid.json

meshwright explore job.yaml --beside configured.json
"""


def explore(
    source: Annotated[Path, typer.Argument(metavar="JOB.yaml|PLAN.json", help="The job to explore, or a plan of it.")],
    *,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A changed field, as field=value; see `meshwright whatif`.")
    ] = None,
    pin: PinTexts = None,
    price: Price = None,
    per_steps: NumSteps = DEFAULT_NUM_STEPS,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="Also plan several values of a field, as field=value,value; all combinations of several fields."
        ),
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.json",
            help="Show the best plan beside this one, such as that of `import --plan`, or beside the pins of a file.",
        ),
    ] = None,
    profile: Profile = None,
    gap: Gap = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 takes a free one.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Serve no page: write the plan of these changes here, or what --grid finds, and end.",
        ),
    ] = None,
) -> None:
    """Serve a local page on which a job is changed and its plan answers. Ctrl-C ends it.

    Only a browser on this machine that knows the printed address can read the page, which loads nothing from elsewhere.
    """
    kind = OutputKind.SWEEP if grid else OutputKind.PLAN
    require_outputs(Output("-o", output, kind) if output else None, inputs=(source, profile, beside))
    state = state_of(setting or (), pin or (), price, per_steps, grid=grid or ())
    explored = read_source(source, profile=profile, gap=gap)
    explored.require_known_fields(state)
    if beside:
        state = replace(
            state, compared_with=State(pins=tuple(sorted(read_pins(beside, explored.facts.graph))), price=price)
        )
    searches = Searches(explored, limit_memory=limit_memory)
    if output:
        (_write_grid(explored, state, output) if grid else _write_answer(explored, searches, state, output))
        return
    server = ExplorerServer(explored, searches, port=port)
    typer.echo(f"explore {source} at {server.address(state)} (Ctrl-C ends it)")
    with _close_on_signal(searches):
        serve(server)


def _write_answer(source: Source, searches: Searches, state: State, output: Path) -> None:
    """Write and print the plan of a state, and compare it with the one that is kept beside it. Raises BadInput or
    Infeasible where it has none."""
    answer = searches.answer_now(state)
    outcome = answer.outcome
    if isinstance(outcome, Refusal):
        raise BadInput(outcome.sentence)
    if isinstance(outcome, NoPlan):
        view_plan.print_no_plan(outcome)
        raise typer.Exit(Infeasible.exit_code)
    assert isinstance(outcome, Plan)
    assert answer.step_interval is not None
    write_plan(output, outcome)
    view_plan.print_plan(outcome, output)
    view_plan.print_summary(summary(outcome, source.table, price=state.price, num_steps=state.num_steps))
    typer.echo(interval_sentence(answer.step_interval))
    if state.compared_with:
        kept = searches.answer_now(state.compared_with).outcome
        if isinstance(kept, Refusal):
            raise BadInput(kept.sentence)
        if isinstance(kept, NoPlan):
            view_plan.print_no_plan(kept)
        else:
            view_search.print_comparison(compare(kept, outcome), "beside", output.stem)


def _write_grid(source: Source, state: State, output: Path) -> None:
    """Write and print the plans of the grid of a state; Ctrl-C keeps those that are finished. Exits with
    the code of no plan where no point has one."""
    with limit_memory(), stop_on_signal() as stop, progress_bars() as progress:
        planned = sweep(
            source.facts,
            [point.values for point in state.points],
            source.table,
            pins=(*source.pins, *state.pins),
            price=state.price,
            num_steps=state.num_steps,
            limits=Limits(gap=source.gap, stop=stop),
            job=source.job,
            progress=progress,
        )
    fields = [path for path, _ in state.grid]
    points = (replace(point, setting={path: point.setting[path] for path in fields}) for point in planned.points)
    found = replace(planned, points=tuple(points), digest="")  # no sweep goes on from points with other settings
    write_atomically(output, sweep_json(found))
    view_search.print_sweep(found, output)
    if stop.is_set():
        raise typer.Exit(STOPPED)
    if not any(point.plan for point in found.points):
        raise typer.Exit(Infeasible.exit_code)


@contextmanager
def _close_on_signal(searches: Searches) -> Iterator[None]:
    """End the searches, and with them the page, on Ctrl-C and SIGTERM."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    old_handlers = {number: signal.signal(number, lambda *_: searches.close()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
