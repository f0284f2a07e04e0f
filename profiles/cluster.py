"""The hardware: devices, the links between them, and clusters of one or several kinds of nodes.

Devices and networks are described independently: any device may be on any fabric.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Annotated, Any, TypeAlias

from pydantic import (
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from meshwright.profiles.documents import Document
from meshwright.profiles.errors import BadInput

_CPUS_OF_A_GPU = 8
"""Conservative number of host CPUs per GPU: hosts with 8 A100 or H100 have 96 to 224."""


class Link(Document):
    """A tier of the network as one rank sees it."""

    seconds: float = Field(ge=0, description="latency of one message")
    bytes_per_second: float = Field(gt=0, description="bandwidth per rank in one direction")


class Device(Document):
    """The device of one rank."""

    name: str = Field(description="name of the device, as efficiencies are looked up by it")
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

    @model_serializer(mode="wrap")
    def _without_default(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit `host_cpus` if not given: clusters written before the field existed stay byte-identical."""
        return {key: value for key, value in written(self).items() if key != "host_cpus" or value is not None}

    @property
    def cpus(self) -> int:
        """CPUs of one host that rewards may use; if not given, one per CPU rank or eight per GPU."""
        return self.host_cpus or self.ranks_per_node * (1 if self.kind == "cpu" else _CPUS_OF_A_GPU)

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
    """Return the class name of a parsed or constructed value; only the mixed document has a key `parts`.

    It discriminates the union of two document classes for pydantic.
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
    """Number of replicas of `replica_ranks` ranks that fill each part denoted by the number `part`."""
    return tuple(one.num_ranks // replica_ranks for one in cluster.parts_of(part))


def max_usable_bytes(cluster: AnyCluster) -> int:
    """Usable memory in bytes of the device that has most."""
    return max(part.device.usable_bytes for part in cluster.parts)


def require_uniform(cluster: AnyCluster, what: str) -> Cluster:
    """Return the cluster. Raises BadInput, naming `what`, if its nodes are of several kinds."""
    if isinstance(cluster, MixedCluster):
        raise BadInput(f"{what} takes a cluster of one kind, and this one is {cluster.name}; give it one of the parts.")
    return cluster
