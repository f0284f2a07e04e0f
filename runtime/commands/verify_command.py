"""The command that checks a plan: says what is wrong, and what could not be looked at."""

from __future__ import annotations

import json

import typer

from meshwright.planner.plan.plan import read_plan
from meshwright.runtime.api.checking import names_table
from meshwright.runtime.api.checking import verify as wrong
from meshwright.runtime.commands.given_table import table_in
from meshwright.runtime.commands.options import AsJson, PlanPath, Profile

EXAMPLES = """Example: meshwright verify plan.json

meshwright verify plan.json --profile table.json
"""


def verify(plan: PlanPath, profile: Profile = None, as_json: AsJson = False) -> None:
    """Check every rule of a plan and every cost that it states, without the solver; say nothing when all hold."""
    found = read_plan(plan)
    sentences = wrong(found, table_in(profile))
    costs_checked = profile is not None or not names_table(found)
    if as_json:
        typer.echo(json.dumps({"violations": sentences, "costs_checked": costs_checked}, indent=2))
    elif sentences:
        typer.echo("\n".join(sentences), err=True)
    elif not costs_checked:
        typer.echo(
            "its laws hold; its costs are of a measured table and were not checked: give the table as --profile."
        )
    if sentences:
        raise typer.Exit(2)
