"""The job a user writes, and the facts it resolves to.

`job.yaml` names models, a cluster, a workload, PPO settings and data. `Facts` is what planning needs of it, with every
name looked up; a plan carries its facts, so that it can be checked and asked about without the files it came from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from meshwright.profiles.cluster import AnyCluster, Cluster, Device, Link, MixedCluster
from meshwright.profiles.devices import cpu_links, device_named, local_cluster, network_named
from meshwright.profiles.documents import Document, digest, parse, read_yaml
from meshwright.profiles.errors import BadInput
from meshwright.profiles.model import ModelSpec, read_model
from meshwright.profiles.stages import Role
from meshwright.profiles.workload import Workload

_SCALAR_HEADS = {Role.ACTOR: False, Role.REF: False, Role.CRITIC: True, Role.REWARD: True}
_GIB = 2**30
_CONTROLLERS = "let chunk sizes and the overcommit follow the run (OPPO), at most as large as the plan chose them"
_STALENESS = "most actor updates that may lie between sampling a token and its use; 0 is synchronous PPO"


class ModelSource(Document):
    path: str = Field(
        description="Hugging Face directory, or a config.json when only planning; relative to the job file"
    )


class Models(Document):
    """The four models. The critic may name the reward model's directory: it then starts from those weights."""

    actor: ModelSource
    critic: ModelSource
    ref: ModelSource
    reward: ModelSource

    def source(self, role: Role) -> ModelSource:
        source: ModelSource = getattr(self, role.value)
        return source


class ClusterSpec(Document):
    """Devices by name or typed in, and the network between nodes. `local` is this machine, or `nodes` like it."""

    device: str | Device = Field(default="local", description="a device's name, its facts, or local")
    nodes: int = Field(default=1, gt=0)
    ranks_per_node: int | None = Field(default=None, gt=0, description="default: one per core on local, else 8")
    network: str | Link = Field(default="ib-hdr-200", description="fabric between nodes, by name or typed in")
    host_memory_gib: float = Field(default=1024.0, gt=0, description="memory of one host, in GiB; not used by local")

    def resolve(self) -> Cluster:
        """The cluster with every name looked up. Raises BadInput for a name that is not known."""
        if self.device == "local":
            return self._machines_like_this()
        device, intra_node, host = device_named(self.device) if isinstance(self.device, str) else _typed(self.device)
        return Cluster(
            nodes=self.nodes,
            ranks_per_node=self.ranks_per_node or 8,
            device=device,
            intra_node=intra_node,
            inter_node=self._network(),
            host=host,
            host_memory_bytes=int(self.host_memory_gib * _GIB),
        )

    def _machines_like_this(self) -> Cluster:
        """As many machines like this one as there are nodes; what joins them cannot be seen from here."""
        here = local_cluster(self.ranks_per_node)
        if self.nodes == 1:
            return here
        if "network" not in self.model_fields_set:
            raise BadInput(
                f"cluster.nodes={self.nodes}: local is this machine and does not know the network to others like it; "
                "give cluster.network, by name or as seconds and bytes_per_second."
            )
        return here.model_copy(update={"nodes": self.nodes, "inter_node": self._network()})

    def _network(self) -> Link:
        return network_named(self.network) if isinstance(self.network, str) else self.network


class MixedSpec(Document):
    """Nodes of several kinds; a stage runs on ranks of one kind."""

    parts: tuple[ClusterSpec, ...] = Field(min_length=2, description="clusters of one kind each; not local")
    network: str | Link = Field(default="ib-hdr-200", description="fabric between the parts, by name or typed in")

    def resolve(self) -> MixedCluster:
        """The clusters with every name looked up. Raises BadInput for a name that is not known, for local, and for
        parts that are not alike where they must be."""
        if any(part.device == "local" for part in self.parts):
            raise BadInput("cluster.parts: a part is local, which is this machine alone; name the device of each part.")
        between = network_named(self.network) if isinstance(self.network, str) else self.network
        found = MixedCluster.model_construct(parts=tuple(part.resolve() for part in self.parts), between=between)
        return parse(MixedCluster, found.model_dump_json(), "cluster")


def _typed(device: Device) -> tuple[Device, Link, Link]:
    """A user's own device, its links those of a CPU's ranks or PCIe 4.0 x16 until links are typed too."""
    _, *pcie = device_named("l40s")
    intra_node, host = cpu_links() if device.kind == "cpu" else pcie
    return device, intra_node, host


StopString = Annotated[str, Field(min_length=1)]


