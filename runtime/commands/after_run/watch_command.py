"""The command that follows a run by reading its directory."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from meshwright.runtime.commands.after_run.show_watch import run_view
from meshwright.runtime.commands.options import AsJson, finite
from meshwright.runtime.records.run_standing import RunStatus, StatusReader

EXAMPLES = """Example: meshwright watch run

meshwright watch run --once --json
"""


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The --out of a `meshwright run`.")],
    once: Annotated[bool, typer.Option("--once", help="Show the current state once and exit.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=3600, callback=finite, help="Seconds between updates.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Follow a run: throughput, predicted and measured times, staleness, idle time, reward, KL.

    It reads the files of the run, on this machine or a shared file system, and ends with the run or on Ctrl-C. --json
    prints the current state once.
    """
    watcher, console = StatusReader(run), Console()
    standing = watcher.read()
    if as_json:
        typer.echo(json.dumps(_plain(standing), indent=2, sort_keys=True))
    elif once or not console.is_terminal:
        console.print(run_view(standing))
    else:
        _follow(watcher, standing, every, console)


def _follow(watcher: StatusReader, standing: RunStatus, every: float, console: Console) -> None:
    with Live(run_view(standing), console=console, auto_refresh=False) as live:
        try:
            while standing.is_running:
                time.sleep(every)
                standing = watcher.read()
                live.update(run_view(standing), refresh=True)
        except KeyboardInterrupt:
            return


def _plain(standing: RunStatus) -> dict[str, object]:
    """Return the state as plain data, each comparison with its error."""
    rows = [asdict(row) | {"error": row.error if row.measured_seconds else None} for row in standing.comparisons]
    return asdict(standing) | {"comparisons": rows}
