"""The terminal output of comparisons, explanations, plans on several numbers of GPUs and plans of different structure.
Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from meshwright.planner.analysis.alternatives import MemoryLimited
from meshwright.planner.analysis.cluster_sizing import Fit, SizePoint
from meshwright.planner.analysis.explain import Explanation
from meshwright.planner.analysis.full_explanation import FullExplanation
from meshwright.planner.analysis.plan_comparison import PlanComparison, StagePlacement
from meshwright.planner.analysis.plan_structures import Ranked
from meshwright.planner.analysis.sensitivity import Sensitivity
from meshwright.planner.analysis.sweep import Sweep
from meshwright.planner.plan.plan import SearchWork
from meshwright.planner.report.formatting import schedule, search_work, size
from meshwright.planner.report.formatting import setting as setting_text
from meshwright.runtime.cli.view_plan import print_summary, titled_table

_MAX_FACTS = 20
"""Largest number of printed differences between two jobs; --json has them all."""

_MAX_PARTS = 8
"""Largest number of rows in the table of memory that differs; --json has them all."""


def print_comparison(comparison: PlanComparison, one: str, other: str) -> None:
    """Print the key numbers of two plans, the stages that they place differently, and how their jobs differ."""
    console = Console()
    console.print(_numbers(comparison, one, other))
    console.print(_stages(comparison, one, other))
    for sentence in comparison.sentences:
        console.print(sentence, markup=False, soft_wrap=True)
    if comparison.memory:
        console.print(_memory_changes(comparison, one, other))
    for fact in comparison.facts[:_MAX_FACTS]:
        console.print(f"{fact.describe(one, other)}", markup=False, soft_wrap=True)
    if len(comparison.facts) > _MAX_FACTS:
        console.print(f"and {len(comparison.facts) - _MAX_FACTS} more; --json has them all.")
    for note in comparison.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def print_fit(fit: Fit, plot: Path | None) -> None:
    """Print the smallest number of devices that fits, and a row for each size that was planned."""
    console = Console(soft_wrap=True)
    if fit.min_ranks is None:
        Console(stderr=True, soft_wrap=True).print(
            f"[bold red]no plan fits[/] on up to {fit.max_ranks} devices; `meshwright plan` lists the binding limits."
        )
        return
    console.print(f"a plan fits on {fit.min_ranks} devices, and on none of the smaller sizes that were tried")
    console.print(sizes_table(fit.points))
    for point in fit.points:
        for sentence in point.violations[:1]:
            console.print(f"{point.num_ranks}: {sentence}", markup=False)
    if plot:
        console.print(f"plot in {plot}; open it in a browser")


def print_sweep(sweep: Sweep, path: Path | None = None) -> None:
    """Print a row for each point of a sweep, the cheapest first, and why some have no plan; and the file, if any, to
    which it is written."""
    console = Console()
    table = _table("", "GPUs>", "step s>", "p10>", "p90>", "GPU-hours>", "money>", "front")
    for point in sweep.by_cost:
        label = setting_text(point.setting).replace(", ", "\n")
        if point.plan is None:
            table.add_row(label, *("-",) * 6, "no plan")
            continue
        plan = point.plan
        table.add_row(
            label,
            str(plan.num_ranks),
            *(f"{seconds:.3f}" for seconds in (plan.step_seconds, *plan.ranges.step_seconds)),
            f"{plan.cost.gpu_hours:,.1f}",
            "-" if plan.cost.money is None else f"{plan.cost.money:,.2f}",
            "yes" if plan.is_on_front else "",
        )
    table.caption = (
        f"GPU-hours and money of {sweep.num_steps:,} steps; p10, p90: 8 of 10 such predictions are met by a step "
        "between them; front: no other plan is as good in step time, GPUs and GPU-hours and better in one"
    )
    console.print(table)
    for point in sweep.points:
        for sentence in point.violations[:1]:
            console.print(f"{setting_text(point.setting)}: {sentence}", markup=False, soft_wrap=True)
    if sweep.num_missing:
        num_points = len(sweep.points) + sweep.num_missing
        console.print(f"stopped: {sweep.num_missing} of {num_points} points are not planned.", soft_wrap=True)
    if path:
        console.print(f"written to {path}", markup=False, soft_wrap=True)


def sizes_table(points: Sequence[SizePoint]) -> Table:
    """Return a table with a row for each number of GPUs, and the Pareto fronts that it is on."""
    table = _table("GPUs>", "step s>", "tokens/s>", "free GiB>", "host GiB>", "GPU-hours>", "money>", "fronts")
    for point in points:
        metrics = point.metrics
        if metrics is None:
            table.add_row(str(point.num_ranks), *("-",) * 6, "no plan")
            continue
        fronts = (("GPUs", point.is_on_front_of_gpus), ("money", point.is_on_front_of_money))
        money = "-" if metrics.money is None else f"{metrics.money:,.2f}"
        numbers = (
            f"{metrics.step_seconds:.3f}",
            f"{metrics.tokens_per_second:,.0f}",
            f"{metrics.headroom_bytes / 2**30:.1f}",
            f"{metrics.host_bytes / 2**30:.1f}",
            f"{metrics.gpu_hours:,.1f}",
        )
        table.add_row(str(point.num_ranks), *numbers, money, ", ".join(name for name, is_on in fronts if is_on))
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
    length = f"{abs(share):.1%} {'longer' if share > 0 else 'shorter'} than" if share else "as long as"
    table.caption = f"the step of {second_name} is {length} that of {first_name}"
    return table


def _stages(comparison: PlanComparison, first_name: str, second_name: str) -> Table:
    table = _table("stage", "plan", "seconds>", "pool", "layout", "schedule")
    for row in comparison.stages:
        if row.is_placed_alike:
            assert row.one is not None
            table.add_row(row.stage, "both", *_cells(row.one))
            continue
        for place, (name, placed) in enumerate(((first_name, row.one), (second_name, row.other))):
            table.add_row("" if place else row.stage, name, *(_cells(placed) if placed else ("-",) * 4))
    return table


def _memory_changes(comparison: PlanComparison, first_name: str, second_name: str) -> Table:
    table = titled_table(
        "memory that differs on the fullest rank", "stage", "part", f"{first_name}>", f"{second_name}>", "difference>"
    )
    for change in comparison.memory[:_MAX_PARTS]:
        difference_bytes = change.other_bytes - change.one_bytes
        sign = "+" if difference_bytes > 0 else ""
        sizes = (size(num_bytes) if num_bytes else "-" for num_bytes in (change.one_bytes, change.other_bytes))
        table.add_row(change.stage, change.what, *sizes, f"{sign}{size(difference_bytes)}")
    return table


def _cells(placed: StagePlacement) -> tuple[str, ...]:
    ahead = f", {placed.steps_ahead} ahead" if placed.steps_ahead else ""
    return f"{placed.seconds:.3f}", placed.pool.range_text, str(placed.layout), schedule(placed.schedule) + ahead


def _table(*headings: str) -> Table:
    """Return an empty table; a heading that ends in > marks a column of numbers."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading.rstrip(">"), justify="right" if heading.endswith(">") else "left", overflow="fold")
    return table


