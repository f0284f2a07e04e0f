"""Serving points by the operators that NVIDIA measured, where the package that carries them is installed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.inference import serving_point
from benchmarks.fidelity.rows import Row, Skip
from benchmarks.fidelity.serving import MeasuredEngine, Serving
from meshwright.cost_models.imported_operators import MeasuredKernels, imported_collectives
from meshwright.cost_models.kernels import precision_named
from meshwright.profiles.aiconfigurator import ENGINES, PACKAGE, SYSTEMS, package_version, read_operators
from meshwright.profiles.efficiency import efficiency_of


def imported_point(row: Row) -> tuple[Serving, int]:
    """A serving point by the operators of its engine; skips the row where there are none."""
    serving, rows = serving_point(row)
    name, engine = serving.cluster.device.name, row["backend"]
    if package_version() is None:
        raise Skip(f"{PACKAGE} is not installed")
    if name not in SYSTEMS or engine not in ENGINES:
        raise Skip(f"{PACKAGE} has no operators of {engine} on {name}")
    return replace(serving, measured=_engine(row["system"], engine, serving.precision)), rows


@cache
def _engine(system: str, engine: str, precision: str) -> MeasuredEngine:
    """What the package knows of an engine on a device; the head computes in a format of its own."""
    device = cluster_of(system, 1).device
    efficiency = efficiency_of(device.kind, device.name)
    layers, head = (
        read_operators(device.name, engine=engine, precision=name, custom_all_reduce=True)
        for name in (precision, precision_named(precision, device).head)
    )
    return MeasuredEngine(
        kernels=MeasuredKernels(layers, device, efficiency),
        head_kernels=MeasuredKernels(head, device, efficiency),
        collectives=imported_collectives(layers),
    )
