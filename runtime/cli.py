"""The command line: reads documents, calls what answers, shows the answer.

Commands that compute import torch when they are called, so that planning starts at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from typer.exceptions import TyperException

from meshwright.planner.plan.evaluate import items, name_of
from meshwright.planner.plan.job import Job
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.planner.plan.verify import require_valid
from meshwright.planner.plan.verify import verify as violations
from meshwright.planner.program.instruction_durations import Durations, Planned
from meshwright.planner.simulation.sampled import Sampled
from meshwright.planner.simulation.simulate import simulate as simulation
from meshwright.profiles.chrome_trace import chrome_trace
from meshwright.profiles.documents import Document, write_atomically
from meshwright.profiles.errors import BadInput, MeshwrightError
from meshwright.profiles.table import Table
from meshwright.profiles.trace import Run, Span, read_spans
from meshwright.runtime.commands import (
    calibrate_command,
    explain_command,
    export_command,
    plan_command,
    profile_command,
    report_command,
    run_command,
    show_time,
)
from meshwright.runtime.commands.given_table import remodel, table_in
from meshwright.runtime.commands.options import (
    AsJson,
    DurationsFrom,
    From,
    Gap,
    PlanPath,
    Price,
    Profile,
    SchemaOf,
    Seed,
    Steps,
    TracePath,
    finite,
)
from meshwright.runtime.commands.planning_memory import within_memory
from meshwright.runtime.records.outputs import Output, OutputKind, require_outputs

_INTERRUPTED = 130
"""What a shell makes of Ctrl-C."""

app = typer.Typer(
    help="Plans, proves and runs PPO-RLHF jobs on Megatron-core.",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.command(epilog="Example: meshwright schema job > job.schema.json")
def schema(document: Annotated[SchemaOf, typer.Argument(help="Which document.")]) -> None:
    """Print the JSON Schema of a document."""
    kinds: dict[SchemaOf, type[Document]] = {SchemaOf.JOB: Job, SchemaOf.PLAN: Plan, SchemaOf.TABLE: Table}
    print(json.dumps(kinds[document].model_json_schema(), indent=2, sort_keys=True))


app.command(epilog=profile_command.EXAMPLE)(profile_command.profile)


app.command(epilog=plan_command.EXAMPLES)(plan_command.plan)


@app.command(epilog="Example: meshwright verify plan.json")
def verify(plan: PlanPath, as_json: AsJson = False) -> None:
    """Check every rule of a plan without the solver; say nothing when it holds."""

    found = violations(read_plan(plan))
    if as_json:
        print(json.dumps({"violations": found}, indent=2))
    elif found:
        print("\n".join(found), file=sys.stderr)
    if found:
        raise typer.Exit(2)


app.command(epilog=explain_command.EXAMPLES)(explain_command.explain)


@app.command(epilog="Example: meshwright simulate plan.json --steps 50 --seed 1 --trace simulated.json")
def simulate(
    plan: PlanPath,
    steps: Steps = 20,
    seed: Seed = 0,
    durations: From = DurationsFrom.SAMPLED,
    profile: Profile = None,
    trace: TracePath = None,
    beside: Annotated[
        list[Path] | None, typer.Option(help="A trace.jsonl of a run or a rehearsal, shown in the same timeline.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the plan's program in virtual time: how long steps take, and what every rank waits for."""
    require_outputs(_timeline(trace), inputs=(plan, profile, *(beside or ())))
    document = read_plan(plan)
    require_valid(document)
    others = [_beside(path, document) for path in beside or ()]
    work = _durations(durations, document, profile, seed)
    found = simulation(document, work, steps=steps, traced=trace is not None)
    if trace:
        write_atomically(trace, chrome_trace([_run(found.spans, document), *others]))
    if as_json:
        print(json.dumps(asdict(replace(found, spans=())), indent=2))
    else:
        show_time.simulation(found, trace)


@app.command(epilog="Example: meshwright rehearse plan.json --steps 3")
def rehearse(
    plan: PlanPath,
    steps: Steps = 3,
    speed: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            max=1e6,
            callback=finite,
            help="Waits are the predicted seconds times this; by default enough for waits to dominate.",
        ),
    ] = None,
    ranks_per_process: Annotated[
        int | None,
        typer.Option(min=1, max=2**20, help="Ranks that a process hosts; by default as many as leave 16 processes."),
    ] = None,
    durations: From = DurationsFrom.PLANNED,
    seed: Seed = 0,
    profile: Profile = None,
    trace: Annotated[
        Path | None, typer.Option(help="Where a timeline for Perfetto goes, the simulated beside it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new directory for the trace, which `report` reads.")] = None,
    as_json: AsJson = False,
) -> None:
    """Follow the plan with real processes and messages, waiting where a device would compute."""
    from meshwright.runtime.execution.rehearse import rehearse as rehearsal

    require_outputs(_timeline(trace), inputs=(plan, profile))
    document = read_plan(plan)
    require_valid(document)
    if out:
        report_command.require_new(out)
    work = _durations(durations, document, profile, seed)
    found = rehearsal(document, work, steps=steps, speed=speed, seed=seed, ranks_per_process=ranks_per_process)
    if trace:
        simulated = simulation(document, work, steps=steps, traced=True)
        runs = [_run(spans, document) for spans in (simulated.spans, found.spans)]
        write_atomically(trace, chrome_trace(runs))
    if out:
        report_command.write_run(document, found.spans, out)
    if as_json:
        print(json.dumps(asdict(replace(found, spans=())), indent=2))
    else:
        show_time.rehearsal(found, trace)


