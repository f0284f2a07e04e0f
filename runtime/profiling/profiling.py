"""Times the runtime's own stage bodies and collectives on this machine, all ranks busy at once.

Each rank builds a shard as a model of its own, without tensor-parallel collectives; collectives are timed apart. A
machine with fewer devices than a node of the job's cluster measures the collectives that it can hold.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshwright.planner.plan.job import Facts
from meshwright.profiles.cluster import Cluster, of_one_kind
from meshwright.profiles.devices import device_names
from meshwright.profiles.environment.timed_calls import TimedCalls
from meshwright.profiles.errors import BadInput
from meshwright.profiles.harness import exchanges, merged, points
from meshwright.profiles.layout import Layout
from meshwright.profiles.partial import PartialTable, begun, missing, partial_path
from meshwright.profiles.table import Collective, Exchange, Measurement, Point, Provenance, Table, write_table
from meshwright.runtime.device import host
from meshwright.runtime.device.abilities import abilities
from meshwright.runtime.device.instruments import instruments, query_device
from meshwright.runtime.launch.launch import Preparation, launch
from meshwright.runtime.model.chosen_kernels import ChosenKernels, own_kernels
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.profiling.bench import Bench
from meshwright.runtime.profiling.exchanging import measure_exchange

_TURNS = 3
"""Times that the whole grid is gone through, so that the repeats of a point lie apart."""

_REPEATS = 3  # of a point in a turn
_LEAST_SECONDS = 0.03
"""That a body is timed for in a turn. Its first calls behind a barrier find caches cold and other ranks still on their
way, where a run repeats a decode step hundreds of times."""

_EXCHANGES = 5  # of a collective in a turn: most are over in less than a millisecond
_LIBRARIES = ("torch", "megatron-core", "numpy")


def profile_job(
    facts: Facts,
    output: Path,
    *,
    minutes: float,
    kind: str | None = None,
    fresh: bool = False,
    time_calls: Callable[[Sequence[TimedCalls]], Sequence[TimedCalls]] | None = None,
) -> Table:
    """Writes the table of the job's shapes on this machine, what it lacks being measured within about `minutes`.

    `time_calls` times those of rewards and tools that are not among what it is given. `kind` is cpu or cuda, by
    default that of the job's cluster. Raises BadInput when this machine is not what the cluster is made of, and when
    `output`, or what a call that was cut off left beside it, was measured otherwise.
    """
    require_device(facts, kind, torch.cuda.get_device_name() if host.num_cuda_devices() else None)
    num_ranks = _num_ranks(facts)
    table, kept = begun(output, _provenance(facts, num_ranks), fresh=fresh), partial_path(output)
    if time_calls:
        table = table.with_calls(time_calls(table.calls))
    wanted, between = _wanted(facts, table, num_ranks)
    if wanted or between:
        write_table(kept, table)
        table = launch(
            _measure_all,
            facts,
            table,
            kept.resolve(),
            minutes * 60,
            num_ranks=num_ranks,
            preparation=Preparation(_cluster(facts).kind),
            preload="meshwright.runtime.profiling.profiling",
        )[0]
    write_table(output, table)
    kept.unlink(missing_ok=True)
    return table


def num_missing(facts: Facts, table: Table) -> int:
    """Measurements of the job's shapes that the table lacks, because time was over."""
    return sum(map(len, _wanted(facts, table, _num_ranks(facts))))


def _cluster(facts: Facts) -> Cluster:
    return of_one_kind(facts.cluster, "profile")


def require_device(facts: Facts, kind: str | None, cuda_name: str | None) -> None:
    """Raises BadInput when this machine, whose CUDA device has this name, cannot be timed for the job's cluster."""
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
    if device.name in device_names() and not _is_model(device.name, cuda_name):
        raise BadInput(
            f"this machine has {cuda_name!r} and the job's cluster has {device.name!r}; profile on such a machine, or "
            "name the device of this one in the job."
        )


