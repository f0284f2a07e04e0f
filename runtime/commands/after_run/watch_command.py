"""The command that shows a run while it goes on: looks at its directory again and again, and asks nothing of it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from meshwright.runtime.commands.after_run.show_watch import view
from meshwright.runtime.commands.options import AsJson, finite
from meshwright.runtime.records.run_standing import RunStanding, Watching

EXAMPLES = """Example: meshwright watch run

meshwright watch run --once --json
"""


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The --out of a `meshwright run`.")],
    once: Annotated[bool, typer.Option("--once", help="Show it as it stands and end.")] = False,
    every: Annotated[
        float, typer.Option(min=0.1, max=3600, callback=finite, help="Seconds from one look to the next.")
    ] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Show a run as it goes on: throughput, predicted beside measured, staleness, idle time, reward, KL.

    It reads what the run writes, on this machine or over a file system, and ends when the run does or by Ctrl-C. With
    --json it prints the standing once.
    """
    watching, console = Watching(run), Console()
    standing = watching.look()
    if as_json:
        typer.echo(json.dumps(_told(standing), indent=2, sort_keys=True))
    elif once or not console.is_terminal:
        console.print(view(standing))
    else:
        _follow(watching, standing, every, console)


def _follow(watching: Watching, standing: RunStanding, every: float, console: Console) -> None:
    with Live(view(standing), console=console, auto_refresh=False) as live:
        try:
            while standing.is_running:
                time.sleep(every)
                standing = watching.look()
                live.update(view(standing), refresh=True)
        except KeyboardInterrupt:
            return


def _told(standing: RunStanding) -> dict[str, object]:
    """The answer as plain data, each comparison with its error."""
    rows = [asdict(row) | {"error": row.error if row.measured_seconds else None} for row in standing.comparisons]
    return asdict(standing) | {"comparisons": rows}
