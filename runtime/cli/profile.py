"""The command that makes a table of costs, by measuring here or from published operator timings."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwright.planner.job.job import Job, read_job, resolve
from meshwright.planner.job.rewards_and_tools import unstated_calls
from meshwright.profiles.errors import BadInput
from meshwright.profiles.table import Table
from meshwright.runtime.api.measurements import num_missing
from meshwright.runtime.api.measurements import profile as profile_job
from meshwright.runtime.cli.operator_timings import import_table
from meshwright.runtime.cli.options import AllowModule, finite
from meshwright.runtime.records.outputs import Output, OutputKind, require_outputs

EXAMPLES = "Example: meshwright profile examples/tiny/job.yaml -o table.json --minutes 1"

_DEVICE_KINDS = ("cpu", "cuda")


class TableSource(StrEnum):
    """Sources of tables that are not measured here."""

    AICONFIGURATOR = "aiconfigurator"


def profile(
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Write the table here; an interrupted profile is continued.")
    ],
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB.yaml", help="The job whose shapes are timed; optional with --from.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu or cuda; with --from a name such as h200_sxm. By default the device of the job's cluster."
        ),
    ] = None,
    source: Annotated[
        TableSource | None,
        typer.Option(
            "--from",
            help="Measure nothing: compose forward, prefill and decode from timings that NVIDIA published (pip "
            "install 'meshwright\\[aiconfigurator]'). Training is still costed by equations. Without a job the table "
            "has the dense models that the package names.",
        ),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(min=0.05, max=10_000, callback=finite, help="Time limit; what is not measured is extrapolated."),
    ] = 2.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over and drop earlier measurements.")] = False,
    allow_module: AllowModule = None,
) -> None:
    """Time the job's stages and collectives on this machine; an interrupted profile is continued.

    Rewards and the tool are called too, unless the job states their latency. If the job names the environment of vLLM
    and may generate with it, vLLM is timed as well, for about --minutes more.
    """
    require_outputs(Output("-o", output, OutputKind.TABLE), inputs=(job,))
    if source is not None:
        _show(import_table(job, device, output, fresh=fresh), output)
        return
    if job is None:
        raise BadInput("name a job.yaml, whose shapes are timed; only --from makes a table without one.")
    if device is not None and device not in _DEVICE_KINDS:
        raise BadInput(
            f"--device {device!r} is not cpu or cuda; the name of a device goes with --from aiconfigurator, which "
            "measures nothing here."
        )
    document = read_job(job)
    facts = resolve(document, job.parent)
    table = profile_job(
        facts,
        output,
        minutes=minutes,
        device=device,
        fresh=fresh,
        job=document,
        directory=job.parent,
        allow_modules=allow_module or (),
    )
    _show(table, output)
    _report_uncalled(document)
    if num_left := num_missing(facts, table, document):
        typer.echo(
            f"{num_left} measurements were left out when {minutes:g} minutes were over; run the command again "
            "to continue."
        )


def _report_uncalled(job: Job) -> None:
    if job.data is None and unstated_calls(job.rewards, job.tool, job.workload):
        typer.echo(
            "The job has no data to call its rewards and its tool with; state their latency_seconds, or plans assume "
            "0.01 s for a reward and 0 s for a tool."
        )


def _show(table: Table, output: Path) -> None:
    failed = sum(m.status == "failed" for m in table.measurements)
    console = Console()
    console.print(
        f"{output}: {len(table.measurements)} measurements ({failed} failed) and {len(table.collectives)} collectives "
        f"on {table.provenance.device}"
    )
    if table.spread:
        console.print(
            f"repeats of a measurement spread by {table.spread:.0%} (median); a quieter machine gives a smaller spread"
        )
    for engine in table.engines or ():
        console.print(
            f"{len(engine.measurements)} measurements of {engine.engine} {engine.version} ({engine.kernels})",
            highlight=False,
            soft_wrap=True,
        )
    for one in table.calls:
        console.print(
            f"a call of {one.called.kind} {one.called.target} takes {one.latency.description}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if table.provenance.kernels:
        console.print(f"kernels: {table.provenance.kernels}", highlight=False, soft_wrap=True)
    if table.provenance.origin:
        console.print(f"from {table.provenance.origin}; training is not timed and stays analytic", soft_wrap=True)
