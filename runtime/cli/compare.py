"""The command that compares two plans."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.plan.plan import read_plan
from meshwright.runtime.api.analyses import compare as compare_plans
from meshwright.runtime.cli import view_search
from meshwright.runtime.cli.options import AsJson, PlanPath

EXAMPLES = "Example: meshwright compare plan.json other-plan.json"


def compare(
    plan: PlanPath,
    other: Annotated[Path, typer.Argument(metavar="OTHER.json", help="The plan to compare with.")],
    as_json: AsJson = False,
) -> None:
    """Compare two plans: steps, stages, and how their jobs differ."""
    comparison = compare_plans(read_plan(plan), read_plan(other))
    if as_json:
        typer.echo(json.dumps(asdict(comparison), indent=2))
    else:
        view_search.print_comparison(comparison, plan.stem, other.stem)
