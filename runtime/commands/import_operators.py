"""The part of `profile` that measures nothing: a table of operators that others have measured."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.plan.job import read_job, resolve
from meshwright.profiles.aiconfigurator import knows
from meshwright.profiles.cluster import AnyCluster, MixedCluster
from meshwright.profiles.partial import begun
from meshwright.profiles.table import Table, write_table
from meshwright.runtime.api.importing import import_operators


def import_table(job: Path | None, device: str | None, output: Path, *, fresh: bool = False) -> Table:
    """Writes the table of a job's shapes or, without a job, of the dense models that the package names.

    Raises BadInput for a device that the package has not measured, another one than the job's, and an `output` that
    was measured otherwise.
    """
    table = import_operators(resolve(read_job(job), job.parent) if job else None, device=device)
    begun(output, table.provenance, fresh=fresh)
    write_table(output, table)
    return table


def offer(cluster: AnyCluster, job: Path) -> str | None:
    """One line for a user who plans without a table on a device whose operators are at hand; None for any other."""
    device = cluster.name if isinstance(cluster, MixedCluster) else cluster.device.name
    if not knows(device):
        return None
    return (
        f"measured operators of {device} are installed: `meshwright profile {job} --from aiconfigurator -o table.json` "
        "makes a table of them for --profile."
    )
