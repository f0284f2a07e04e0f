"""The command that explains a plan."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from meshwright.planner.analysis.plan_summary import DEFAULT_NUM_STEPS
from meshwright.planner.plan.plan import read_plan
from meshwright.runtime.api.analyses import explain as explain_plan
from meshwright.runtime.cli import view_search
from meshwright.runtime.cli.call import progress_bars, read_profile
from meshwright.runtime.cli.options import AsJson, NumSteps, PlanPath, Price, Profile, parse_sizes

EXAMPLES = """Example: meshwright explain plan.json --profile table.json

meshwright explain plan.json --runner-ups

meshwright explain plan.json --sizes 8,16,32 --price 2.5
"""


def explain(
    plan: PlanPath,
    *,
    profile: Profile = None,
    runner_ups: Annotated[
        bool, typer.Option("--runner-ups", help="Search again without each choice, to show what it gains.")
    ] = False,
    sizes: Annotated[
        str | None, typer.Option(help="Also plan the job on these numbers of ranks, as 8,16,32; each takes a search.")
    ] = None,
    price: Price = None,
    per_steps: NumSteps = DEFAULT_NUM_STEPS,
    as_json: AsJson = False,
) -> None:
    """Explain a plan: its critical path, binding limits and sensitivities, and what each choice gains."""
    document, num_ranks = read_plan(plan), parse_sizes(sizes)
    with progress_bars() as progress:
        explanation = explain_plan(
            document,
            read_profile(profile),
            runner_ups=runner_ups,
            sizes=num_ranks,
            price=price,
            num_steps=per_steps,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(asdict(explanation), indent=2))
    else:
        view_search.print_explanation(explanation)
