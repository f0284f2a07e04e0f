"""Profiling of the runtime's own stage functions and collectives on this machine, with all ranks busy at once.

Each rank builds a shard as a model of its own, without tensor-parallel collectives; these are timed separately. A
machine with fewer devices than a node of the job's cluster measures the collectives among its own devices.
"""

from __future__ import annotations

import datetime
import functools
import os
import platform
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshwright.planner.job.job import Facts
from meshwright.profiles.environment.latency import TimedCalls
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import EngineName
from meshwright.profiles.hardware import Cluster, device_names, require_uniform
from meshwright.profiles.harness import exchanges, merge_measurements, points
from meshwright.profiles.layout import Layout
from meshwright.profiles.table import (
    Collective,
    Exchange,
    Measurement,
    PartialTable,
    Point,
    Provenance,
    Table,
    missing_keys,
    partial_path,
    resume_table,
    write_table,
)
from meshwright.runtime.device import host
from meshwright.runtime.device.capabilities import device_capabilities
from meshwright.runtime.device.instruments import instruments, query_device
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.model.kernel_choice import ChosenKernels, choose_kernels
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.profiling.bench import Bench, is_over
from meshwright.runtime.profiling.collective_benchmarks import measure_exchange
from meshwright.runtime.profiling.engine_benchmarks import TimedEngine, measure_engine, missing_of_engine

_SWEEPS = 3
"""Sweeps through the whole grid, so that the repeats of a point lie some time apart."""

_REPEATS = 3
"""Repeats of a point in a sweep."""

_MIN_SECONDS = 0.03
"""Shortest time for which a pass is timed in a sweep. The first calls after a barrier find cold caches, and other
ranks are not yet busy, whereas a run repeats a decode step hundreds of times."""

_COLLECTIVE_REPEATS = 5
"""Repeats of a collective in a sweep: more than of a point, as most take less than a millisecond."""

_LIBRARIES = ("torch", "megatron-core", "numpy")


def profile_job(
    facts: Facts,
    output: Path,
    *,
    minutes: float,
    kind: str | None = None,
    fresh: bool = False,
    time_calls: Callable[[Sequence[TimedCalls]], Sequence[TimedCalls]] | None = None,
    engines: Sequence[TimedEngine] = (),
) -> Table:
    """Measure those of the job's shapes that the table at `output` lacks, within about `minutes`, and write the table.

    `time_calls` receives the known timings of reward and tool calls and returns them with those that were missing. Each
    of the `engines`, which run in processes of their own, is timed for about `minutes` more, not counting its start.
    `kind` is cpu or cuda, by default that of the job's cluster. Raises BadInput if this machine's device is not the
    cluster's, and if `output`, or the partial table that an interrupted call left beside it, has another provenance.
    """
    require_device(facts, kind, torch.cuda.get_device_name() if host.num_cuda_devices() else None)
    num_ranks = _num_ranks(facts)
    table = resume_table(output, _provenance(facts, num_ranks), fresh=fresh)
    interrupted = partial_path(output)
    if time_calls:
        table = table.with_calls(time_calls(table.calls))
    missing_points, missing_exchanges = _missing(facts, table, num_ranks)
    on_ranks = functools.partial(
        launch,
        num_ranks=num_ranks,
        setup=ProcessSetup(_cluster(facts).kind),
        preload="meshwright.runtime.profiling.profiling",
    )
    if missing_points or missing_exchanges:
        write_table(interrupted, table)
        table = on_ranks(_measure_all, facts, table, interrupted.resolve(), minutes * 60)[0]
    write_table(output, table)
    interrupted.unlink(missing_ok=True)
    for engine in engines:
        if any(missing_of_engine(facts, table, engine.name)):
            table = table.with_timings(on_ranks(measure_engine, facts, table, engine, minutes * 60)[0])
            write_table(output, table)
    return table


def num_missing(facts: Facts, table: Table, engines: Sequence[EngineName] = ()) -> int:
    """Return the number of measurements that the table lacks for the job's shapes and these engines."""
    of_engines = (missing_of_engine(facts, table, engine) for engine in engines)
    return sum(map(len, chain(_missing(facts, table, _num_ranks(facts)), *of_engines)))


def _cluster(facts: Facts) -> Cluster:
    return require_uniform(facts.cluster, "profile")


def require_device(facts: Facts, kind: str | None, cuda_name: str | None) -> None:
    """Raises BadInput if this machine, whose CUDA device is called `cuda_name`, is not what the cluster is made of."""
    device = _cluster(facts).device
    if kind not in (None, device.kind):
        raise BadInput(
            f"--device {kind}: the job's cluster has {device.name!r}, which is a {device.kind} device, and a table of "
            f"another is of no use to it; change the job's cluster or leave --device out."
        )
    if device.kind == "cpu":
        return
    if cuda_name is None:
        raise BadInput(
            f"this machine has no CUDA device and the job's cluster has {device.name!r}; profile on such a machine, "
            "plan without a table, or see `meshwright profile --from aiconfigurator`."
        )
    if device.name in device_names() and not _is_same_gpu(device.name, cuda_name):
        raise BadInput(
            f"this machine has {cuda_name!r} and the job's cluster has {device.name!r}; profile on such a machine, or "
            "name the device of this one in the job."
        )


