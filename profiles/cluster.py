"""What is known of the hardware: a device, the links between devices, and how many there are.

Compute facts and network facts are separate: any device on any fabric.
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
"""Processors of a host for each of its GPUs, at least: hosts of 8 A100 or H100 have 96 to 224."""


class Link(Document):
    """A tier of the network as one rank sees it."""

    seconds: float = Field(ge=0, description="latency of one message")
    bytes_per_second: float = Field(gt=0, description="bandwidth per rank in one direction")


class Device(Document):
    """One device: what a rank computes on."""

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
        """Memory that a plan may fill."""
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
    host_cpus: int | None = Field(default=None, gt=0, description="processors of one host, where they were given")

    @model_serializer(mode="wrap")
    def _without_default(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Clusters whose processors were not given are written as they were before these could be."""
        return {key: value for key, value in written(self).items() if key != "host_cpus" or value is not None}

    @property
    def cpus(self) -> int:
        """Processors of one host that rewards may use: one for each rank of a CPU, eight for each GPU, unless given."""
        return self.host_cpus or self.ranks_per_node * (1 if self.kind == "cpu" else _CPUS_OF_A_GPU)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def name(self) -> str:
        """How many of which device."""
        return f"{self.num_ranks} x {self.device.name}"

    @property
    def kind(self) -> str:
        """cpu or cuda."""
        return self.device.kind

    @property
    def parts(self) -> tuple[Cluster, ...]:
        """Itself: all nodes are of one kind."""
        return (self,)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        return (0,)

    def part_of(self, _rank: int) -> int:
        """The position among the parts of the one that holds a rank."""
        return 0

    def part_of_pool(self, _ranks: range) -> int:
        """The number of the part that holds the ranks of a pool."""
        return 0

    def parts_of(self, _part: int) -> tuple[Cluster, ...]:
        """Itself, the one part."""
        return (self,)

    def usable_bytes(self, _rank: int) -> int:
        """Memory of a rank's device that a plan may fill."""
        return self.device.usable_bytes

    def link(self, num_ranks: int) -> Link:
        """The slowest tier that a group of consecutive ranks crosses."""
        return self.intra_node if num_ranks <= self.ranks_per_node else self.inter_node


class MixedCluster(Document):
    """Nodes of several kinds. Each part is a cluster of one kind, its ranks numbered after those of the parts before.

    A stage runs within one part, or on a pair: all of two neighbouring parts. Parts exchange experience and
    weights over the fabric between them. Parts are numbered from 0, and behind them the pairs. All nodes have as many
    ranks, and all devices are of one kind, cpu or cuda.
    """

    parts: tuple[Cluster, ...] = Field(min_length=2)
    between: Link = Field(description="the fabric that joins the parts")

    @model_validator(mode="after")
    def _alike(self) -> MixedCluster:
        for what in ("ranks_per_node", "kind"):
            values = sorted({str(getattr(part, what)) for part in self.parts})
            if len(values) > 1:
                raise ValueError(f"the parts differ in {what} ({', '.join(values)}); make it the same in all parts")
        return self

    @property
    def name(self) -> str:
        """How many of which devices."""
        return " + ".join(part.name for part in self.parts)

    @property
    def kind(self) -> str:
        """cpu or cuda."""
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
        """The position among the parts of the one that holds this rank."""
        return max(index for index, first in enumerate(self.first_ranks) if first <= rank)

    def part_of_pool(self, ranks: range) -> int:
        """The number of the part that holds the ranks of a pool, or of the pair where they are of two parts."""
        first, last = self.part_of(ranks.start), self.part_of(ranks.stop - 1)
        return first if first == last else len(self.parts) + first

    def parts_of(self, part: int) -> tuple[Cluster, ...]:
        """The part of a number, or the two of a pair."""
        first = part - len(self.parts)
        return self.parts[first : first + 2] if first >= 0 else (self.parts[part],)

    def usable_bytes(self, rank: int) -> int:
        """Memory of a rank's device that a plan may fill."""
        return self.parts[self.part_of(rank)].device.usable_bytes


def one_or_mixed(value: Any, one: type[Document], mixed: type[Document]) -> str:
    """The name of the one of two documents that a value is, read or made: only the mixed one has parts of its own."""
    if isinstance(value, dict):
        return mixed.__name__ if "parts" in value else one.__name__
    return type(value).__name__


AnyCluster: TypeAlias = Annotated[
    Annotated[Cluster, Tag("Cluster")] | Annotated[MixedCluster, Tag("MixedCluster")],
    Discriminator(lambda value: one_or_mixed(value, Cluster, MixedCluster)),
]
"""A cluster of one kind of node or of several."""


def replicas_of_parts(cluster: AnyCluster, part: int, replica_ranks: int) -> tuple[int, ...]:
    """How many replicas of so many ranks there are on all ranks of each part that a number stands for."""
    return tuple(one.num_ranks // replica_ranks for one in cluster.parts_of(part))


def most_usable_bytes(cluster: AnyCluster) -> int:
    """Memory of the largest device that a plan may fill."""
    return max(part.device.usable_bytes for part in cluster.parts)


def of_one_kind(cluster: AnyCluster, what: str) -> Cluster:
    """The cluster; raises BadInput where its nodes are of several kinds, which `what` does not take."""
    if isinstance(cluster, MixedCluster):
        raise BadInput(f"{what} takes a cluster of one kind, and this one is {cluster.name}; give it one of the parts.")
    return cluster
