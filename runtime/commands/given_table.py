"""The table that a command was given, and the cost models that it makes."""

from __future__ import annotations

from pathlib import Path

from meshwright.cost_models.blended import cost_model
from meshwright.planner.plan.calls import Remodel
from meshwright.profiles.table import Table, read_table


def table_in(profile: Path | None) -> Table | None:
    return read_table(profile) if profile else None


def remodel(table: Table | None) -> Remodel:
    """The cost model of any facts, with a table where there is one."""
    return lambda facts: cost_model(facts.cluster, facts.workload, facts.precision, table)
