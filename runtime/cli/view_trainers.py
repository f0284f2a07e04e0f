"""The terminal output about configurations of other trainers. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from meshwright.planner.analysis.whatif import plan_metrics
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report.formatting import difference, percent
from meshwright.planner.trainers.exporter import Exported
from meshwright.planner.trainers.importer import Imported
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.untrusted_text import without_long_words

_MAX_CLAUSES = 12
"""The maximum number of choices without a setting that are printed; export.json has them all."""


def print_export(exported: Exported, output: Path) -> None:
    """Print what was written, the choices that the trainer has no setting for, and what that costs."""
    console = Console(soft_wrap=True, highlight=False)
    step_seconds = exported.plan.period_seconds
    console.print(f"{exported.trainer}, {exported.mode}: step {step_seconds:.3f} s, predicted", markup=False)
    if exported.inexpressible:
        plan_seconds = step_seconds - exported.lost_seconds
        console.print(
            f"{exported.trainer} has no setting for {len(exported.inexpressible)} of the plan's choices; the best plan "
            f"that it has settings for is written, with a step "
            f"{difference(exported.lost_seconds / plan_seconds)} that of the plan "
            f"({plan_seconds:.3f} s):"
        )
        for clause in exported.inexpressible[:_MAX_CLAUSES]:
            console.print(f"- {clause}", markup=False)
        if len(exported.inexpressible) > _MAX_CLAUSES:
            console.print(f"- and {len(exported.inexpressible) - _MAX_CLAUSES} more; export.json has them all")
    for remark in exported.remarks:
        console.print(f"note: {remark}", markup=False)
    for name in (*exported.files, "export.json"):
        console.print(str(output / name), markup=False)


def print_configuration(imported: Imported, trainer: str) -> None:
    """Print the keys that decide the plan, the step as configured, and the steps of better plans."""
    console = Console(soft_wrap=True, highlight=False)
    console.print("settings that decide the plan:")
    for setting in imported.deciding:
        others = f" and {len(setting.keys) - 1} more" if len(setting.keys) > 1 else ""
        console.print(f"  {setting.what} = {setting.value}  ({setting.keys[0]}{others})", markup=False)
    steps = _table("predicted", "", "step s", "difference", "generation", "idle")
    best_missing = "not found in time" if imported.timed_out else "no plan fits"
    rows = (
        ("as configured", imported.plan, "does not fit"),
        (f"best within the settings of {trainer}", imported.best_in_trainer, "none found"),
        ("best of all", imported.best, best_missing),
    )
    for name, plan, reason_missing in rows:
        steps.add_row(name, *(_numbers(plan, imported.plan) if plan else (reason_missing, "", "", "")))
    console.print(steps)
    for note in imported.notes:
        console.print(without_long_words(f"note: {note}"), markup=False)
    for key, reason in imported.named.items():
        console.print(without_long_words(f"not read: {key}: {reason}"), markup=False)
    if imported.unread:
        console.print(f"keys that a plan does not depend on: {', '.join(imported.unread)}", markup=False)


def _numbers(plan: Plan, baseline: Plan | None) -> tuple[str, ...]:
    generation = plan.placement(GENERATE).cost.total / plan.period_seconds
    change = difference(plan.period_seconds / baseline.period_seconds - 1) if baseline else ""
    return f"{plan.period_seconds:.3f}", change, percent(generation), percent(plan_metrics(plan).idle_share)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
