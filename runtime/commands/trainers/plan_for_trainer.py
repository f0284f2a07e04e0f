"""The part of `plan` that searches what another trainer can say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.analysis.structures import Ranked
from meshwright.planner.plan.job import Facts, Job
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.refusal import NoPlan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.table import Table
from meshwright.runtime.api.elsewhere import plan_for, structures_for
from meshwright.runtime.commands.progress_bars import progress_bars


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is searched for: a job and its facts, by a table's costs, with choices that are fixed or forbidden, from a
    plan that is known."""

    job: Job
    facts: Facts
    table: Table | None
    pins: Sequence[str]
    forbid: Sequence[str]
    start: Plan | None


def best_for(trainer: str, asked: Asked, limits: Limits) -> Plan | NoPlan:
    """The best plan that the trainer can say; shows its ways as they are done."""
    with progress_bars() as progress:
        return plan_for(
            trainer,
            asked.facts,
            asked.table,
            pins=asked.pins,
            forbid=asked.forbid,
            limits=limits,
            job=asked.job,
            start=asked.start,
            progress=lambda done, total: progress(f"searching what {trainer} can say", done, total),
        )


def structures_of(trainer: str, best: Plan, asked: Asked, count: int, limits: Limits) -> tuple[Ranked, ...]:
    """The best few plans that the trainer can say and that differ in structure; shows how the searches stand."""
    with progress_bars() as progress:
        return structures_for(
            trainer,
            best,
            asked.table,
            count=count,
            pins=asked.pins,
            forbid=asked.forbid,
            limits=limits,
            progress=progress,
        )
