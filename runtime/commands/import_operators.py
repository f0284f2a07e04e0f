"""The command that makes a table of operators which others have measured: reads the documents, calls, writes."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path

from meshwright.cost_models.imported import imported_points, imported_provenance, imported_table
from meshwright.planner.plan.job import ClusterSpec, read_job, resolve
from meshwright.profiles.aiconfigurator import (
    PACKAGE,
    PRECISION,
    SYSTEMS,
    device_of,
    knows,
    read_configs,
    read_operators,
)
from meshwright.profiles.cluster import AnyCluster, Cluster, MixedCluster, of_one_kind
from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec, model_from_config
from meshwright.profiles.partial import begun
from meshwright.profiles.stages import Role
from meshwright.profiles.table import Point, Table, write_table
from meshwright.profiles.workload import Workload

_BATCH_SIZE = 256
"""Of a table that is made for no one job: no point of the grid has more rows, so none is left out."""
_LENGTHS = ((16, 128), (128, 1024), (1024, 8192))
"""Tokens of prompts, and of responses, from the shortest to the longest, of such a table."""


def import_table(job: Path | None, device: str | None, output: Path, *, fresh: bool = False) -> Table:
    """Writes the table of a job's shapes or, without a job, of the dense models that the package names.

    Raises BadInput for a device that the package has not measured, another one than the job's, and an `output` that
    was measured otherwise.
    """
    wanted, cluster, precision = _of_job(job, device) if job else _of_known_models(device)
    operators = read_operators(cluster.device.name)
    date = datetime.date.today().isoformat()
    begun(output, imported_provenance(operators, precision, date), fresh=fresh)
    table = imported_table(operators, wanted, cluster, precision, date)
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


def _of_job(job: Path, device: str | None) -> tuple[tuple[Point, ...], Cluster, str]:
    facts = resolve(read_job(job), job.parent)
    cluster = of_one_kind(facts.cluster, "profile --from aiconfigurator")
    name = cluster.device.name
    if device is not None and device_of(device) != name:
        raise BadInput(f"--device {device!r}: the job's cluster has {name!r}; leave --device out, or change the job.")
    if name not in SYSTEMS:
        raise BadInput(f"{PACKAGE} has no operators of the job's device {name!r}; it has {', '.join(SYSTEMS)}.")
    specs = {role: facts.models.spec(role) for role in Role}
    return imported_points([specs], [facts.workload], cluster), cluster, facts.precision


def _of_known_models(device: str | None) -> tuple[tuple[Point, ...], Cluster, str]:
    if device is None:
        raise BadInput(f"name a job, or a device with --device: {', '.join(SYSTEMS.values())}.")
    cluster = ClusterSpec(device=device_of(device)).resolve()
    models = [specs for name, config in read_configs().items() if (specs := _both_heads(name, config))]
    workloads = [_workload(*lengths) for lengths in _LENGTHS]
    return imported_points(models, workloads, cluster), cluster, PRECISION


def _both_heads(name: str, config: Mapping[str, object]) -> dict[Role, ModelSpec]:
    """The model with its vocabulary and with a scalar head; nothing for one that is not a dense decoder."""
    heads = {Role.ACTOR: False, Role.REWARD: True}
    try:
        return {role: model_from_config(config, name=name, scalar_head=head) for role, head in heads.items()}
    except BadInput:
        return {}


def _workload(shortest: int, longest: int) -> Workload:
    lengths = LengthSpec(max=longest, histogram=((shortest, 1.0), (longest, 1.0)))
    return Workload(batch_size=_BATCH_SIZE, prompt=lengths, response=lengths)
