"""The command `plan`, which searches for a plan, and the progress that it shows.

The code for --for, --top and --proof is in `runtime/cli/plan_variants.py`, which is imported only if one is given.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.analysis.optional_features import UnplannedEvaluations, call_latencies, unplanned_evaluations
from meshwright.planner.analysis.plan_summary import DEFAULT_NUM_STEPS, summarise
from meshwright.planner.analysis.sensitivity import main_influences
from meshwright.planner.job.graph_losses import own_graph_violations
from meshwright.planner.job.job import Facts, read_job
from meshwright.planner.plan.pin_files import read_pins
from meshwright.planner.plan.plan import Plan, read_plan, write_plan
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.search.search_control import ProgressCallback, SearchProgress
from meshwright.planner.solver.result import Limits
from meshwright.profiles.aiconfigurator import has_operators
from meshwright.profiles.documents import canonical_json
from meshwright.profiles.errors import STOPPED, Infeasible
from meshwright.profiles.hardware import AnyCluster, MixedCluster
from meshwright.profiles.table import Table
from meshwright.runtime.api.arguments import cost_model_builder
from meshwright.runtime.api.files import resolve
from meshwright.runtime.api.planning import SearchConstraints, plan_and_model
from meshwright.runtime.cli import view_plan
from meshwright.runtime.cli.call import (
    FromTrace,
    TraceFields,
    limit_memory,
    read_lengths,
    read_profile,
    stop_on_signal,
)
from meshwright.runtime.cli.options import (
    AsJson,
    ForbidTexts,
    ForTrainer,
    Gap,
    JobPath,
    NumSteps,
    PinsPath,
    PinTexts,
    Price,
    Profile,
    ProofOut,
    TrainerName,
    finite,
)
from meshwright.runtime.records.outputs import Output, OutputKind, require_outputs


@contextmanager
def show_search_progress(began: float, *, as_json: bool) -> Iterator[ProgressCallback | None]:
    """Yield the progress callback of a search that started at `began` (seconds of `time.monotonic`).

    The callback is None if standard error is not a terminal and `as_json` is False. No thread is started, because a
    search forks a second process only in a program without threads.
    """
    console = Console(stderr=True)
    if as_json:
        yield lambda state: typer.echo(progress_json(state, time.monotonic() - began), err=True)
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
            yield lambda state: live.update(Text(progress_line(state, time.monotonic() - began)), refresh=True)
    else:
        yield None


def progress_json(state: SearchProgress, seconds: float) -> str:
    """Return the progress as one JSON object; all times are in seconds."""
    return json.dumps(
        {
            "seconds": round(seconds, 3),
            "phase": state.phase,
            "done": state.done,
            "total": state.total,
            "period_seconds": state.period_seconds,
            "bound_seconds": state.bound_seconds,
            "gap": state.gap,
        }
    )


def progress_line(state: SearchProgress, seconds: float) -> str:
    """Return the progress as a line of text for a person."""
    progress = f"{seconds:5.1f} s  {state.activity}"
    if state.period_seconds is None:
        return f"{progress}: no plan yet"
    return f"{progress}: step {state.period_seconds:.3f} s, none below {state.bound_seconds:.3f} s, gap {state.gap:.1%}"


_NOISY_SPREAD = 0.5
"""Spread of repeated measurements above which the table is called noisy."""

TimeLimit = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        max=1e6,
        callback=finite,
        help="Time limit in seconds; the best plan so far is written with its gap. Without it, a search ends by a "
        "deterministic count of work, so that every machine finds the same plan.",
    ),
]
Top = Annotated[
    int,
    typer.Option(
        min=1, max=100, help="Write this many plans of different structure, as plan.json, plan.2.json and so on."
    ),
]
Start = Annotated[
    Path | None, typer.Option("--from", metavar="PLAN.json", help="A plan of a similar job to start from.")
]

EXAMPLES = """Example: meshwright plan job.yaml --profile table.json -o plan.json

meshwright plan job.yaml --pin actor_generate.layout=tp1,pp2,dp1 --forbid actor_train.recompute=full -o plan.json

meshwright plan job.yaml --pins pins.txt -o plan.json

meshwright plan other-job.yaml --from plan.json -o other-plan.json

meshwright plan job.yaml --from-trace run -o plan.json

meshwright plan job.yaml --from-trace rollouts.jsonl --trace-field response=completion_length -o plan.json

meshwright plan job.yaml --proof proof.json -o plan.json

meshwright plan job.yaml --for verl --top 2 --proof proof.json -o plan.json

meshwright plan job.yaml --price 2.5 --per-steps 500 -o plan.json

