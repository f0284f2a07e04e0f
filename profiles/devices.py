"""Devices and networks by name, from datasheets in `data/devices.yaml`, and this machine as a cluster.

The numbers are datasheet peaks; `efficiency` has the share of them that is achieved.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path

import psutil
from pydantic import Field

from meshwright.profiles.cluster import Cluster, Device, Link
from meshwright.profiles.documents import Document, read_yaml
from meshwright.profiles.errors import BadInput, suggestion

_MIB = 2**20


class _Datasheet(Document):
    memory_mib: int = Field(gt=0)
    memory_bytes_per_second: float = Field(gt=0)
    flops_per_second: dict[str, float]
    num_processors: int = Field(gt=0)
    intra_node_bytes_per_second: float = Field(gt=0)
    host_bytes_per_second: float = Field(gt=0)
    source: str = Field(min_length=1)


class _Network(Document):
    seconds: float = Field(ge=0)
    bytes_per_second: float = Field(gt=0)
    source: str = Field(min_length=1)


class _Cuda(Document):
    launch_seconds: float = Field(ge=0)
    reserved_share: float = Field(ge=0, lt=1)
    message_seconds: float = Field(ge=0)
    source: str = Field(min_length=1)


class _Cpu(Document):
    flops_per_second_per_core: float = Field(gt=0)
    memory_bytes_per_second_per_core: float = Field(gt=0)
    launch_seconds: float = Field(ge=0)
    message_seconds: float = Field(ge=0)
    link_bytes_per_second: float = Field(gt=0)
    host_bytes_per_second: float = Field(gt=0)
    source: str = Field(min_length=1)


class _Facts(Document):
    devices: dict[str, _Datasheet]
    networks: dict[str, _Network]
    cuda: _Cuda
    cpu: _Cpu


def device_named(name: str) -> tuple[Device, Link, Link]:
    """Return the device, its link to other devices of the node, and its link to the host.

    Raises BadInput for an unknown name.
    """
    known = _facts()
    if name not in known.devices:
        raise BadInput(f"device {name!r} is not known; {suggestion(name, known.devices)}")
    sheet = known.devices[name]
    device = Device(
        name=name,
        kind="cuda",
        memory_bytes=sheet.memory_mib * _MIB,
        memory_bytes_per_second=sheet.memory_bytes_per_second,
        flops_per_second=sheet.flops_per_second,
        num_processors=sheet.num_processors,
        launch_seconds=known.cuda.launch_seconds,
        reserved_share=known.cuda.reserved_share,
        source=f"{sheet.source}; {known.cuda.source}",
    )
    intra_node = Link(seconds=known.cuda.message_seconds, bytes_per_second=sheet.intra_node_bytes_per_second)
    host = Link(seconds=known.cuda.launch_seconds, bytes_per_second=sheet.host_bytes_per_second)
    return device, intra_node, host


def network_named(name: str) -> Link:
    """Return the link of a network between nodes. Raises BadInput for an unknown name."""
    known = _facts().networks
    if name not in known:
        raise BadInput(f"network {name!r} is not known; {suggestion(name, known)}")
    return Link(seconds=known[name].seconds, bytes_per_second=known[name].bytes_per_second)


def device_names() -> tuple[str, ...]:
    """Return the names of all devices with a datasheet, sorted."""
    return tuple(sorted(_facts().devices))


def network_names() -> tuple[str, ...]:
    """Return the names of all known networks, sorted."""
    return tuple(sorted(_facts().networks))


def network_source(name: str) -> str:
    """Return the source of the numbers of a known network."""
    return _facts().networks[name].source


def cpu_device(cores_per_rank: float, memory_bytes: int, *, processor: str = "cpu") -> Device:
    """Return the device of a rank that has this many CPU cores. bf16 is emulated at the fp32 rate."""
    core = _facts().cpu
    flops = core.flops_per_second_per_core * cores_per_rank
    return Device(
        name=f"{processor}, {cores_per_rank:g} cores",
        kind="cpu",
        memory_bytes=memory_bytes,
        memory_bytes_per_second=core.memory_bytes_per_second_per_core * cores_per_rank,
        flops_per_second={"fp32": flops, "bf16": flops},
        launch_seconds=core.launch_seconds / min(1.0, cores_per_rank),
        num_processors=max(1, round(cores_per_rank)),
        source=core.source,
    )


def cpu_links() -> tuple[Link, Link]:
    """Return the link between CPU ranks of one machine, and the link from a rank to other host memory."""
    core = _facts().cpu
    between = Link(seconds=core.message_seconds, bytes_per_second=core.link_bytes_per_second)
    return between, Link(seconds=0.0, bytes_per_second=core.host_bytes_per_second)


def local_cluster(ranks: int | None = None) -> Cluster:
    """Return this machine as a cluster of `ranks` CPU ranks with equal shares; by default one rank per core.

    Raises BadInput for fewer than one rank.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_ranks = num_cores if ranks is None else ranks
    if num_ranks < 1:
        raise BadInput(f"ranks={num_ranks} is not a number of ranks; use 1 or more.")
    total_bytes = int(psutil.virtual_memory().total)
    link, host = cpu_links()
    return Cluster(
        nodes=1,
        ranks_per_node=num_ranks,
        device=cpu_device(num_cores / num_ranks, total_bytes // num_ranks, processor=_processor()),
        intra_node=link,
        inter_node=link,
        host=host,
        host_memory_bytes=total_bytes,
    )


@cache
def _facts() -> _Facts:
    with as_file(files("meshwright.profiles") / "data" / "devices.yaml") as path:
        return read_yaml(_Facts, path, "device facts")


@cache
def _processor() -> str:
    """The model name of the processor, or the architecture if the system does not report it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine() or "cpu"