def _is_model(name: str, cuda_name: str) -> bool:
    """Whether a device's driver calls it by the model number in our name of it: h200 is NVIDIA H200."""
    number = next(part for part in name.split("-") if any(character.isdigit() for character in part))
    return number in cuda_name.lower().replace("-", " ").split()


def _num_ranks(facts: Facts) -> int:
    """Ranks that measure at once: a whole node, or as many devices of one as this machine has."""
    most = _cluster(facts).ranks_per_node
    return most if _cluster(facts).device.kind == "cpu" else min(most, host.num_cuda_devices())


def _kernels(facts: Facts) -> ChosenKernels:
    """What the bodies run on; with one rank to a model there is nothing to overlap."""
    specs = map(facts.models.spec, facts.graph.roles)
    return own_kernels(abilities(_cluster(facts).device.kind), facts.precision, specs).of_one_replica


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
        repeats=_TURNS * _REPEATS,
        kernels=_kernels(facts).told,
    )


def _wanted(facts: Facts, table: Table, num_ranks: int) -> tuple[tuple[Point, ...], tuple[Exchange, ...]]:
    """The points and collectives of the job that the table lacks."""
    specs = {role: facts.models.spec(role) for role in facts.graph.roles}
    wanted = points(facts.graph, specs, facts.workload, _cluster(facts), staleness=facts.staleness)
    return missing(table, wanted), missing(table, exchanges(_cluster(facts), num_ranks))


def _measure_all(facts: Facts, table: Table, path: Path, seconds: float) -> Table:
    """What every rank runs; rank 0 shows the progress and keeps the table."""
    wanted, between = _wanted(facts, table, dist.get_world_size())
    meshes = [build_mesh(Layout(), rank) for rank in range(dist.get_world_size())]
    watch = instruments()
    longest = facts.workload.max_tokens
    bench = Bench(
        meshes[dist.get_rank()], watch, precision=facts.precision, max_positions=longest, kernels=_kernels(facts)
    )
    growing = PartialTable(table, path if dist.get_rank() == 0 else None, clock=time.monotonic)
    end = time.monotonic() + seconds
    measured: dict[Point, list[Measurement]] = defaultdict(list)
    exchanged: dict[Exchange, list[Collective]] = defaultdict(list)
    with _progress(_TURNS * (len(wanted) + len(between))) as advance:
        for turn in range(_TURNS):
            deadline = end - seconds * (_TURNS - 1 - turn) / _TURNS
            for index, point in enumerate(wanted):
                if _is_over(end):
                    break
                share = max(0.0, deadline - time.monotonic()) / (len(wanted) - index)
                measured[point].append(
                    bench.measure_point(point, repeats=_REPEATS, budget_seconds=share, least_seconds=_LEAST_SECONDS)
                )
                growing.add(merged(measured[point]))
                advance()
            for exchange in between:
                if _is_over(end):
                    break
                exchanged[exchange] += measure_exchange(exchange, watch.timer, repeats=_EXCHANGES)
                growing.add(*[merged(turns) for turns in [exchanged[exchange]] if turns])
                advance()
    return growing.table()


def _is_over(end: float) -> bool:
    """Whether the first rank's clock has come to the end, so that all ranks stop together."""
    found = [time.monotonic() > end]
    dist.broadcast_object_list(found)
    return found[0]


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on rank 0, silence elsewhere."""
    if dist.get_rank() != 0:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("measuring", total=total)
        yield lambda: progress.advance(task)


def _driver(kind: str) -> str:
    if kind == "cuda":
        found = query_device("driver_version")
        return f"driver {found[0] if found else 'unknown'}, CUDA {torch.version.cuda}"
    return f"{platform.system()} {platform.release()}"


def _commit() -> str:
    """The last commit that changed the bodies' folder, or the package version where there is no repository."""
    here = os.path.dirname(os.path.realpath(__file__))
    command = ["git", "log", "-1", "--format=%H", "--", "."]
    try:
        found = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # there is no git
        found = ""
    return found or f"meshwright {version('meshwright')}"
