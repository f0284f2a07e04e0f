"""The part of `plan --for`: a search within the settings of another trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from meshwright.planner.analysis.structures import Ranked
from meshwright.planner.plan.job import Facts, Job
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.refusal import NoPlan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.environment.seen_lengths import ObservedLengths
from meshwright.profiles.table import Table
from meshwright.runtime.api.elsewhere import plan_for, structures_for
from meshwright.runtime.commands.progress_bars import progress_bars


class SearchConstraints(TypedDict):
    """The constraints of a search: pinned and forbidden choices, the plan to start from, and the lengths of a trace.

    The plan names the job.
    """

    job: Job
    pins: Sequence[str]
    forbid: Sequence[str]
    start: Plan | None
    observed: ObservedLengths | None


def search_for_trainer(
    trainer: str, facts: Facts, table: Table | None, constraints: SearchConstraints, limits: Limits
) -> Plan | NoPlan:
    """Return the best plan within the settings of the trainer, with a progress bar."""
    title = f"searching within the settings of {trainer}"
    with progress_bars() as progress:
        return plan_for(
            trainer, facts, table, **constraints, limits=limits, progress=lambda *done: progress(title, *done)
        )


def structures_for_trainer(
    trainer: str, best: Plan, table: Table | None, constraints: SearchConstraints, *, count: int, limits: Limits
) -> tuple[Ranked, ...]:
    """Return the best few plans of different structure within the settings of the trainer, with progress bars."""
    pins, forbid = constraints["pins"], constraints["forbid"]
    with progress_bars() as progress:
        return structures_for(
            trainer, best, table, count=count, pins=pins, forbid=forbid, limits=limits, progress=progress
        )
