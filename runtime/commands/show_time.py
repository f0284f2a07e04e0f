"""How answers about time look on a terminal: simulations, rehearsals and what-ifs. Nothing is computed here."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from meshwright.planner.analysis.replan import Replanned
from meshwright.planner.analysis.whatif import Consequence, Outlook, WhatIf
from meshwright.planner.program.controllers import Setting
from meshwright.planner.report.words import size
from meshwright.planner.simulation.simulate import Simulation, TimeShare, Use
from meshwright.runtime.records.rehearsal import Rehearsal

_GIB = 2**30  # bytes
_MIB = 2**20  # bytes
_MOST_CAUSES = 3
"""Named in a cell of a table, the largest first; --json has them all."""
_BAR = 40
"""Characters of a bar that stands for all tokens."""
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
    if found.settings:
        console.print(_settings(found.settings))
    if found.staleness:
        console.print(_staleness(found))
    console.print(_uses("SIMULATED use of ranks", (found.cluster, *found.pools)))
    idlest = max(found.ranks, key=lambda use: use.idle_share)
    console.print(f"idlest: {idlest.name}, {idlest.idle_share:.1%}, waiting for {_largest(idlest.waits)}")
    if trace:
        console.print(f"timeline in {trace}; open it in Perfetto")


def replanned(found: Replanned, path: Path | None) -> None:
    """The new plan beside the old one, what moving costs and when that is earned."""
    console = Console(soft_wrap=True, highlight=False)
    new, before = found.plan.period_seconds, found.kept_seconds
    if before is None:
        console.print(f"the plan cannot go on: {found.broken}", markup=False)
    else:
        console.print(f"step {before:.3f} s as things are, with the plan as it is")
    console.print(f"step {new:.3f} s with the new plan" + (f", {new / before - 1:+.1%}" if before else ""))
    table = Table(title="what goes from rank to rank first", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("", "", "seconds"):
        table.add_column(heading, justify="left" if not table.columns else "right")
    for one in found.moving:
        table.add_row(one.what, size(one.num_bytes), f"{one.seconds:.3f}")
    console.print(table if found.moving else "nothing has to move")
    steps = found.earned_after_steps
    if before is not None:
        earned = "never earned back: stay" if steps is None else f"earned back after {steps} steps"
        console.print(f"moving takes {found.moving_seconds:.3f} s, {earned}")
    if path:
        console.print(f"written to {path}", markup=False)


def rehearsal(found: Rehearsal, trace: Path | None) -> None:
    """Rehearsed beside simulated step times, and what following the program costs by itself."""
    console = Console()
    console.print(
        f"[bold]REHEARSAL[/] of {len(found.steps.seconds)} steps with {found.durations} durations at speed "
        f"{found.speed:g}: {found.num_processes} processes, {found.ranks_per_process} ranks each; no device computed"
    )
    table = Table(title="REHEARSAL: seconds per step, in the time of the plan", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("", "mean", "median", "p99"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, steps in (("rehearsed", found.steps), ("simulated", found.simulated)):
        table.add_row(name, f"{steps.mean:.3f}", f"{steps.p50:.3f}", f"{steps.p99:.3f}")
    console.print(table)
    console.print(
        f"rehearsed against simulated: {found.error:+.1%}, which is {found.excess_seconds:.2f} s of wall time a step "
        f"for {found.message_bytes / _MIB:.1f} MiB of experience, scheduling and what else this machine does\n"
        f"processors: {found.processor_seconds:.2f} s a step, {found.processor_share:.0%} of what the "
        f"{found.num_processors} of this machine have\n"
        f"executor: {found.overhead_seconds * 1e3:.3f} ms per instruction (median)"
    )
    if trace:
        console.print(f"REHEARSAL timeline in {trace}; open it in Perfetto")


def whatif(found: WhatIf, plot: Path | None) -> None:
    """One row for each setting: what it comes to, and in brackets what changes against the baseline."""
    console = Console()
    kind = "planned again" if found.replanned else "the same placements costed again"
    table = Table(title=f"what if: {kind}", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("", "step s", "tokens/s", "idle", "headroom GiB", "GPU-hours", "fits"):
        table.add_column(heading, justify="left" if heading in ("", "fits") else "right")
    table.add_row("as planned", *_numbers(found.baseline, None), "yes" if found.baseline.headroom_bytes >= 0 else "no")
    for answer in found.answers:
        numbers = _numbers(answer.outlook, answer.difference) if answer.outlook else ("-",) * 5
        table.add_row(_short(answer), *numbers, "yes" if answer.fits else "no")
    table.caption = "in brackets: difference to as planned; GPU-hours of 1000 steps"
    console.print(table)
    _money(console, found)
    for answer in found.answers:
        doubts = [f"extrapolated: {', '.join(answer.extrapolated)}"] if answer.extrapolated else []
        more = [f"and {len(answer.broken) - 1} more; --json has them all."] if len(answer.broken) > 1 else []
        for sentence in (*answer.broken[:1], *more, *answer.notes, *doubts):
            console.print(f"{_named(answer)}: {sentence}", markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    if plot:
        console.print(f"plot in {plot}; open it in a browser", soft_wrap=True)


def _named(answer: Consequence) -> str:
    return ", ".join(f"{path}={value}" for path, value in answer.setting.items())


def _short(answer: Consequence) -> str:
    """The last name of each field, one below the other."""
    return "\n".join(f"{path.rpartition('.')[2]}={value}" for path, value in answer.setting.items())


def _numbers(outlook: Outlook, difference: Outlook | None) -> tuple[str, ...]:
    """Step, tokens, idle, headroom, GPU-hours; each above its difference."""
    values, changes = _five(outlook, ""), _five(difference, "+") if difference else ()
    return tuple(f"{a}\n({b})" for a, b in zip(values, changes, strict=True)) if changes else values


def _five(outlook: Outlook, sign: str) -> tuple[str, ...]:
    return (
        f"{outlook.step_seconds:{sign}.3f}",
        f"{outlook.tokens_per_second:{sign}.0f}",
        f"{outlook.idle_share:{sign}.1%}",
        f"{outlook.headroom_bytes / _GIB:{sign}.2f}",
        f"{outlook.gpu_hours:{sign}.1f}",
    )


def _money(console: Console, found: WhatIf) -> None:
    if found.baseline.money is None:
        return
    console.print(f"1000 steps as planned cost {found.baseline.money:.2f}")
    for answer in found.answers:
        if answer.outlook and answer.difference and answer.outlook.money is not None:
            more = answer.difference.money or 0.0
            console.print(f"{_named(answer)}: {answer.outlook.money:.2f} ({more:+.2f})", markup=False)


def _settings(settings: Sequence[Setting]) -> str:
    """The decisions of the controllers in brief: how far the overcommit moved, and the steps of each size of chunks."""
    told, overcommits = [], [one.overcommit for one in settings]
    if max(overcommits):
        told.append(
            f"overcommit {min(overcommits)} to {max(overcommits)}, {statistics.fmean(overcommits):.0f} on average"
        )
    sizes = Counter(one.chunk_tokens for one in settings if one.chunk_tokens)
    if sizes:
        told.append(
            "chunks of " + ", ".join(f"{size} tokens in {count} steps" for size, count in sorted(sizes.items()))
        )
    return f"controllers, with rewards that are ASSUMED to rise and level off: {'; '.join(told)}"


def _staleness(found: Simulation) -> Table:
    """The shares of the response tokens, one bar for each number of updates."""
    title = f"SIMULATED staleness: {found.mean_staleness:.2f} actor updates on average"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("updates", "tokens", ""):
        table.add_column(heading, justify="left" if not heading else "right")
    for one in found.staleness:
        table.add_row(str(one.staleness), f"{one.share:.1%}", "#" * round(_BAR * one.share))
    return table


def _uses(title: str, uses: Sequence[Use]) -> Table:
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("", "idle", "waiting for", "busy with"):
        table.add_column(heading, justify="right" if heading == "idle" else "left")
    for use in uses:
        table.add_row(use.name, f"{use.idle_share:.1%}", _largest(use.waits), _largest(use.busy))
    return table


def _largest(shares: Sequence[TimeShare]) -> str:
    kept = [share for share in shares[:_MOST_CAUSES] if share.share >= _LEAST_SHARE]
    return ", ".join(f"{share.what} {share.share:.1%}" for share in kept) or "-"