class PPO(Document):
    """Settings of the algorithm; equations and sources in `runtime.ppo`."""

    actor_learning_rate: float = Field(default=1e-6, gt=0)
    critic_learning_rate: float = Field(default=5e-6, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_ratio: float = Field(default=0.2, gt=0)
    value_clip: float = Field(default=0.2, gt=0)
    kl_coefficient: float = Field(default=0.05, ge=0, description="KL penalty per token, inside the reward")
    gamma: float = Field(default=1.0, gt=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    entropy_coefficient: float = Field(default=0.0, ge=0)
    whiten_advantages: bool = True
    importance_cap: float = Field(default=2.0, gt=0, description="of the importance weight of a stale token")
    temperature: float = Field(default=1.0, gt=0, description="of the sampled distribution")
    top_k: int = Field(default=0, ge=0, description="sample from the k likeliest tokens only; 0 is all")
    top_p: float = Field(default=1.0, gt=0, le=1, description="sample from the likeliest tokens that reach p only")
    stop: tuple[StopString, ...] = Field(default=(), description="strings that end a response, which keeps them")
    seed: int = Field(default=0, ge=0)


class Data(Document):
    """JSON-lines files of {"id", "prompt"} and the tokenizer that reads them; relative to the job file."""

    prompts: str
    held_out: str | None = None
    tokenizer: str


def _spec_of(value: Any) -> str:
    if isinstance(value, dict):
        return MixedSpec.__name__ if "parts" in value else ClusterSpec.__name__
    return type(value).__name__ if isinstance(value, Document) else "Local"


_AnySpec: TypeAlias = Annotated[
    Annotated[Literal["local"], Tag("Local")]
    | Annotated[ClusterSpec, Tag("ClusterSpec")]
    | Annotated[MixedSpec, Tag("MixedSpec")],
    Discriminator(_spec_of),
]


class Job(Document):
    models: Models
    cluster: _AnySpec = "local"
    precision: Literal["fp32", "bf16"] = "bf16"
    workload: Workload
    staleness: int = Field(default=0, ge=0, le=8, description=_STALENESS)
    controllers: bool = Field(default=False, description=_CONTROLLERS)
    ppo: PPO = PPO()
    data: Data | None = Field(default=None, description="needed by run, not by plan")


class RoleModels(Document):
    """The shapes of the four models."""

    actor: ModelSpec
    critic: ModelSpec
    ref: ModelSpec
    reward: ModelSpec

    def spec(self, role: Role) -> ModelSpec:
        spec: ModelSpec = getattr(self, role.value)
        return spec


class Facts(Document):
    """All that a plan is computed from, names resolved."""

    models: RoleModels
    cluster: AnyCluster
    precision: Literal["fp32", "bf16"]
    workload: Workload
    staleness: int = Field(default=0, ge=0, le=8, description=_STALENESS)
    controllers: bool = Field(default=False, description=_CONTROLLERS)

    def digests(self) -> dict[str, str]:
        """SHA-256 of each part's canonical text."""
        return {
            "cluster": digest(self.cluster),
            "models": digest(self.models),
            "workload": digest(self.workload),
        }


def read_job(path: Path) -> Job:
    """The job in a YAML file. Raises BadInput naming the key and the rule."""
    return read_yaml(Job, path, "job")


def resolve(job: Job, directory: Path) -> Facts:
    """The facts of a job whose relative paths start at `directory`. Raises BadInput for what cannot be looked up."""
    specs = {
        role.value: read_model(directory / job.models.source(role).path, scalar_head=_SCALAR_HEADS[role])
        for role in Role
    }
    if len({spec.vocab_size for spec in specs.values()}) > 1:
        sizes = ", ".join(f"{role} {spec.vocab_size}" for role, spec in specs.items())
        raise BadInput(f"models have different vocabularies ({sizes}); the four models must share one tokenizer.")
    longest = min(specs.values(), key=lambda spec: spec.max_positions)
    if job.workload.max_tokens > longest.max_positions:
        raise BadInput(
            f"workload: prompt.max + response.max = {job.workload.max_tokens} exceeds the {longest.max_positions} "
            f"positions of {longest.name}; shorten response.max to {longest.max_positions - job.workload.prompt.max}."
        )
    cluster = ClusterSpec().resolve() if job.cluster == "local" else job.cluster.resolve()
    return Facts(
        models=RoleModels(**specs),
        cluster=cluster,
        precision=job.precision,
        workload=job.workload,
        staleness=job.staleness,
        controllers=job.controllers,
    )


def require_job(planned: Facts, job: Job, directory: Path) -> None:
    """Raises BadInput unless the facts of a plan are those of this job. The cluster may be another of its kind."""
    facts = resolve(job, directory)
    for part in ("models", "workload", "precision", "controllers"):
        if getattr(facts, part) != getattr(planned, part):
            raise BadInput(f"the plan was made for another job: its {part} differ; plan this job again.")
