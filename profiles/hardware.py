"""The hardware: devices, links and clusters, with devices and networks by name from datasheets in `data/devices.yaml`.

Devices and networks are described independently: any device may be on any fabric. The numbers are datasheet peaks;
`profiles/efficiency.py` has the share of them that is achieved.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import as_file, files
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import psutil
from pydantic import (
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from meshwright.profiles.documents import Document, read_yaml
from meshwright.profiles.errors import BadInput, suggestion

_CPUS_PER_GPU = 8
"""Conservative number of host CPUs per GPU: hosts with 8 A100 or H100 have 96 to 224."""


class Link(Document):
    """A tier of the network as one rank sees it."""

    seconds: float = Field(ge=0, description="latency of one message")
    bytes_per_second: float = Field(gt=0, description="bandwidth per rank in one direction")


class Device(Document):
    """The device of one rank."""

    name: str = Field(description="name of the device, under which its efficiencies are listed")
    kind: str = Field(pattern="^(cpu|cuda)$", description="cpu or cuda")
    memory_bytes: int = Field(gt=0, description="memory of one device")
    memory_bytes_per_second: float = Field(gt=0, description="memory bandwidth of one device")
    flops_per_second: dict[str, float] = Field(description="dense peak per dtype: fp32, bf16")
    launch_seconds: float = Field(ge=0, description="time to launch one kernel")
    num_processors: int = Field(default=132, gt=0, description="streaming multiprocessors or compute units")
    reserved_share: float = Field(
        default=0.0, ge=0, lt=1, description="part of memory_bytes that driver, libraries and allocator keep from a job"
    )
    source: str = Field(description="where these numbers come from")

    @property
    def usable_bytes(self) -> int:
        """Memory in bytes that a plan may use."""
        return int(self.memory_bytes * (1 - self.reserved_share))


class Cluster(Document):
    """`nodes` machines of `ranks_per_node` ranks each, one device per rank."""

    nodes: int = Field(gt=0)
    ranks_per_node: int = Field(gt=0)
    device: Device
    intra_node: Link
    inter_node: Link
    host: Link = Field(description="the link from a device to the memory of its host")
    host_memory_bytes: int = Field(gt=0, description="memory of one host")
    host_cpus: int | None = Field(default=None, gt=0, description="CPUs of one host, if given")

    @property
    def cpus(self) -> int:
        """CPUs of one host that rewards may use; if not given, one per CPU rank or eight per GPU."""
        return self.host_cpus or self.ranks_per_node * (1 if self.kind == "cpu" else _CPUS_PER_GPU)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def name(self) -> str:
        """Number and name of the devices, such as `16 x h100-sxm`."""
        return f"{self.num_ranks} x {self.device.name}"

    @property
    def kind(self) -> str:
        """Kind of the devices: cpu or cuda."""
        return self.device.kind

    @property
    def parts(self) -> tuple[Cluster, ...]:
        """The cluster itself, since all nodes are of one kind."""
        return (self,)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        return (0,)

    def part_of(self, _rank: int) -> int:
        """Index of the part with a rank: always 0."""
        return 0

    def part_of_pool(self, _ranks: range) -> int:
        """Index of the part with the ranks of a pool: always 0."""
        return 0

    def parts_of(self, _part: int) -> tuple[Cluster, ...]:
        """The cluster itself, its only part."""
        return (self,)

    def usable_bytes(self, _rank: int) -> int:
        """Memory in bytes of a rank's device that a plan may use."""
        return self.device.usable_bytes

    def link(self, num_ranks: int) -> Link:
        """The slowest link within a group of consecutive ranks."""
        return self.intra_node if num_ranks <= self.ranks_per_node else self.inter_node


class MixedCluster(Document):
    """Nodes of several kinds. Each part is a cluster of one kind, its ranks numbered after those of the parts before.

    A stage runs within one part, or on a pair: all ranks of two neighbouring parts. Parts exchange experience and
    weights over the fabric between them. With n parts, numbers 0 to n - 1 denote parts, and n + i denotes the pair of
    parts i and i + 1. All nodes have the same number of ranks, and all devices are of one kind, cpu or cuda.
    """

    parts: tuple[Cluster, ...] = Field(min_length=2)
    between: Link = Field(description="the fabric that joins the parts")

    @model_validator(mode="after")
    def _is_uniform(self) -> MixedCluster:
        for what in ("ranks_per_node", "kind"):
            values = sorted({str(getattr(part, what)) for part in self.parts})
            if len(values) > 1:
                raise ValueError(f"the parts differ in {what} ({', '.join(values)}); make it the same in all parts")
        return self

    @property
    def name(self) -> str:
        """Numbers and names of the devices of all parts."""
        return " + ".join(part.name for part in self.parts)

    @property
    def kind(self) -> str:
        """Kind of the devices: cpu or cuda."""
        return self.parts[0].kind

    @property
    def ranks_per_node(self) -> int:
        return self.parts[0].ranks_per_node

    @property
    def num_ranks(self) -> int:
        return sum(part.num_ranks for part in self.parts)

    @property
    def nodes(self) -> int:
        return sum(part.nodes for part in self.parts)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of every part."""
        return tuple(accumulate((part.num_ranks for part in self.parts[:-1]), initial=0))

    def part_of(self, rank: int) -> int:
        """Index of the part with this rank."""
        return max(index for index, first in enumerate(self.first_ranks) if first <= rank)

    def part_of_pool(self, ranks: range) -> int:
        """Number of the part with the ranks of a pool, or of the pair if they are in two parts."""
        first, last = self.part_of(ranks.start), self.part_of(ranks.stop - 1)
        return first if first == last else len(self.parts) + first

    def parts_of(self, part: int) -> tuple[Cluster, ...]:
        """The part with this number, or the two parts of the pair with it."""
        first = part - len(self.parts)
        return self.parts[first : first + 2] if first >= 0 else (self.parts[part],)

    def usable_bytes(self, rank: int) -> int:
        """Memory in bytes of a rank's device that a plan may use."""
        return self.parts[self.part_of(rank)].device.usable_bytes


