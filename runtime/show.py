"""How answers look on a terminal. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshwright.cost_models.cost import Cost, Source
from meshwright.planner.plan import Plan, Solver
from meshwright.planner.refusal import NoPlan
from meshwright.runtime.record import RunSummary

_GIB = 2**30


def plan(found: Plan, path: Path) -> None:
    """The plan as a table, and how good it is."""
    console = Console()
    table = Table(title=f"plan for {found.facts.cluster.num_ranks} x {found.facts.cluster.device.name}")
    for heading in ("stage", "ranks", "layout", "schedule", "start s", "seconds", "source"):
        table.add_column(heading, justify="right" if heading in ("start s", "seconds") else "left")
    for refit in found.refits:
        name = f"refit {refit.role.value}"
        table.add_row(name, "", f"{refit.source} -> {refit.target}", "", *_timing(refit.start_seconds, refit.cost))
    for placement in sorted(found.placements, key=lambda p: p.start_seconds):
        ranks = found.pool(placement.pool).ranks
        schedule = placement.schedule
        words = [
            f"{schedule.generation_slots} slots"
            if schedule.generation_slots
            else f"micro-batch {schedule.micro_batch_size}"
        ]
        if schedule.recompute.value != "none":
            words.append(f"recompute {schedule.recompute.value}")
        table.add_row(
            placement.stage,
            f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0]),
            str(placement.layout),
            ", ".join(words),
            *_timing(placement.start_seconds, placement.cost),
        )
    console.print(table)
    console.print(_proof(found))
    fullest = max(found.peak_bytes_per_rank)
    console.print(
        f"fullest rank {_size(fullest)} of {_size(found.facts.cluster.device.memory_bytes)}; written to {path}"
    )


def no_plan(answer: NoPlan) -> None:
    """What binds, and the smallest changes that leave a plan."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("[bold red]no plan fits.[/]" if answer.status == "infeasible" else "[bold red]no plan found.[/]")
    for limit in answer.limits:
        console.print(f"  {limit.sentence}", markup=False)
    if answer.changes:
        console.print("any one of these changes leaves a plan:")
    for change in answer.changes:
        console.print(f"  {change.sentence}", markup=False)


def run_summary(summary: RunSummary, out: Path) -> None:
    """Predicted beside measured seconds, and what training did to held-out prompts."""
    console = Console()
    table = Table(title=f"predicted and measured seconds per step, {summary.steps} steps")
    for heading in ("", "predicted s", "measured s", "error"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in summary.comparisons:
        difference = f"{row.error:+.0%}" if row.measured_seconds else ""
        table.add_row(row.name, f"{row.predicted_seconds:.3f}", f"{row.measured_seconds:.3f}", difference)
    console.print(table)
    console.print(f"{summary.tokens_per_second:.0f} response tokens/s (median)")
    for evaluation in summary.evaluations:
        console.print(
            f"held-out reward after {evaluation.step} updates: {evaluation.mean_score:.3f} "
            f"± {evaluation.standard_error:.3f} (standard error over {evaluation.num_prompts} prompts, "
            f"{evaluation.mean_response_tokens:.0f} tokens a response)"
        )
    improvement = summary.improvement()
    if improvement:
        rise, error = improvement
        times = f", {rise / error:.1f} standard errors" if error else ""
        console.print(f"held-out reward rose by {rise:.3f} ± {error:.3f}{times}")
    console.print(f"metrics.jsonl, trace.jsonl, trace.chrome.json, summary.json and checkpoints are in {out}")


def _timing(start_seconds: float, cost: Cost) -> tuple[str, str, str]:
    return f"{start_seconds:.3f}", f"{cost.total:.3f}", cost.source.value


def _proof(found: Plan) -> str:
    solver: Solver = found.solver
    guessed = sorted({p.stage for p in found.placements if p.cost.source is Source.EXTRAPOLATED})
    text = (
        f"step {found.period_seconds:.3f} s; {solver.status}: no plan in the space is faster than "
        f"{solver.bound_seconds:.3f} s (gap {solver.gap:.1%})"
    )
    return text + (f"; extrapolated: {', '.join(guessed)}" if guessed else "")


def _size(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