@app.command(epilog="Example: meshwright whatif plan.json --set cluster.nodes=8 --set workload.response.p99=2048,4096")
def whatif(
    plan: PlanPath,
    setting: Annotated[
        list[str], typer.Option("--set", help="A field of the plan's facts, as field=value or field=value,value,...")
    ],
    replan: Annotated[
        bool, typer.Option(help="Search for the best plan each time, instead of costing this one.")
    ] = False,
    gap: Gap = 0.01,
    profile: Profile = None,
    price: Price = None,
    plot: Annotated[
        Path | None, typer.Option(help="An HTML page of step time and tokens/s against the first field with a range.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what would change if the models, the cluster, the workload or the precision were others."""
    from meshwright.planner.analysis.whatif import whatif as answers
    from meshwright.planner.plan.settings import parse_settings
    from meshwright.planner.report.sweep import sweep
    from meshwright.planner.solver.result import Limits

    require_outputs(Output("--plot", plot, OutputKind.PAGE) if plot else None, inputs=(plan, profile))
    document = read_plan(plan)
    require_valid(document)
    settings = parse_settings(setting)
    if plot:
        report_command.require_plot(plot, settings)
    model_of, limits = remodel(table_in(profile)), Limits(gap=gap)
    with within_memory():
        found = answers(document, settings, model_of, replan=replan, price=price, limits=limits)
    if plot:
        write_atomically(plot, sweep(found))
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        show_time.whatif(found, plot)


app.command(epilog=run_command.EXAMPLE)(run_command.run)
app.command(epilog=calibrate_command.EXAMPLE)(calibrate_command.calibrate)
app.command(epilog=report_command.EXAMPLE)(report_command.report)
app.command(epilog=export_command.EXAMPLES)(export_command.export)


def _beside(path: Path, plan: Plan) -> Run:
    """Raises BadInput for the trace of another plan, as far as can be told where no plan lies beside it."""
    spans, planned = read_spans(path), path.with_name("plan.json")
    if planned.exists() and read_plan(planned) != plan:
        raise BadInput(f"--beside {path} is of another plan; simulate the plan.json that lies beside it.")
    names = {name_of(item) for item in items(plan)} | {edge.producer for edge in plan.edges}
    for span in spans:
        if span.rank >= plan.facts.cluster.num_ranks or (span.kind == "stage" and span.instruction not in names):
            raise BadInput(
                f"--beside {path} is of another plan: it has {span.instruction} on rank {span.rank}, which this plan "
                "has not; give a trace of this plan."
            )
    return _run(spans, plan, path.resolve().parent.name)


def _timeline(trace: Path | None) -> Output | None:
    return Output("--trace", trace, OutputKind.TIMELINE) if trace else None


def _durations(durations: DurationsFrom, plan: Plan, profile: Path | None, seed: int) -> Durations:
    return Sampled(plan, remodel(table_in(profile)), seed=seed) if durations is DurationsFrom.SAMPLED else Planned(plan)


def _run(spans: Sequence[Span], plan: Plan, name: str = "") -> Run:
    return Run(spans=tuple(spans), pools={pool.name: pool.ranks for pool in plan.pools}, name=name)


def main() -> None:
    """Runs the command line; an error is one sentence and an exit code."""
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
        sys.stdout.flush()
    except MeshwrightError as error:
        code = _tell(error)
    except TyperException as error:
        code = _tell(BadInput(_of_usage(error)))
    except BrokenPipeError:  # who reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        path = f" {error.filename}" if error.filename else ""
        code = _tell(BadInput(f"cannot use{path}: {error.strerror or error}; check the path and its permissions."))
    except MemoryError:
        code = _tell(BadInput("this takes more memory than there is; ask for less."))
    if code == _INTERRUPTED:
        print("stopped by the user; what was written before stays.", file=sys.stderr)
    sys.exit(code or 0)


def _of_usage(error: TyperException) -> str:
    """What is wrong with an option or an argument, and where they are listed."""
    told = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{told[:1].lower()}{told[1:]}; see `{context.command_path if context else 'meshwright'} --help`."


def _tell(error: MeshwrightError) -> int:
    """Prints the error on one line, whatever it names."""
    told = " ".join(escape(str(error)).split("\n"))
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {told}")
    return error.exit_code