_MAX_RANKS = 16
"""Largest number of rows in the table of ranks; --json has them all."""


def print_structures(rows: Sequence[Ranked], paths: Sequence[Path]) -> None:
    """Print plans of different structure with their simulated steps, and where each differs from the first."""
    table = titled_table(
        "the best plans of different structure", "", "simulated s>", "planned s>", "gap>", "stale>", "differs in"
    )
    for path, row in zip(paths, rows, strict=True):
        plan = row.plan
        changes = "\n".join(_differences(rows[0], row)) or "-"
        seconds = (f"{row.simulated_seconds:.3f}", f"{plan.period_seconds:.3f}")
        table.add_row(path.name, *seconds, f"{plan.solver.gap:.2%}", str(plan.staleness), changes)
    table.caption = "SIMULATED: mean of 20 steps, sampled lengths; gap: to the bound on all plans"
    Console().print(table)


def print_explanation(answer: FullExplanation) -> None:
    """Print the critical path, the binding limits, the sensitivities, and what was requested in addition."""
    console = Console()
    explanation = answer.explanation
    console.print(_path(explanation))
    console.print(_pools(explanation))
    if answer.memory_limited:
        console.print(_memory_limited(answer.memory_limited))
    print_summary(answer.summary)
    console.print(_sensitivities(answer.sensitivities))
    if answer.runners_up:
        console.print(_runners_up(answer))
    if answer.sizes:
        console.print(sizes_table(answer.sizes))
        for point in answer.sizes:
            for sentence in point.violations[:1]:
                console.print(f"{point.num_ranks} ranks: {sentence}", markup=False, soft_wrap=True)
    for sentence in (*answer.main_influences.sentences, *explanation.sentences):
        console.print(sentence, markup=False, soft_wrap=True)
    console.print(_ranks(explanation))
    if len(explanation.ranks) > _MAX_RANKS:
        console.print(f"and {len(explanation.ranks) - _MAX_RANKS} more ranks; --json has them all.")
    console.print(
        f"no plan in the space is faster than {explanation.bound_seconds:.3f} s (gap {explanation.gap:.1%}, "
        f"{explanation.status})"
    )
    console.print(search_work(SearchWork.model_validate(explanation.work)))
    for what, names in (("pinned", explanation.pins), ("extrapolated costs", explanation.extrapolated)):
        if names:
            console.print(f"{what}: {', '.join(names)}")


