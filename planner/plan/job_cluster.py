"""The cluster of a job: devices and networks by name or typed in, with nodes of one kind or of several."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import Discriminator, Field, Tag

from meshwright.planner.plan.job_limits import MOST_NODES, MOST_RANKS_PER_NODE
from meshwright.profiles.cluster import Cluster, Device, Link, MixedCluster, one_or_mixed
from meshwright.profiles.devices import cpu_links, device_named, local_cluster, network_named
from meshwright.profiles.documents import Document, parse
from meshwright.profiles.errors import BadInput

_GIB = 2**30
_CPUS = "processors of one host, for rewards; default: 8 for each GPU, or one for each rank on CPUs"


class ClusterSpec(Document):
    """A cluster of one kind of nodes: devices by name or typed in, and the network between nodes. `local` is this
    machine, or `nodes` like it."""

    device: str | Device = Field(default="local", description="a device's name, its facts, or local")
    nodes: int = Field(default=1, gt=0, le=MOST_NODES, description="number of machines")
    ranks_per_node: int | None = Field(
        default=None, gt=0, le=MOST_RANKS_PER_NODE, description="default: one per core on local, else 8"
    )
    network: str | Link = Field(default="ib-hdr-200", description="fabric between nodes, by name or typed in")
    host_memory_gib: float = Field(default=1024.0, gt=0, description="memory of one host, in GiB; not used by local")
    host_cpus: int | None = Field(default=None, gt=0, le=2**16, description=_CPUS)

    def resolve(self) -> Cluster:
        """Return the cluster with every name looked up. Raises BadInput for an unknown name."""
        if self.device == "local":
            return self._machines_like_this().model_copy(update={"host_cpus": self.host_cpus})
        device, intra_node, host = (
            device_named(self.device) if isinstance(self.device, str) else _with_default_links(self.device)
        )
        return Cluster(
            nodes=self.nodes,
            ranks_per_node=self.ranks_per_node or 8,
            device=device,
            intra_node=intra_node,
            inter_node=self._network(),
            host=host,
            host_memory_bytes=int(self.host_memory_gib * _GIB),
            host_cpus=self.host_cpus,
        )

    def _machines_like_this(self) -> Cluster:
        """A cluster of `nodes` machines like this one. Its network cannot be detected, so the job must give it."""
        this_machine = local_cluster(self.ranks_per_node)
        if self.nodes == 1:
            return this_machine
        if "network" not in self.model_fields_set:
            raise BadInput(
                f"cluster.nodes={self.nodes}: local is this machine and does not know the network to others like it; "
                "give cluster.network, by name or as seconds and bytes_per_second."
            )
        return this_machine.model_copy(update={"nodes": self.nodes, "inter_node": self._network()})

    def _network(self) -> Link:
        return network_named(self.network) if isinstance(self.network, str) else self.network


class MixedSpec(Document):
    """A cluster of several kinds of nodes."""

    parts: tuple[ClusterSpec, ...] = Field(min_length=2, description="clusters of one kind each; not local")
    network: str | Link = Field(default="ib-hdr-200", description="fabric between the parts, by name or typed in")

    def resolve(self) -> MixedCluster:
        """Return the cluster with every name looked up. Raises BadInput for an unknown name, for `local`, and for parts
        that differ where they must be equal."""
        if any(part.device == "local" for part in self.parts):
            raise BadInput("cluster.parts: a part is local, which is this machine alone; name the device of each part.")
        between = network_named(self.network) if isinstance(self.network, str) else self.network
        mixed = MixedCluster.model_construct(parts=tuple(part.resolve() for part in self.parts), between=between)
        return parse(MixedCluster, mixed.model_dump_json(), "cluster")


def _with_default_links(device: Device) -> tuple[Device, Link, Link]:
    """A typed-in device with default links: those of CPU ranks, or PCIe 4.0 x16."""
    _, *pcie = device_named("l40s")
    intra_node, host = cpu_links() if device.kind == "cpu" else pcie
    return device, intra_node, host


def _cluster_type(value: Any) -> str:
    return one_or_mixed(value, ClusterSpec, MixedSpec) if isinstance(value, dict | Document) else "Name"


AnyClusterSpec: TypeAlias = Annotated[
    Annotated[str, Tag("Name")] | Annotated[ClusterSpec, Tag("ClusterSpec")] | Annotated[MixedSpec, Tag("MixedSpec")],
    Discriminator(_cluster_type),
]
"""A device's name or `local`, nodes of one kind, or nodes of several kinds."""
