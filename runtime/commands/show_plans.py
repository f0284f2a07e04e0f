"""How plans beside each other look on a terminal: two of one job, or one on each of several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from meshwright.planner.analysis.fit import Fit
from meshwright.planner.analysis.pareto import SizePoint
from meshwright.planner.analysis.two_plans import Placed, TwoPlans
from meshwright.planner.report.words import difference, schedule, size

_MOST_FACTS = 20
"""Lines of what two jobs differ in; --json has them all."""


def both(found: TwoPlans, one: str, other: str) -> None:
    """The numbers of two plans, then each stage that they place otherwise, then what their jobs differ in."""
    console = Console()
    console.print(_numbers(found, one, other))
    console.print(_stages(found, one, other))
    for fact in found.facts[:_MOST_FACTS]:
        console.print(f"{fact.between(one, other)}", markup=False, soft_wrap=True)
    if len(found.facts) > _MOST_FACTS:
        console.print(f"and {len(found.facts) - _MOST_FACTS} more; --json has them all.")
    for note in found.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def fit(found: Fit, plot: Path | None) -> None:
    """The least number of devices, and a row for each number that was planned."""
    console = Console(soft_wrap=True)
    if found.least_ranks is None:
        Console(stderr=True, soft_wrap=True).print(
            f"[bold red]no plan fits[/] on up to {found.most_ranks} devices; `meshwright plan` says what binds."
        )
        return
    console.print(f"a plan fits on {found.least_ranks} devices, and on no fewer that were looked at")
    console.print(sizes(found.points))
    for point in found.points:
        for sentence in point.broken[:1]:
            console.print(f"{point.num_ranks}: {sentence}", markup=False)
    if plot:
        console.print(f"plot in {plot}; open it in a browser")


def sizes(points: Sequence[SizePoint]) -> Table:
    """A row for each number of GPUs, and the fronts that it is on."""
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
        "planned again at each size; free: on the fullest rank; host: what waits in the memory of the fullest node; "
        "GPU-hours and money of 1000 steps; fronts: no size is better in both"
    )
    return table


def _numbers(found: TwoPlans, one: str, other: str) -> Table:
    table = _table("", "step s>", "tokens/s>", "idle>", "free>", "GPU-hours of 1000 steps>")
    for name, told in ((one, found.one), (other, found.other)):
        table.add_row(
            name,
            f"{told.step_seconds:.3f}",
            f"{told.tokens_per_second:,.0f}",
            f"{told.idle_share:.0%}",
            size(told.headroom_bytes),
            f"{told.gpu_hours:,.1f}",
        )
    share = found.difference.step_seconds / found.one.step_seconds
    table.caption = f"the step of {other} is {difference(share)} that of {one}"
    return table


def _stages(found: TwoPlans, one: str, other: str) -> Table:
    table = _table("stage", "plan", "seconds>", "pool", "layout", "schedule")
    for row in found.stages:
        if _choice(row.one) == _choice(row.other):
            assert row.one is not None
            table.add_row(row.stage, "both", *_told(row.one))
            continue
        for place, (name, placed) in enumerate(((one, row.one), (other, row.other))):
            table.add_row("" if place else row.stage, name, *(_told(placed) if placed else ("-",) * 4))
    return table


def _choice(placed: Placed | None) -> object:
    """All but the seconds."""
    return placed and (placed.pool, placed.layout, placed.schedule, placed.steps_ahead)


def _told(placed: Placed) -> tuple[str, ...]:
    ahead = f", {placed.steps_ahead} ahead" if placed.steps_ahead else ""
    return f"{placed.seconds:.3f}", placed.pool.told, str(placed.layout), schedule(placed.schedule) + ahead


def _table(*headings: str) -> Table:
    """A table; a heading that ends in > is of numbers."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading.rstrip(">"), justify="right" if heading.endswith(">") else "left", overflow="fold")
    return table
