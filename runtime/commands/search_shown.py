"""How a search goes, on standard error: a line that changes on a terminal, lines of JSON for a program."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from meshwright.planner.search.progress import Progress, Standing


@contextmanager
def search_shown(began: float, *, as_json: bool) -> Iterator[Progress | None]:
    """What to tell of a search that began at `began`, in seconds of `time.monotonic`; nothing where nobody looks.

    No thread is started: a search shares its work with a second process only in a program that has none.
    """
    console = Console(stderr=True)
    if as_json:
        yield lambda now: typer.echo(line(now, time.monotonic() - began), err=True)
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
            yield lambda now: live.update(Text(sentence(now, time.monotonic() - began)), refresh=True)
    else:
        yield None


def line(now: Standing, seconds: float) -> str:
    """One object of JSON: the seconds so far, the phase and how far it is, the best plan and the bound in seconds."""
    return json.dumps(
        {
            "seconds": round(seconds, 3),
            "phase": now.phase,
            "done": now.done,
            "total": now.total,
            "period_seconds": now.period_seconds,
            "bound_seconds": now.bound_seconds,
            "gap": now.gap,
        }
    )


def sentence(now: Standing, seconds: float) -> str:
    """The same for a reader."""
    what = {"costing": "costing stage", "searching": "searching scope"}[now.phase]
    place = f"{seconds:5.1f} s  {what} {min(now.done + 1, now.total)} of {now.total}"
    if now.period_seconds is None:
        return f"{place}: no plan yet"
    return f"{place}: step {now.period_seconds:.3f} s, none below {now.bound_seconds:.3f} s, gap {now.gap:.1%}"
