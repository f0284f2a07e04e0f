"""Import of operators measured by NVIDIA (aiconfigurator), as a table for a job or for the models that it names."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from meshwright.cost_models.measurements.imported import imported_points, imported_table
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.job_cluster import ClusterSpec
from meshwright.profiles.aiconfigurator import PACKAGE, PRECISION, SYSTEMS, device_of, read_configs, read_operators
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.cluster import Cluster, require_uniform
from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec, model_from_config
from meshwright.profiles.stages import Role
from meshwright.profiles.table import Point, Table
from meshwright.profiles.workload import Workload

_BATCH_SIZE = 256
"""The batch size of a table that is for no particular job; no point of the grid has more rows."""
_LENGTHS = ((16, 128), (128, 1024), (1024, 8192))
"""Tokens of prompts and of responses, as (shortest, longest), of a table that is for no particular job."""


def import_operators(facts: Facts | None = None, *, device: str | None = None) -> Table:
    """The table of a job's shapes or, without a job, of the dense models that `aiconfigurator-core` names.

    It has the seconds of forward, prefill and decode passes, composed of operators that NVIDIA measured, and none of
    training. Raises BadInput for a device that the package lacks or that is not the job's, for a job in another
    precision than the operators', and where the package is not installed.
    """
    points, cluster, precision = _of_job(facts, device) if facts else _of_known_models(device)
    operators = read_operators(cluster.device.name)
    return imported_table(operators, points, cluster, precision, datetime.date.today().isoformat())


def _of_job(facts: Facts, device: str | None) -> tuple[tuple[Point, ...], Cluster, str]:
    cluster = require_uniform(facts.cluster, "profile --from aiconfigurator")
    name = cluster.device.name
    if device is not None and device_of(device) != name:
        raise BadInput(f"--device {device!r}: the job's cluster has {name!r}; leave --device out, or change the job.")
    if name not in SYSTEMS:
        raise BadInput(f"{PACKAGE} has no operators of the job's device {name!r}; it has {', '.join(SYSTEMS)}.")
    specs = {role: facts.models.spec(role) for role in facts.graph.roles}
    return imported_points(facts.graph, [specs], [facts.workload], cluster), cluster, facts.precision


def _of_known_models(device: str | None) -> tuple[tuple[Point, ...], Cluster, str]:
    if device is None:
        raise BadInput(f"name a job, or a device with --device: {', '.join(SYSTEMS.values())}.")
    cluster = ClusterSpec(device=device_of(device)).resolve()
    models = [specs for name, config in read_configs().items() if (specs := _both_heads(name, config))]
    workloads = [_workload(*lengths) for lengths in _LENGTHS]
    return imported_points(PPO_GRAPH, models, workloads, cluster), cluster, PRECISION


def _both_heads(name: str, config: Mapping[str, object]) -> dict[Role, ModelSpec]:
    """The model with a vocabulary head and with a scalar head; empty for one that is not a dense decoder."""
    heads = {Role.ACTOR: False, Role.REWARD: True}
    try:
        return {role: model_from_config(config, name=name, scalar_head=head) for role, head in heads.items()}
    except BadInput:
        return {}


def _workload(shortest: int, longest: int) -> Workload:
    lengths = LengthSpec(max=longest, histogram=((shortest, 1.0), (longest, 1.0)))
    return Workload(batch_size=_BATCH_SIZE, prompt=lengths, response=lengths)
