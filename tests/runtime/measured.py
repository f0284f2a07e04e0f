"""A table as if the machine of a job had been profiled: one second for every point."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.job.job import read_job, resolve
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.hardware import require_uniform
from meshwright.profiles.harness import TimingResult, points, record
from meshwright.profiles.table import Provenance, Table, write_table


def measured_table(job: Path, path: Path) -> Path:
    """Writes it for a job on one kind of device."""
    facts = resolve(read_job(job), job.parent)
    cluster = require_uniform(facts.cluster, "a test")
    provenance = Provenance(
        device=cluster.device.name,
        kind="cpu",
        precision="fp32",
        driver="Linux 6.1",
        libraries={"torch": "2.13.0"},
        commit="0123abc",
        date="2026-11-21",
        threads_per_rank=1,
        num_ranks=2,
        repeats=3,
    )
    wanted = points(PPO_GRAPH, {role: facts.models.spec(role) for role in PPO_GRAPH.roles}, facts.workload, cluster)
    sample = TimingResult(median_seconds=1.0, spread_seconds=0.0, repeats=3)
    write_table(path, Table(provenance=provenance, measurements=tuple(record(point, sample) for point in wanted)))
    return path
