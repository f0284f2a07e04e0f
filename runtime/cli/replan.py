"""The command that re-plans a running job."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.analysis.replan import Replanned
from meshwright.planner.job.job import read_job
from meshwright.planner.plan.plan import read_plan, write_plan
from meshwright.planner.solver.result import Limits
from meshwright.runtime.api.analyses import replan as replan_run
from meshwright.runtime.api.files import resolve
from meshwright.runtime.cli import view_time
from meshwright.runtime.cli.call import limit_memory, read_profile
from meshwright.runtime.cli.options import AsJson, Gap, PlanPath, Profile
from meshwright.runtime.records.outputs import Output, OutputKind, require_outputs

EXAMPLES = """Example: meshwright replan plan.json run -o plan2.json

meshwright replan plan.json run --lost-nodes 1 --gap 0.01 -o plan2.json

meshwright replan plan.json run --profile table.json --job longer-job.yaml --json
"""


def replan(
    plan: PlanPath,
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The --out of a `meshwright run` of this plan.")],
    *,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the new plan here.")] = None,
    job: Annotated[Path | None, typer.Option(help="The job to continue with; by default that of the plan.")] = None,
    lost_nodes: Annotated[int, typer.Option(min=0, help="Number of nodes that were lost.")] = 0,
    profile: Profile = None,
    gap: Gap = None,
    as_json: AsJson = False,
) -> None:
    """Re-plan a run from its own lengths and speeds: the best plan from here, and the cost of switching.

    The answer comes from the neighbourhood of the current plan, without a bound; with --gap, a full search starts from
    it and ends when that gap is proven.
    """
    require_outputs(Output("-o", output, OutputKind.PLAN) if output else None, inputs=(plan, profile, job))
    document, table = read_plan(plan), read_profile(profile)
    facts = resolve(read_job(job), job.parent, table) if job else None
    limits = None if gap is None else Limits(gap=gap)
    with limit_memory():
        replanned = replan_run(document, run, table, facts=facts, lost_nodes=lost_nodes, limits=limits)
    if output:
        write_plan(output, replanned.plan)
    if as_json:
        typer.echo(json.dumps(_plain(replanned), indent=2))
    else:
        view_time.print_replanned(replanned, output)


def _plain(replanned: Replanned) -> dict[str, object]:
    """Return the answer as plain data."""
    return {
        "period_seconds": replanned.plan.period_seconds,
        "old_plan_seconds": replanned.old_plan_seconds,
        "reason_not_kept": replanned.reason_not_kept,
        "moving": [asdict(transfer) for transfer in replanned.moving],
        "moving_seconds": replanned.moving_seconds,
        "break_even_steps": replanned.break_even_steps,
        "plan": replanned.plan.model_dump(mode="json"),
    }