def _is_same_gpu(name: str, cuda_name: str) -> bool:
    """Return True if the driver's name of a device has the model number in `name`, such as h200 in NVIDIA H200."""
    number = next(part for part in name.split("-") if any(character.isdigit() for character in part))
    return number in cuda_name.lower().replace("-", " ").split()


def _num_ranks(facts: Facts) -> int:
    """Return the number of ranks that measure at once: those of a node, at most as many as CUDA devices here."""
    per_node = _cluster(facts).ranks_per_node
    return per_node if _cluster(facts).device.kind == "cpu" else min(per_node, host.num_cuda_devices())


def _kernels(facts: Facts) -> ChosenKernels:
    """Return the kernels of the timed passes; with one rank per model there is no communication to overlap."""
    specs = map(facts.models.spec, facts.graph.roles)
    return choose_kernels(device_capabilities(_cluster(facts).device.kind), facts.precision, specs).without_overlap


def _provenance(facts: Facts, num_ranks: int) -> Provenance:
    kind = _cluster(facts).device.kind
    return Provenance(
        device=_cluster(facts).device.name,
        kind="cuda" if kind == "cuda" else "cpu",
        precision=facts.precision,
        driver=_driver(kind),
        libraries={name: version(name) for name in _LIBRARIES},
        commit=_commit(),
        date=datetime.date.today().isoformat(),
        threads_per_rank=1,
        num_ranks=num_ranks,
        repeats=_SWEEPS * _REPEATS,
        kernels=_kernels(facts).description,
    )


def _missing(facts: Facts, table: Table, num_ranks: int) -> tuple[tuple[Point, ...], tuple[Exchange, ...]]:
    """Return the points and collectives of the job that the table lacks."""
    specs = {role: facts.models.spec(role) for role in facts.graph.roles}
    all_points = points(facts.graph, specs, facts.workload, _cluster(facts), staleness=facts.staleness)
    return missing_keys(table, all_points), missing_keys(table, exchanges(_cluster(facts), num_ranks))


def _measure_all(facts: Facts, table: Table, path: Path, seconds: float) -> Table:
    """Measure on every rank; rank 0 shows the progress and writes the partial table."""
    missing_points, missing_exchanges = _missing(facts, table, dist.get_world_size())
    meshes = [build_mesh(Layout(), rank) for rank in range(dist.get_world_size())]
    device_instruments = instruments()
    max_tokens = facts.workload.max_tokens
    bench = Bench(
        meshes[dist.get_rank()],
        device_instruments,
        precision=facts.precision,
        max_positions=max_tokens,
        kernels=_kernels(facts),
    )
    growing_table = PartialTable(table, path if dist.get_rank() == 0 else None, clock=time.monotonic)
    end = time.monotonic() + seconds
    measurements: dict[Point, list[Measurement]] = defaultdict(list)
    collectives: dict[Exchange, list[Collective]] = defaultdict(list)
    with _progress(_SWEEPS * (len(missing_points) + len(missing_exchanges))) as advance:
        for sweep in range(_SWEEPS):
            deadline = end - seconds * (_SWEEPS - 1 - sweep) / _SWEEPS
            for index, point in enumerate(missing_points):
                if is_over(end):
                    break
                budget = max(0.0, deadline - time.monotonic()) / (len(missing_points) - index)
                measurements[point].append(
                    bench.measure_point(point, repeats=_REPEATS, budget_seconds=budget, min_seconds=_MIN_SECONDS)
                )
                growing_table.add(merge_measurements(measurements[point]))
                advance()
            for exchange in missing_exchanges:
                if is_over(end):
                    break
                collectives[exchange] += measure_exchange(
                    exchange, device_instruments.timer, repeats=_COLLECTIVE_REPEATS
                )
                if collectives[exchange]:
                    growing_table.add(merge_measurements(collectives[exchange]))
                advance()
    return growing_table.table()


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on rank 0 only."""
    if dist.get_rank() != 0:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("measuring", total=total)
        yield lambda: progress.advance(task)


def _driver(kind: str) -> str:
    if kind == "cuda":
        versions = query_device("driver_version")
        return f"driver {versions[0] if versions else 'unknown'}, CUDA {torch.version.cuda}"
    return f"{platform.system()} {platform.release()}"


def _commit() -> str:
    """Return the last commit that changed this folder, or the package version without a repository."""
    here = os.path.dirname(os.path.realpath(__file__))
    command = ["git", "log", "-1", "--format=%H", "--", "."]
    try:
        commit = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # there is no git
        commit = ""
    return commit or f"meshwright {version('meshwright')}"
