"""The terminal output of plans. Nothing is computed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from meshwright.planner.analysis.optional_features import (
    adapter_summary,
    best_samples,
    call_latencies,
    engine_choice,
    host_rewards,
    quantised_copy,
    sampling_mask,
    skipped_logprobs,
)
from meshwright.planner.analysis.plan_summary import NextLayout, PlanSummary
from meshwright.planner.analysis.wave_size import sampled_waves
from meshwright.planner.plan.evaluate import fullest_rank, items
from meshwright.planner.plan.plan import Plan, Refit, Solver
from meshwright.planner.report.formatting import ranks, schedule, search_work, size
from meshwright.planner.search.no_plan import NoPlan
from meshwright.profiles.model_shape import run_violations
from meshwright.profiles.stages import Role

_MAX_PARTS = 8
"""Largest number of rows in the table of memory by part; --json has them all."""


def print_plan(plan: Plan, path: Path) -> None:
    """Print the plan as a table, and its bound."""
    console = Console()
    cluster = plan.facts.cluster
    table = Table(title=f"plan for {cluster.name}", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("start s", "seconds", "task", "pool", "layout", "schedule"):
        table.add_column(heading, no_wrap=heading != "schedule", overflow="fold")
    table.columns[0].justify = table.columns[1].justify = "right"
    for item in sorted(items(plan), key=lambda item: item.start_seconds):
        timing = (f"{item.start_seconds:.3f}", f"{item.cost.total:.3f}")
        if isinstance(item, Refit):
            table.add_row(*timing, "refit", "", f"to {item.target}", f"from {item.source}")
            continue
        names = ranks(plan.pool_of(item.stage).ranks)
        schedule_text = schedule(item.schedule) + (f", {item.steps_ahead} ahead" if item.steps_ahead else "")
        table.add_row(*timing, item.stage, names, str(item.layout), schedule_text)
    ahead = "; ahead counts steps before training" if any(plan.ahead.values()) else ""
    table.caption = f"rows and tokens are per micro-batch{ahead}"
    console.print(table)
    console.print(_bound_sentence(plan))
    console.print(search_work(plan.solver.work))
    rewards, latencies = host_rewards(plan), call_latencies(plan.facts)
    for analysis in (
        engine_choice(plan),
        adapter_summary(plan),
        adapter_summary(plan, Role.CRITIC),
        quantised_copy(plan),
        skipped_logprobs(plan),
        sampling_mask(plan),
        rewards,
        latencies,
        sampled_waves(plan),
        best_samples(plan),
    ):
        for sentence in analysis.sentences if analysis else ():
            console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    specs = plan.facts.models.by_name.values()
    for sentence in dict.fromkeys(sentence for spec in specs for sentence in run_violations(spec)):
        console.print(f"note: {sentence}", markup=False, highlight=False, soft_wrap=True)
    rank = fullest_rank(cluster, plan.peak_bytes_per_rank)
    peak, usable = plan.peak_bytes_per_rank[rank], cluster.usable_bytes(rank)
    console.print(f"fullest rank {size(peak)} of {size(usable)} usable; written to {path}")


def print_summary(summary: PlanSummary) -> None:
    """Print the memory of the fullest rank by part, the next best layouts, and the GPU-hours of a number of steps."""
    console = Console()
    console.print(_memory_parts(summary))
    console.print(_next_layouts(summary.next_layouts))
    console.print(summary.cost.sentence, markup=False, highlight=False, soft_wrap=True)


def _memory_parts(summary: PlanSummary) -> Table:
    table = titled_table(f"memory of rank {summary.rank}, the fullest", "bytes>", "part", "stage", "when")
    for part in summary.memory[:_MAX_PARTS]:
        when = "always" if part.stays else "while it runs"
        table.add_row(size(part.num_bytes), part.what, part.stage, when)
    if len(summary.memory) > _MAX_PARTS:
        rest = summary.memory[_MAX_PARTS:]
        table.add_row(size(sum(part.num_bytes for part in rest)), f"{len(rest)} smaller parts", "", "")
    return table


def _next_layouts(rows: Sequence[NextLayout]) -> Table:
    table = titled_table("next best layouts", "stage", "layout", "next best", "added s>", "why not")
    for row in rows:
        instead = "-" if row.instead is None else str(row.instead)
        step = "-" if row.step_seconds is None else f"{row.step_seconds:+.3f}"
        table.add_row(row.stage, str(row.layout), instead, step, row.reason)
    table.caption = "on the same ranks, everything else unchanged"
    return table


def titled_table(title: str, *headings: str) -> Table:
    """Return an empty table; a heading that ends in > marks a column of numbers."""
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in headings:
        is_number = heading.endswith(">")
        table.add_column(heading.rstrip(">"), justify="right" if is_number else "left", no_wrap=is_number)
    return table


def print_to_stderr(sentence: str) -> None:
    """Print a sentence on standard error."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(sentence, markup=False)


def print_no_plan(answer: NoPlan) -> None:
    """Print the binding limits, and the smallest changes that make the job feasible."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("[bold red]no plan fits.[/]" if answer.status == "infeasible" else "[bold red]no plan found.[/]")
    for limit in answer.limits:
        console.print(f"  {limit.sentence}", markup=False)
    if answer.changes:
        console.print("any one of these changes makes a plan possible:")
    for change in answer.changes:
        console.print(f"  {change.sentence}", markup=False)


def print_search_stopped(plan: Plan, path: Path) -> None:
    """Print that a search stopped on request, and how to continue it."""
    print_to_stderr(
        f"stopped: {path} is the best plan so far, proven to be within {plan.solver.gap:.1%} of the best; "
        f"--from {path} continues from it."
    )


def _bound_sentence(plan: Plan) -> str:
    """The step time, how far it can be from the best, and where the costs come from."""
    solver: Solver = plan.solver
    if solver.gap:
        request = "; --gap 0 searches to optimality" if solver.requested_gap else ""
        proven = (
            f"at most {solver.gap:.1%} slower than the best plan in the space "
            f"(bound {solver.bound_seconds:.3f} s{request})"
        )
    else:
        proven = "the fastest plan in the space"
    return f"step {plan.period_seconds:.3f} s, by this cost model {proven}\n{_cost_sources(plan)}"


def _cost_sources(plan: Plan) -> str:
    """Return the number of costs of the plan by source."""
    sources = Counter(item.cost.source for item in items(plan))
    if set(sources) == {"analytic"}:
        return (
            f"all {sources.total()} costs come from equations and none was measured; `meshwright profile` measures them"
        )
    return "costs: " + ", ".join(f"{count} {source}" for source, count in sorted(sources.items()))
