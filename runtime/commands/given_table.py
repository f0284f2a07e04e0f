"""The table that a command reads for --profile."""

from __future__ import annotations

from pathlib import Path

from meshwright.profiles.table import Table, read_table
from meshwright.runtime.commands.options import DurationsFrom


def read_profile(profile: Path | None) -> Table | None:
    """Read the table of --profile; None without the option."""
    return read_table(profile) if profile else None


def read_profile_for(durations: DurationsFrom, profile: Path | None) -> Table | None:
    """Read the table of --profile if lengths are sampled; planned durations need none."""
    return read_profile(profile) if durations is DurationsFrom.SAMPLED else None