def one_or_mixed(value: Any, one: type[Document], mixed: type[Document]) -> str:
    """Return the name of the class that a parsed or constructed value belongs to: pydantic's discriminator of a union.

    Only the mixed document has a key `parts`.
    """
    if isinstance(value, dict):
        return mixed.__name__ if "parts" in value else one.__name__
    return type(value).__name__


AnyCluster: TypeAlias = Annotated[
    Annotated[Cluster, Tag("Cluster")] | Annotated[MixedCluster, Tag("MixedCluster")],
    Discriminator(lambda value: one_or_mixed(value, Cluster, MixedCluster)),
]
"""A cluster of one kind of node or of several."""


def replicas_of_parts(cluster: AnyCluster, part: int, replica_ranks: int) -> tuple[int, ...]:
    """Number of replicas of `replica_ranks` ranks that fill each part; `part` denotes one part or a pair of parts."""
    return tuple(one.num_ranks // replica_ranks for one in cluster.parts_of(part))


def max_usable_bytes(cluster: AnyCluster) -> int:
    """Usable memory in bytes of the device that has the most of it."""
    return max(part.device.usable_bytes for part in cluster.parts)


def require_uniform(cluster: AnyCluster, what: str) -> Cluster:
    """Return the cluster. Raises BadInput, naming `what`, if its nodes are of several kinds."""
    if isinstance(cluster, MixedCluster):
        raise BadInput(f"{what} takes a cluster of one kind, and this one is {cluster.name}; give it one of the parts.")
    return cluster


_MIB = 2**20


class _Datasheet(Document):
    nicknames: tuple[str, ...] = ()
    network: str
    memory_mib: int = Field(gt=0)
    memory_bytes_per_second: float = Field(gt=0)
    flops_per_second: dict[str, float]
    num_processors: int = Field(gt=0)
    intra_node_bytes_per_second: float = Field(gt=0)
    host_bytes_per_second: float = Field(gt=0)
    source: str = Field(min_length=1)


class _Network(Document):
    nicknames: tuple[str, ...] = ()
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

    The name may be in any case, and a nickname. Raises BadInput for an unknown name, naming the nearest.
    """
    known = _facts()
    full_name = device_name(name)
    sheet = known.devices[full_name]
    device = Device(
        name=full_name,
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
    """Return the link of a network between nodes, whose name may be in any case and a nickname.

    Raises BadInput for an unknown name, naming the nearest.
    """
    known = _facts().networks
    network = known[_full_name("network", name, known)]
    return Link(seconds=network.seconds, bytes_per_second=network.bytes_per_second)


def device_name(name: str) -> str:
    """Return the full name of a device from its name in any case, as nvidia-smi prints it, or a nickname: h100-sxm for
    "H100" or "NVIDIA H100 80GB HBM3".

    Raises BadInput for an unknown name, naming the nearest.
    """
    return _full_name("device", name, _facts().devices)


DEFAULT_NETWORK = "ib-hdr-200"
"""The network of a job that names none, if its device has no datasheet."""


def usual_network(device: str) -> str:
    """Return the name of the network that usually joins nodes of this device: that of the vendor's reference systems.

    Raises BadInput for an unknown device; `local` has the default network.
    """
    return DEFAULT_NETWORK if device == "local" else _facts().devices[device_name(device)].network


_VENDORS = ("nvidia-", "amd-")


def _full_name(what: str, name: str, known: Mapping[str, _Datasheet] | Mapping[str, _Network]) -> str:
    """Return the key of `known` that a name in any case or a nickname denotes. Raises BadInput for any other name."""
    text = "-".join(re.split(r"[\s_-]+", name.strip().lower())).replace("infiniband", "ib")
    for vendor in _VENDORS:
        text = text.removeprefix(vendor)
    if text in known:
        return text
    owners = {nickname: full_name for full_name, facts in known.items() for nickname in facts.nicknames}
    if text in owners:
        return owners[text]
    by_nickname = [] if any(full_name.startswith(text) for full_name in known) else get_close_matches(text, owners, n=1)
    hint = f"did you mean {owners[by_nickname[0]]!r}?" if by_nickname else suggestion(text, known)
    raise BadInput(f"{what} {name!r} is not known; {hint}")


def device_names() -> tuple[str, ...]:
    """Return the names of all devices with a datasheet, sorted."""
    return tuple(sorted(_facts().devices))


def network_names() -> tuple[str, ...]:
    """Return the names of all known networks, sorted."""
    return tuple(sorted(_facts().networks))


def device_nicknames(name: str) -> tuple[str, ...]:
    """Return the nicknames of a known device."""
    return _facts().devices[name].nicknames


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
