"""A table built from measured operators: forward, prefill and decode passes of shards, summed kernel by kernel.

GEMMs and attention are measured; element-wise work and launches are by equation, as in `compute`. The operators include
no training, so the table has none and a blended model uses equations for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.measurements.operators import MeasuredKernels
from meshwright.profiles.aiconfigurator import PACKAGE, Message, Operators
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import GRAPH, engine_named
from meshwright.profiles.harness import TimingResult, points, record, record_collective
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role, StageGraph
from meshwright.profiles.table import Collective, Exchange, Measurement, Point, Provenance, Shape, Table, TimedPass
from meshwright.profiles.workload import Workload

BODIES = (TimedPass.FORWARD, TimedPass.PREFILL, TimedPass.DECODE)
"""The kinds of passes that the operators cover."""

_UNKNOWN = "not told"


def imported_points(
    graph: StageGraph, models: Iterable[Mapping[Role, ModelSpec]], workloads: Iterable[Workload], cluster: Cluster
) -> tuple[Point, ...]:
    """Return the distinct points that a table for these jobs needs."""
    all_workloads = tuple(workloads)
    candidates = (
        point for specs in models for workload in all_workloads for point in points(graph, specs, workload, cluster)
    )
    return tuple(dict.fromkeys(point for point in candidates if point.body in BODIES))


def imported_table(
    operators: Operators, table_points: Iterable[Point], cluster: Cluster, precision: str, date: str
) -> Table:
    """Return the table of these points. Raises BadInput if the job's precision is not that of the operators."""
    if precision != operators.precision:
        measured = operators.precision
        raise BadInput(f"the operators of {PACKAGE} are in {measured} and the job runs in {precision}; profile it.")
    efficiency = efficiency_of(cluster.device.kind, cluster.device.name)
    kernels = MeasuredKernels(operators, cluster.device, efficiency)
    framework = engine_named(GRAPH).framework_on(cluster.device.kind)
    shards: dict[Shape, AnalyticShard] = {}
    rows = []
    for point in table_points:
        if point.shape not in shards:
            model = point.shape.model(num_layers=1, max_positions=1)
            shards[point.shape] = AnalyticShard(
                model, cluster.device, precision, efficiency, 1.0, framework=framework, kernels=kernels
            )
        rows.append(_measurement(shards[point.shape], point))
    provenance = imported_provenance(operators, precision, date)
    return Table(provenance=provenance, measurements=tuple(rows), collectives=imported_collectives(operators))


def imported_collectives(operators: Operators) -> tuple[Collective, ...]:
    """Return the measured collectives as rows of a table."""
    return tuple(_collective(message, seconds) for message, seconds in operators.collectives.items())


def imported_provenance(operators: Operators, precision: str, date: str) -> Provenance:
    """Return the provenance of a table built from these operators on `date`."""
    package, engine, network = (f"{name} {version}" for name, version in operators.versions.items())
    return Provenance.model_validate(
        {
            "device": operators.device,
            "kind": "cuda",
            "precision": precision,
            "driver": _UNKNOWN,
            "libraries": dict(operators.versions),
            "commit": _UNKNOWN,
            "date": date,
            "threads_per_rank": 1,
            "num_ranks": 1,
            "repeats": 1,
            "origin": f"NVIDIA {package} (Apache-2.0), system {operators.system}: GEMM and attention of {engine}, "
            f"collectives of {network}; element-wise work and launches by equation",
        }
    )


def _measurement(shard: AnalyticShard, point: Point) -> Measurement:
    time = shard.time(point.body, point.rows, point.tokens, point.context)
    return record(point, _sample(point.num_layers * time.layer + time.ends))


def _collective(message: Message, seconds: float) -> Collective:
    return record_collective(Exchange.model_validate(message._asdict()), _sample(seconds))


def _sample(seconds: float) -> TimingResult:
    return TimingResult(median_seconds=seconds, spread_seconds=0.0, repeats=1)
