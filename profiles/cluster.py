"""What is known of the hardware: a device, the links between devices, and how many there are.

Compute facts and network facts are separate: any device on any fabric.
"""

from __future__ import annotations

from pydantic import Field

from meshwright.profiles.documents import Document


class Link(Document):
    """A tier of the network as one rank sees it."""

    seconds: float = Field(ge=0, description="latency of one message")
    bytes_per_second: float = Field(gt=0, description="bandwidth per rank in one direction")


class Device(Document):
    """One device: what a rank computes on."""

    name: str
    kind: str = Field(pattern="^(cpu|cuda)$", description="cpu or cuda")
    memory_bytes: int = Field(gt=0)
    memory_bytes_per_second: float = Field(gt=0)
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

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def link(self, num_ranks: int) -> Link:
        """The slowest tier that a group of consecutive ranks crosses."""
        return self.intra_node if num_ranks <= self.ranks_per_node else self.inter_node
