"""How exports to other trainers look on a terminal. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from meshwright.planner.export.exported import Exported
from meshwright.planner.report.words import difference

_MOST_CLAUSES = 12
"""Of what a trainer cannot say; export.json has them all."""


def export(found: Exported, output: Path) -> None:
    """What was written, what could not be said, and what that costs."""
    console = Console(soft_wrap=True, highlight=False)
    step = found.plan.period_seconds
    console.print(f"{found.trainer}, {found.way}: step {step:.3f} s, predicted", markup=False)
    if found.unsaid:
        before = step - found.lost_seconds
        console.print(
            f"it cannot say {len(found.unsaid)} of the plan's choices; the best plan that it can say is written, "
            f"with a step {difference(found.lost_seconds / before)} that of the plan ({before:.3f} s):"
        )
        for clause in found.unsaid[:_MOST_CLAUSES]:
            console.print(f"- {clause}", markup=False)
        if len(found.unsaid) > _MOST_CLAUSES:
            console.print(f"- and {len(found.unsaid) - _MOST_CLAUSES} more; export.json has them all")
    for remark in found.remarks:
        console.print(f"note: {remark}", markup=False)
    for name in (*found.files, "export.json"):
        console.print(str(output / name), markup=False)
