"""How what a search weighed looks on a terminal. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from meshwright.profiles.stages import STAGES

if TYPE_CHECKING:  # OR-Tools loads only when a search begins
    from meshwright.planner.structures import Ranked


def structures(rows: Sequence[Ranked], paths: Sequence[Path]) -> None:
    """The plans of different structure by their simulated step, and where each differs from the first."""
    table = Table(title="the best plans of different structure", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("", "simulated s", "planned s", "gap", "stale", "differs in"):
        table.add_column(heading, justify="left" if heading in ("", "differs in") else "right")
    for path, row in zip(paths, rows, strict=True):
        plan = row.plan
        told = "\n".join(_differences(rows[0], row)) or "-"
        seconds = (f"{row.simulated_seconds:.3f}", f"{plan.period_seconds:.3f}")
        table.add_row(path.name, *seconds, f"{plan.solver.gap:.2%}", str(plan.staleness), told)
    table.caption = "SIMULATED: mean of 20 steps with drawn lengths; gap: to the bound on all plans"
    Console().print(table)


def _differences(first: Ranked, other: Ranked) -> list[str]:
    pairs = ((stage.name, first.plan.placement(stage.name), other.plan.placement(stage.name)) for stage in STAGES)
    return [f"{name} {there.layout}" for name, here, there in pairs if here.layout != there.layout]
