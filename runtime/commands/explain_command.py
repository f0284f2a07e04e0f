"""The command that says why a plan is as it is: reads the plan, calls the planner, shows the answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from meshwright.planner.plan.plan import read_plan
from meshwright.planner.plan.verify import require_valid
from meshwright.runtime.commands import show_search
from meshwright.runtime.commands.given_table import remodel, table_in
from meshwright.runtime.commands.options import AsJson, PlanPath, Price, Profile
from meshwright.runtime.commands.sizes_option import parse_sizes

EXAMPLES = """Example: meshwright explain plan.json --profile table.json

meshwright explain plan.json --runner-ups

meshwright explain plan.json --sizes 8,16,32 --price 2.5
"""


def explain(
    plan: PlanPath,
    *,
    profile: Profile = None,
    runner_ups: Annotated[
        bool, typer.Option("--runner-ups", help="Search again without each choice, to say what it buys.")
    ] = False,
    sizes: Annotated[
        str | None, typer.Option(help="Numbers of ranks to plan the job on as well, as 8,16,32; each takes a search.")
    ] = None,
    price: Price = None,
    as_json: AsJson = False,
) -> None:
    """Say why a plan is as it is: what its turn waits for, what binds, what matters, what each choice buys."""
    from meshwright.planner.analysis.alternatives import alternatives
    from meshwright.planner.analysis.binding import held_back
    from meshwright.planner.analysis.explain import explain as explanation
    from meshwright.planner.analysis.pareto import pareto
    from meshwright.planner.analysis.runners_up import runners_up
    from meshwright.planner.analysis.sensitivity import sensitivities

    document = read_plan(plan)
    require_valid(document)
    wanted = parse_sizes(sizes)
    model_of = remodel(table_in(profile))
    model = model_of(document.facts)
    found = show_search.Why(
        explanation=explanation(document),
        held_back=held_back(document, model),
        sensitivities=sensitivities(document, model_of),
    )
    if runner_ups:
        with _progress("searching without each choice", len(document.placements)) as advance:
            found = found.with_runners_up(
                alternatives(document, model, most=1), runners_up(document, model, progress=advance)
            )
    if wanted:
        with _progress("planning other sizes", len(wanted)) as advance:
            found = found.with_sizes(pareto(document, wanted, model_of, price=price, progress=advance))
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        show_search.why(found)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
