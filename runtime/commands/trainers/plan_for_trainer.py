"""The part of `plan` that searches what another trainer can say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from meshwright.planner.analysis.structures import Ranked
from meshwright.planner.plan.job import Facts, Job
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.refusal import NoPlan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.environment.seen_lengths import SeenLengths
from meshwright.profiles.table import Table
from meshwright.runtime.api.elsewhere import plan_for, structures_for
from meshwright.runtime.commands.progress_bars import progress_bars


class Kept(TypedDict):
    """What a search has to keep to: choices that are fixed or forbidden, the plan that it starts from and the lengths
    of a trace; and the job, which the plan names."""

    job: Job
    pins: Sequence[str]
    forbid: Sequence[str]
    start: Plan | None
    seen: SeenLengths | None


def best_for(trainer: str, facts: Facts, table: Table | None, wanted: Kept, limits: Limits) -> Plan | NoPlan:
    """The best plan that the trainer can say; shows its ways as they are done."""
    what = f"searching what {trainer} can say"
    with progress_bars() as progress:
        return plan_for(trainer, facts, table, **wanted, limits=limits, progress=lambda *done: progress(what, *done))


def structures_of(
    trainer: str, best: Plan, table: Table | None, wanted: Kept, *, count: int, limits: Limits
) -> tuple[Ranked, ...]:
    """The best few plans that the trainer can say and that differ in structure; shows how the searches stand."""
    pins, forbid = wanted["pins"], wanted["forbid"]
    with progress_bars() as progress:
        return structures_for(
            trainer, best, table, count=count, pins=pins, forbid=forbid, limits=limits, progress=progress
        )