def _path(explanation: Explanation) -> Table:
    table = titled_table(
        f"critical path of a period of {explanation.period_seconds:.3f} s",
        "start s>",
        "seconds>",
        "task",
        "because it",
        "mostly",
    )
    for wait in explanation.critical_path:
        terms = ", ".join(f"{term.name} {term.amount:.3f}" for term in wait.largest_terms)
        table.add_row(f"{wait.start_seconds:.3f}", f"{wait.seconds:.3f}", wait.task, wait.because, terms)
    return table


def _pools(explanation: Explanation) -> Table:
    table = titled_table("pools, the critical one first", "", "critical s>", "idle>", "fullest>", "free>", "stages")
    for use in explanation.pools:
        sizes = (size(use.peak_bytes), size(use.free_bytes))
        table.add_row(use.name, f"{use.critical_seconds:.3f}", f"{use.idle_share:.0%}", *sizes, "\n".join(use.stages))
    return table


def _memory_limited(rows: Sequence[MemoryLimited]) -> Table:
    table = titled_table(
        "faster choices that memory forbids", "stage", "could be", "faster by s>", "needs more per rank>"
    )
    for row in rows:
        choice = f"{row.layout}, {schedule(row.schedule)}"
        table.add_row(row.stage, choice, f"{row.gain_seconds:.3f}", size(row.lacking_bytes))
    table.caption = "the smallest faster choice of a stage on its ranks; every other stage is bound by time"
    return table


def _sensitivities(rows: Sequence[Sensitivity]) -> Table:
    table = titled_table("what the plan is sensitive to", "input", "larger by>", "period s>", "elasticity>")
    for row in rows:
        if row.period_seconds is None:
            table.add_row(row.name, f"{row.factor - 1:.0%}", "-", "the placements are no longer legal")
        else:
            table.add_row(row.name, f"{row.factor - 1:.0%}", f"{row.period_seconds:.3f}", f"{row.elasticity:+.2f}")
    table.caption = (
        "the same placements with new costs; elasticity: change of the period in % for 1 % more of the input"
    )
    return table


def _runners_up(answer: FullExplanation) -> Table:
    table = titled_table("what each choice gains", "choice", "runner-up", "alone s>", "searched again s>", "proven s>")
    alone = {one.stage: one.runners_up[0] for one in answer.alternatives if one.runners_up}
    for row in answer.runners_up:
        alternative = alone.get(row.stage or "")
        numbers = (alternative.delta_seconds if alternative else None, row.delta_seconds, row.proven_seconds)
        cells = ("-" if number is None else f"{number:+.3f}" for number in numbers)
        table.add_row(f"{row.stage or ''} {row.choice}".strip(), row.instead, *cells)
    table.caption = (
        "alone: everything else stays as it is; searched again: the best plan found without the choice; "
        "proven: what every plan without it loses"
    )
    return table


def _ranks(explanation: Explanation) -> Table:
    table = titled_table("ranks", "rank>", "idle>", "peak memory>", "largest resident")
    for use in explanation.ranks[:_MAX_RANKS]:
        largest = f"{use.largest_resident} {size(use.largest_resident_bytes)}"
        table.add_row(str(use.rank), f"{use.idle_share:.0%}", size(use.peak_bytes), largest)
    return table


def _differences(first: Ranked, other: Ranked) -> list[str]:
    pairs = ((name, first.plan.placement(name), other.plan.placement(name)) for name in first.plan.graph.names)
    return [
        f"{name} {other_placement.layout}"
        for name, first_placement, other_placement in pairs
        if first_placement.layout != other_placement.layout
    ]
