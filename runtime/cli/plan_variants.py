"""The parts of the command `plan` for --for, --top and --proof, which are imported only if one of these is given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from meshwright.planner.analysis.plan_structures import Ranked
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.plan import Plan, write_plan
from meshwright.planner.proof.document import write_proof
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.table import Table
from meshwright.runtime.api.analyses import structures
from meshwright.runtime.api.planning import SearchConstraints
from meshwright.runtime.api.trainers import plan_for, structures_for
from meshwright.runtime.api.verification import prove
from meshwright.runtime.cli import view_plan, view_search
from meshwright.runtime.cli.call import (
    progress_bars,
)
from meshwright.runtime.cli.options import (
    TrainerName,
)


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


def other_structures(
    trainer: TrainerName | None,
    best: Plan,
    table: Table | None,
    constraints: SearchConstraints,
    *,
    count: int,
    limits: Limits,
) -> tuple[Ranked, ...]:
    """Return the best few plans of different structure in the whole space or the trainer's, with progress bars."""
    if trainer:
        return structures_for_trainer(trainer, best, table, constraints, count=count, limits=limits)
    with progress_bars() as progress:
        return structures(best, table, count=count, limits=limits, progress=progress)


def write_structures(paths: Sequence[Path], rows: Sequence[Ranked], *, as_json: bool) -> None:
    """Write each plan to its path, and print all of them."""
    for path, row in zip(paths, rows, strict=True):
        write_plan(path, row.plan)
    if as_json:
        documents = [
            {"path": str(path), "period_seconds": row.plan.period_seconds, "simulated_seconds": row.simulated_seconds}
            for path, row in zip(paths, rows, strict=True)
        ]
        typer.echo(json.dumps(documents, indent=2))
    else:
        view_plan.print_plan(rows[0].plan, paths[0])
        view_search.print_structures(rows, paths)


def write_proof_of(plan: Plan, table: Table | None, path: Path) -> None:
    """Prove the bound of a plan, and write the proof."""
    write_proof(path, prove(plan, table))
