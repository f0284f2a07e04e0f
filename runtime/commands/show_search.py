"""The terminal output of explanations and of alternative plans. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from meshwright.planner.analysis.binding import MemoryLimited
from meshwright.planner.analysis.explain import Explanation
from meshwright.planner.analysis.sensitivity import Sensitivity
from meshwright.planner.analysis.structures import Ranked
from meshwright.planner.analysis.why import FullExplanation
from meshwright.planner.plan.plan import SearchWork
from meshwright.planner.report.words import schedule, search_work, size
from meshwright.runtime.commands.show_plans import sizes_table

_MAX_RANKS = 16
"""Largest number of rows in the table of ranks; --json has them all."""


def print_structures(rows: Sequence[Ranked], paths: Sequence[Path]) -> None:
    """Print plans of different structure with their simulated steps, and where each differs from the first."""
    table = _table(
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
    if answer.held_back:
        console.print(_held_back(answer.held_back))
    console.print(_sensitivities(answer.sensitivities))
    if answer.runners_up:
        console.print(_runners_up(answer))
    if answer.sizes:
        console.print(sizes_table(answer.sizes))
        for point in answer.sizes:
            for sentence in point.broken[:1]:
                console.print(f"{point.num_ranks} ranks: {sentence}", markup=False, soft_wrap=True)
    for sentence in (*answer.leading.sentences, *explanation.sentences):
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
    table = _table(
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
    table = _table("pools, the critical one first", "", "critical s>", "idle>", "fullest>", "free>", "stages")
    for use in explanation.pools:
        sizes = (size(use.peak_bytes), size(use.free_bytes))
        table.add_row(use.name, f"{use.critical_seconds:.3f}", f"{use.idle_share:.0%}", *sizes, "\n".join(use.stages))
    return table


def _held_back(rows: Sequence[MemoryLimited]) -> Table:
    table = _table("faster choices that memory forbids", "stage", "could be", "faster by s>", "needs more per rank>")
    for row in rows:
        choice = f"{row.layout}, {schedule(row.schedule)}"
        table.add_row(row.stage, choice, f"{row.gain_seconds:.3f}", size(row.lacking_bytes))
    table.caption = "the smallest faster choice of a stage on its ranks; every other stage is bound by time"
    return table


def _sensitivities(rows: Sequence[Sensitivity]) -> Table:
    table = _table("what the plan is sensitive to", "input", "larger by>", "period s>", "elasticity>")
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
    table = _table("what each choice gains", "choice", "runner-up", "alone s>", "searched again s>", "proven s>")
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
    table = _table("ranks", "rank>", "idle>", "peak memory>", "largest resident")
    for use in explanation.ranks[:_MAX_RANKS]:
        largest = f"{use.largest_resident} {size(use.largest_resident_bytes)}"
        table.add_row(str(use.rank), f"{use.idle_share:.0%}", size(use.peak_bytes), largest)
    return table


def _table(title: str, *headings: str) -> Table:
    """Return an empty table; a heading that ends in > marks a column of numbers."""
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in headings:
        is_number = heading.endswith(">")
        table.add_column(heading.rstrip(">"), justify="right" if is_number else "left", no_wrap=is_number)
    return table


def _differences(first: Ranked, other: Ranked) -> list[str]:
    pairs = ((name, first.plan.placement(name), other.plan.placement(name)) for name in first.plan.graph.names)
    return [
        f"{name} {other_placement.layout}"
        for name, first_placement, other_placement in pairs
        if first_placement.layout != other_placement.layout
    ]
