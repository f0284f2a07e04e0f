"""The progress of a search on standard error: one changing line on a terminal, or lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from meshwright.planner.search.progress import ProgressCallback, SearchProgress


@contextmanager
def show_search_progress(began: float, *, as_json: bool) -> Iterator[ProgressCallback | None]:
    """Yield the progress callback of a search that started at `began` (seconds of `time.monotonic`).

    None if standard error is not a terminal and `as_json` is False. No thread is started, because a search forks a
    second process only in a program without threads.
    """
    console = Console(stderr=True)
    if as_json:
        yield lambda now: typer.echo(progress_json(now, time.monotonic() - began), err=True)
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
            yield lambda now: live.update(Text(progress_line(now, time.monotonic() - began)), refresh=True)
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
    """Return the progress as a line to read."""
    activity = {"costing": "costing stage", "searching": "searching case"}[state.phase]
    progress = f"{seconds:5.1f} s  {activity} {min(state.done + 1, state.total)} of {state.total}"
    if state.period_seconds is None:
        return f"{progress}: no plan yet"
    return f"{progress}: step {state.period_seconds:.3f} s, none below {state.bound_seconds:.3f} s, gap {state.gap:.1%}"
