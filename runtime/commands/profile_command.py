"""The command that makes a table, by measuring here or of operators that others have measured."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwright.planner.plan.job import read_job, resolve
from meshwright.profiles.errors import BadInput
from meshwright.profiles.table import Table
from meshwright.runtime.api.measuring import num_missing
from meshwright.runtime.api.measuring import profile as measured
from meshwright.runtime.commands.import_operators import import_table
from meshwright.runtime.commands.options import finite
from meshwright.runtime.records.outputs import Output, OutputKind, require_outputs

EXAMPLES = "Example: meshwright profile examples/tiny/job.yaml -o table.json --minutes 1"

_KINDS = ("cpu", "cuda")


class From(StrEnum):
    """Where a table comes from that is not measured here."""

    AICONFIGURATOR = "aiconfigurator"


def profile(
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the table goes.")],
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB.yaml", help="Whose shapes are timed; may be left out with --from.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu or cuda; with --from a name such as h200_sxm. By default what the job's cluster is made of."
        ),
    ] = None,
    source: Annotated[
        From | None,
        typer.Option(
            "--from",
            help="Measure nothing: put forward, prefill and decode together from operators that NVIDIA measured (pip "
            "install 'meshwright\\[aiconfigurator]'); training stays analytic. Without a job, for the dense models "
            "that the package names.",
        ),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(min=0.05, max=10_000, callback=finite, help="Time to spend; what is left out is extrapolated."),
    ] = 2.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; drop what earlier calls measured.")] = False,
) -> None:
    """Time the job's stage bodies and collectives on this machine; a call that was cut off is continued."""
    require_outputs(Output("-o", output, OutputKind.TABLE), inputs=(job,))
    if source is not None:
        _show(import_table(job, device, output, fresh=fresh), output)
        return
    if job is None:
        raise BadInput("name a job.yaml, whose shapes are timed; only --from makes a table without one.")
    if device is not None and device not in _KINDS:
        raise BadInput(
            f"--device {device!r} is not cpu or cuda; the name of a device goes with --from aiconfigurator, which "
            "measures nothing here."
        )
    facts = resolve(read_job(job), job.parent)
    table = measured(facts, output, minutes=minutes, device=device, fresh=fresh)
    _show(table, output)
    if left := num_missing(facts, table):
        typer.echo(f"{left} measurements were left out when {minutes:g} minutes were over; call again to go on.")


def _show(table: Table, output: Path) -> None:
    failed = sum(m.status == "failed" for m in table.measurements)
    console = Console()
    console.print(
        f"{output}: {len(table.measurements)} measurements ({failed} failed) and {len(table.collectives)} collectives "
        f"on {table.provenance.device}"
    )
    if table.spread:
        console.print(
            f"repeats of a measurement spread by {table.spread:.0%} (median); the quieter the machine, the less"
        )
    if table.provenance.origin:
        console.print(f"from {table.provenance.origin}; training is not among them and stays analytic", soft_wrap=True)
