"""How answers about time look on a terminal: simulations, rehearsals and what-ifs. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from meshwright.planner.simulate import Share, Simulation, Use

_MOST_CAUSES = 3
_LEAST_SHARE = 0.001
"""Smaller shares of the time are left out of the tables; --json has them all."""


def simulation(found: Simulation, trace: Path | None) -> None:
    """Step times, and idle time by cause."""
    console = Console()
    steps = found.steps
    console.print(f"[bold]SIMULATED[/] {len(steps.seconds)} steps with {found.durations} durations")
    console.print(
        f"step: mean {steps.mean:.3f} s, median {steps.p50:.3f} s, p90 {steps.p90:.3f} s, p99 {steps.p99:.3f} s; "
        f"the plan says {found.plan_seconds:.3f} s ({steps.mean / found.plan_seconds - 1:+.1%})"
    )
    console.print(f"{found.tokens_per_second:.0f} response tokens/s")
    console.print(_uses("SIMULATED pools", found.pools))
    idlest = max(found.ranks, key=lambda use: use.idle_share)
    console.print(f"idlest: {idlest.name}, {idlest.idle_share:.1%}, waiting for {_largest(idlest.waits)}")
    if trace:
        console.print(f"timeline in {trace}; open it in Perfetto")


def _uses(title: str, uses: Sequence[Use]) -> Table:
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("", "idle", "waiting for", "busy with"):
        table.add_column(heading, justify="right" if heading == "idle" else "left")
    for use in uses:
        table.add_row(use.name, f"{use.idle_share:.1%}", _largest(use.waits), _largest(use.busy))
    return table


def _largest(shares: Sequence[Share]) -> str:
    kept = [share for share in shares[:_MOST_CAUSES] if share.share >= _LEAST_SHARE]
    return ", ".join(f"{share.what} {share.share:.1%}" for share in kept) or "-"