meshwright plan job.yaml --top 3 --time-limit 20 --gap 0 -o plan.json
"""


def plan(
    job: JobPath,
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the plan here.")],
    *,
    profile: Profile = None,
    pin: PinTexts = None,
    pins: PinsPath = None,
    forbid: ForbidTexts = None,
    trainer: ForTrainer = None,
    top: Top = 1,
    time_limit: TimeLimit = None,
    gap: Gap = None,
    start: Start = None,
    from_trace: FromTrace = None,
    trace_field: TraceFields = None,
    proof: ProofOut = None,
    price: Price = None,
    per_steps: NumSteps = DEFAULT_NUM_STEPS,
    as_json: AsJson = False,
) -> None:
    """Search for the fastest plan that fits, and prove how good it is. Ctrl-C keeps the best plan so far.

    With --for, all plans that --top writes and those that a search with --from finds are within the settings of the
    trainer; the bound that --proof proves is still on all plans.

    With --json, standard error has a line of JSON for each change of the search's progress, and one for what the plan
    is most sensitive to, for its memory by part, the next best layouts and the cost of a number of steps, for latencies
    that the job does not state, and for its evaluations, which are in no step.
    """
    began = time.monotonic()
    require_outputs(*_outputs(output, top, proof), inputs=(job, profile, pins, start, from_trace))
    limits = Limits(gap=gap) if time_limit is None else Limits.for_seconds(time_limit, gap=gap, began=began)
    document, table = read_job(job), read_profile(profile)
    facts = resolve(document, job.parent, table)
    constraints = SearchConstraints(
        job=document,
        pins=(*(pin or ()), *(read_pins(pins, facts.graph) if pins else ())),
        forbid=forbid or (),
        start=read_plan(start) if start else None,
        observed=read_lengths(from_trace, trace_field),
    )
    with limit_memory(), stop_on_signal() as stop:
        if trainer:
            from meshwright.runtime.cli.plan_variants import search_for_trainer

            best, model = search_for_trainer(trainer, facts, table, constraints, replace(limits, stop=stop)), None
        else:
            with show_search_progress(began, as_json=as_json) as report:
                best, model = plan_and_model(
                    facts, table, constraints, limits=replace(limits, stop=stop), progress=report
                )
    if isinstance(best, NoPlan):
        _report_no_plan(best, as_json)
    if proof and not stop.is_set():
        from meshwright.runtime.cli.plan_variants import write_proof_of

        write_proof_of(best, table, proof)
    if top == 1 or stop.is_set():
        _write(output, best, as_json)
    else:
        from meshwright.runtime.cli.plan_variants import other_structures, write_structures

        rows = other_structures(trainer, best, table, constraints, count=top, limits=limits)
        paths = [planned_output.path for planned_output in _outputs(output, len(rows))]
        write_structures(paths, rows, as_json=as_json)
    if start and "start" not in best.digests:
        _report_unused_start(start, trainer)
    if not trainer and not as_json and (sentence := next(own_graph_violations(document), None)):
        typer.echo(f"note: run refuses this job: {sentence}")
    if trainer and not as_json:
        typer.echo(f"generated by {best.facts.engine}, with which {trainer} runs")
    evaluations = None if trainer else unplanned_evaluations(best, document)
    _report_outlook(best, model, table, job, evaluations, price=price, num_steps=per_steps, as_json=as_json)
    if stop.is_set():
        view_plan.print_search_stopped(best, output)
        raise typer.Exit(STOPPED)


def _report_unused_start(start: Path, trainer: TrainerName | None) -> None:
    subject = f"the job, or {trainer}, does" if trainer else "the job does"
    view_plan.print_to_stderr(f"{subject} not allow the placements of {start}; the search started without it.")


def _report_no_plan(answer: NoPlan, as_json: bool) -> NoReturn:
    if as_json:
        typer.echo(json.dumps(asdict(answer), indent=2))
    else:
        view_plan.print_no_plan(answer)
    raise typer.Exit(Infeasible.exit_code)


def _report_outlook(
    best: Plan,
    model: CostModel | None,
    table: Table | None,
    job: Path,
    evaluations: UnplannedEvaluations | None,
    *,
    price: float | None,
    num_steps: int,
    as_json: bool,
) -> None:
    """Print the memory by part, the next best layouts, the cost of the steps, the evaluations that are in no step, what
    the plan is most sensitive to and how to get more accurate costs.

    With `as_json`, print the same without the last, and the latencies of rewards and of the tool that the job does not
    state, as a line of JSON on standard error."""
    spread = table.spread if table else 0.0
    sensitivity = main_influences(best, cost_model_builder(table), measured=table is not None, spread=spread)
    model = model or cost_model_builder(table)(best.facts)
    outlook = summarise(best, model, price=price, num_steps=num_steps)
    if as_json:
        latencies = call_latencies(best.facts)
        features = {"latencies": latencies, "evaluations": evaluations}
        line = {"main_influences": asdict(sensitivity), "summary": asdict(outlook)}
        line |= {name: asdict(feature) for name, feature in features.items() if feature}
        typer.echo(json.dumps(line), err=True)
        return
    view_plan.print_summary(outlook)
    if evaluations:
        typer.echo(evaluations.sentence)
    for sentence in sensitivity.sentences:
        typer.echo(sentence)
    _report_costs(best.facts, job, table)


def _report_costs(facts: Facts, job: Path, table: Table | None) -> None:
    """Print how to get more accurate costs."""
    if table is None and (line := operator_timings_hint(facts.cluster, job)):
        typer.echo(line)
    if table is not None and table.spread > _NOISY_SPREAD:
        typer.echo(
            f"repeats of the measured costs spread by {table.spread:.0%} (median): something else used the machine; "
            "profile again when it is quiet, with --fresh, for costs to rely on."
        )


def operator_timings_hint(cluster: AnyCluster, job: Path) -> str | None:
    """Return a hint for a user who plans without a table on a device with published operator timings; else None."""
    device = cluster.name if isinstance(cluster, MixedCluster) else cluster.device.name
    if not has_operators(device):
        return None
    return (
        f"operator timings of {device} are installed: `meshwright profile {job} --from aiconfigurator -o table.json` "
        "makes a table of them for --profile."
    )


def _outputs(output: Path, count: int, proof: Path | None = None) -> Iterator[Output]:
    """Yield the outputs: the first plan, the others beside it, and the proof."""
    yield Output("-o", output, OutputKind.PLAN)
    for number in range(2, count + 1):
        yield Output("--top", output.with_suffix(f".{number}{output.suffix}"), OutputKind.PLAN)
    if proof:
        yield Output("--proof", proof, OutputKind.PROOF)


def _write(output: Path, plan: Plan, as_json: bool) -> None:
    write_plan(output, plan)
    if as_json:
        typer.echo(canonical_json(plan), nl=False)
    else:
        view_plan.print_plan(plan, output)
