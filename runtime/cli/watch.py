"""The command that follows a run by reading its directory, and the tables that the command shows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from meshwright.planner.job.evaluation import title_of_set
from meshwright.planner.report.formatting import count, difference, percent, seconds
from meshwright.runtime.cli.options import AsJson, finite
from meshwright.runtime.records.run_status import RunStatus, StatusReader
from meshwright.runtime.records.version_gap import KL_ERROR, KL_TO_TEACHERS, PROB_ERROR

_SIGNALS = (
    ("score", "reward"),
    ("kl_to_teachers", "KL to the teachers per response, k1"),
    (KL_TO_TEACHERS, "KL to the teachers per token, k1"),
    ("kl_to_ref", "KL to the reference per response, k1"),
    ("kl_to_ref_per_token", "KL to the reference per token, k1"),
    ("entropy", "entropy"),
    ("approx_kl", "KL per update, k3"),
    ("clip_fraction", "clip fraction"),
    ("actor_grad_norm", "actor gradient norm"),
    ("explained_variance", "explained variance"),
    ("response_tokens", "response tokens"),
    ("truncated_fraction", "truncated fraction"),
    (PROB_ERROR, f"generator against trainer, {PROB_ERROR}"),
    (KL_ERROR, f"generator against trainer, {KL_ERROR}"),
)
"""The training metrics that are shown, and their labels."""

_FAULT_THRESHOLDS = {PROB_ERROR: 1.05, KL_ERROR: 0.02}
"""Thresholds above which generator and trainer disagree, from NeMo-RL's tests."""

_MAX_CAUSES, _MIN_SHARE = 4, 0.001
"""Limits on the causes of idle time that are shown: their number, and the share of the time that each takes."""

_MIN_STEP_SHARE = 0.01
"""Share of a step below which no error is shown."""


def run_view(status: RunStatus) -> RenderableType:
    """The tables of a run's recent steps."""
    if not status.num_recent:
        return Text(f"{status.directory}: {_state(status)}, no step has been finished yet")
    return Group(Text(_head(status)), _times(status), _uses(status), _signals(status), *_held_out(status))


def _state(status: RunStatus) -> str:
    return "running" if status.is_running else "not running"


def _head(status: RunStatus) -> str:
    assert status.step_seconds is not None
    assert status.tokens_per_second is not None
    assert status.quiet_seconds is not None
    metrics = status.training_metrics
    staleness = (
        f"; staleness {metrics['staleness']:.2f} on average, {metrics['max_staleness']:.0f} at most, "
        f"{status.staleness_bound} allowed"
        if "staleness" in metrics
        else ""
    )
    return (
        f"{status.directory}: {_state(status)}, {status.updates} steps, the last "
        f"{status.quiet_seconds:.0f} s ago\n"
        f"{count(status.tokens_per_second)} response tokens/s, step {seconds(status.step_seconds)}, planned "
        f"{seconds(status.plan_seconds)} (last {status.num_recent} steps){staleness}"
    )


def _times(status: RunStatus) -> Table:
    table = Table(title="seconds of a step", box=box.SIMPLE)
    for heading in ("", "predicted", "measured", "error"):
        table.add_column(heading, justify="right" if heading else "left")
    min_seconds = _MIN_STEP_SHARE * max(row.measured_seconds for row in status.comparisons)
    for row in status.comparisons:
        error = difference(row.error) if row.measured_seconds > min_seconds else ""
        table.add_row(row.name, f"{row.predicted_seconds:.3f}", f"{row.measured_seconds:.3f}", error)
    return table


def _uses(status: RunStatus) -> Table:
    table = Table(title="idle time", box=box.SIMPLE)
    for heading in ("", "idle", "waiting for"):
        table.add_column(heading, justify="right" if heading == "idle" else "left")
    for use in status.uses[:1] + tuple(use for use in status.uses[1:] if use.ranks != status.uses[0].ranks):
        causes = [f"{one.what} {percent(one.share)}" for one in use.waits[:_MAX_CAUSES] if one.share >= _MIN_SHARE]
        table.add_row(use.name, percent(use.idle_share), ", ".join(causes) or "-")
    return table


def _signals(status: RunStatus) -> Table:
    table = Table(title=f"training, mean of {status.num_recent} steps", box=box.SIMPLE)
    for heading in ("", "mean", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for name, label in _SIGNALS:
        if name in status.training_metrics:
            table.add_row(label, f"{status.training_metrics[name]:.4g}", _disagreement(name, status.training_metrics))
    return table


def _disagreement(name: str, metrics: Mapping[str, float]) -> str:
    threshold = _FAULT_THRESHOLDS.get(name)
    return f"above {threshold:g}: they disagree" if threshold is not None and metrics[name] > threshold else ""


def _held_out(status: RunStatus) -> Iterator[Text]:
    for name, found in status.held_out.items():
        first, last = found[0], found[-1]
        metric, sign = ("KL to the teachers per token", -1) if last.get("by_teachers") else ("reward", 1)
        yield Text(
            f"{title_of_set(name)} {metric} after {last['step']:.0f} updates: {sign * last['mean_score']:.3f} ± "
            f"{last['standard_error']:.3f}, {sign * first['mean_score']:.3f} at the first evaluation"
        )


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
    status = watcher.read()
    if as_json:
        typer.echo(json.dumps(_plain(status), indent=2, sort_keys=True))
    elif once or not console.is_terminal:
        console.print(run_view(status))
    else:
        _follow(watcher, status, every, console)


def _follow(watcher: StatusReader, status: RunStatus, every: float, console: Console) -> None:
    with Live(run_view(status), console=console, auto_refresh=False) as live:
        try:
            while status.is_running:
                time.sleep(every)
                status = watcher.read()
                live.update(run_view(status), refresh=True)
        except KeyboardInterrupt:
            return


def _plain(status: RunStatus) -> dict[str, object]:
    """Return the state as plain data, each comparison with its error."""
    rows = [asdict(row) | {"error": row.error if row.measured_seconds else None} for row in status.comparisons]
    return asdict(status) | {"comparisons": rows}
