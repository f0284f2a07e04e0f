"""The table that a command was given."""

from __future__ import annotations

from pathlib import Path

from meshwright.profiles.table import Table, read_table
from meshwright.runtime.commands.options import DurationsFrom


def table_in(profile: Path | None) -> Table | None:
    """The table of an option --profile; None where none was given."""
    return read_table(profile) if profile else None


def table_for(durations: DurationsFrom, profile: Path | None) -> Table | None:
    """The table where lengths are drawn; what is taken from the plan needs none."""
    return table_in(profile) if durations is DurationsFrom.SAMPLED else None
