"""The terminal output that compares plans: two plans, or the best plans of several cluster sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from meshwright.planner.analysis.fit import Fit
from meshwright.planner.analysis.pareto import SizePoint
from meshwright.planner.analysis.two_plans import PlanComparison, StagePlacement
from meshwright.planner.report.words import difference, schedule, size

_MAX_FACTS = 20
"""Largest number of printed differences between two jobs; --json has them all."""


def print_comparison(comparison: PlanComparison, one: str, other: str) -> None:
    """Print the key numbers of two plans, the stages that they place differently, and how their jobs differ."""
    console = Console()
    console.print(_numbers(comparison, one, other))
    console.print(_stages(comparison, one, other))
    for fact in comparison.facts[:_MAX_FACTS]:
        console.print(f"{fact.describe(one, other)}", markup=False, soft_wrap=True)
    if len(comparison.facts) > _MAX_FACTS:
        console.print(f"and {len(comparison.facts) - _MAX_FACTS} more; --json has them all.")
    for note in comparison.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def print_fit(fit: Fit, plot: Path | None) -> None:
    """Print the smallest number of devices that fits, and a row for each size that was planned."""
    console = Console(soft_wrap=True)
    if fit.least_ranks is None:
        Console(stderr=True, soft_wrap=True).print(
            f"[bold red]no plan fits[/] on up to {fit.most_ranks} devices; `meshwright plan` lists the binding limits."
        )
        return
    console.print(f"a plan fits on {fit.least_ranks} devices, and on none of the smaller sizes that were tried")
    console.print(sizes_table(fit.points))
    for point in fit.points:
        for sentence in point.broken[:1]:
            console.print(f"{point.num_ranks}: {sentence}", markup=False)
    if plot:
        console.print(f"plot in {plot}; open it in a browser")


def sizes_table(points: Sequence[SizePoint]) -> Table:
    """Return a table with a row for each number of GPUs, and the Pareto fronts that it is on."""
    table = _table("GPUs>", "step s>", "tokens/s>", "free GiB>", "host GiB>", "GPU-hours>", "money>", "fronts")
    for point in points:
        outlook = point.outlook
        if outlook is None:
            table.add_row(str(point.num_ranks), *("-",) * 6, "no plan")
            continue
        on = (("GPUs", point.is_on_front_of_gpus), ("money", point.is_on_front_of_money))
        money = "-" if outlook.money is None else f"{outlook.money:,.2f}"
        numbers = (
            f"{outlook.step_seconds:.3f}",
            f"{outlook.tokens_per_second:,.0f}",
            f"{outlook.headroom_bytes / 2**30:.1f}",
            f"{outlook.host_bytes / 2**30:.1f}",
            f"{outlook.gpu_hours:,.1f}",
        )
        table.add_row(str(point.num_ranks), *numbers, money, ", ".join(name for name, is_on in on if is_on))
    table.title = "other numbers of GPUs"
    table.caption = (
        "re-planned at each size; free: on the fullest rank; host: offloaded to the memory of the fullest node; "
        "GPU-hours and money of 1000 steps; fronts: no size is better in both"
    )
    return table


def _numbers(comparison: PlanComparison, first_name: str, second_name: str) -> Table:
    table = _table("", "step s>", "tokens/s>", "idle>", "free>", "GPU-hours of 1000 steps>")
    for name, row in ((first_name, comparison.one), (second_name, comparison.other)):
        table.add_row(
            name,
            f"{row.step_seconds:.3f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.idle_share:.0%}",
            size(row.headroom_bytes),
            f"{row.gpu_hours:,.1f}",
        )
    share = comparison.difference.step_seconds / comparison.one.step_seconds
    table.caption = f"the step of {second_name} is {difference(share)} that of {first_name}"
    return table


def _stages(comparison: PlanComparison, first_name: str, second_name: str) -> Table:
    table = _table("stage", "plan", "seconds>", "pool", "layout", "schedule")
    for row in comparison.stages:
        if _choice(row.one) == _choice(row.other):
            assert row.one is not None
            table.add_row(row.stage, "both", *_cells(row.one))
            continue
        for place, (name, placed) in enumerate(((first_name, row.one), (second_name, row.other))):
            table.add_row("" if place else row.stage, name, *(_cells(placed) if placed else ("-",) * 4))
    return table


def _choice(placed: StagePlacement | None) -> object:
    """Return all choices of a placement, without its seconds."""
    return placed and (placed.pool, placed.layout, placed.schedule, placed.steps_ahead)


def _cells(placed: StagePlacement) -> tuple[str, ...]:
    ahead = f", {placed.steps_ahead} ahead" if placed.steps_ahead else ""
    return f"{placed.seconds:.3f}", placed.pool.range_text, str(placed.layout), schedule(placed.schedule) + ahead


def _table(*headings: str) -> Table:
    """Return an empty table; a heading that ends in > marks a column of numbers."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading.rstrip(">"), justify="right" if heading.endswith(">") else "left", overflow="fold")
    return table
