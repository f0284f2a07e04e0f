"""The command that runs a plan in virtual time."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.plan.evaluate import items, task_name_of
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.profiles.trace import Run, read_recent_spans
from meshwright.runtime.api.reports import timeline
from meshwright.runtime.api.runs import simulate as simulate_plan
from meshwright.runtime.cli import view_time
from meshwright.runtime.cli.call import read_profile_for
from meshwright.runtime.cli.options import (
    AsJson,
    DurationsFrom,
    DurationsOption,
    PlanPath,
    Profile,
    Seed,
    Steps,
    TracePath,
    timeline_output,
)
from meshwright.runtime.records.outputs import require_outputs

EXAMPLES = "Example: meshwright simulate plan.json --steps 50 --seed 1 --trace simulated.json"


def simulate(
    plan: PlanPath,
    steps: Steps = 20,
    seed: Seed = 0,
    durations: DurationsOption = DurationsFrom.SAMPLED,
    profile: Profile = None,
    trace: TracePath = None,
    beside: Annotated[
        list[Path] | None, typer.Option(help="A trace.jsonl of a run or a rehearsal to show in the same timeline.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the plan in virtual time: how long steps take, and what each rank waits for."""
    require_outputs(timeline_output(trace), inputs=(plan, profile, *(beside or ())))
    document = read_plan(plan)
    others = [_read_trace(path, document) for path in beside or ()]
    simulation = simulate_plan(
        document,
        read_profile_for(durations, profile),
        steps=steps,
        seed=seed,
        sampled=durations is DurationsFrom.SAMPLED,
        traced=trace is not None,
    )
    if trace:
        write_atomically(trace, timeline(document, simulation, *others))
    if as_json:
        typer.echo(json.dumps(asdict(replace(simulation, spans=())), indent=2))
    else:
        view_time.print_simulation(simulation, trace)


def _read_trace(path: Path, plan: Plan) -> Run:
    """Read a trace of this plan. Raises BadInput for a trace of another plan, where that can be detected."""
    spans, planned = read_recent_spans(path), path.with_name("plan.json")
    if planned.exists() and read_plan(planned) != plan:
        raise BadInput(f"--beside {path} belongs to another plan; simulate the plan.json beside it.")
    names = {task_name_of(item) for item in items(plan)} | {edge.producer for edge in plan.edges}
    for span in spans:
        if span.rank >= plan.facts.cluster.num_ranks or (span.kind == "stage" and span.instruction not in names):
            raise BadInput(
                f"--beside {path} belongs to another plan: it has {span.instruction} on rank {span.rank}, which this "
                "plan does not have; give a trace of this plan."
            )
    return Run(spans=spans, pools={pool.name: pool.ranks for pool in plan.pools}, name=path.resolve().parent.name)
