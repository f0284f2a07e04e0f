"""A table from operator timings that others published, for `profile --from`."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.job.job import read_job, resolve
from meshwright.profiles.table import Table, resume_table, write_table
from meshwright.runtime.api.measurements import import_operators


def import_table(job: Path | None, device: str | None, output: Path, *, fresh: bool = False) -> Table:
    """Write the table for a job's shapes or, without a job, for the dense models that `aiconfigurator-core` names.

    Raises BadInput if that package has no timings of the device, if the device is not that of the job, and if `output`
    holds a table from another source.
    """
    table = import_operators(resolve(read_job(job), job.parent) if job else None, device=device)
    resume_table(output, table.provenance, fresh=fresh)
    write_table(output, table)
    return table
