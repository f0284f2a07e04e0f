"""The sections of a job file that name things outside it: models, cluster and data.

Model directories are checked to fit together by their small files; one may hold just a config.json, which gives a
shape to plan with. Devices and networks are given by name or typed in. Paths are relative to the job file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from meshwright.planner.job.limits import MAX_NODES, MAX_RANKS_PER_NODE
from meshwright.planner.job.tokenizer_facts import MAX_TOKENIZER_BYTES, TOKENIZER
from meshwright.profiles.documents import Document, parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Balance
from meshwright.profiles.hardware import (
    DEFAULT_NETWORK,
    Cluster,
    Device,
    Link,
    MixedCluster,
    cpu_links,
    device_named,
    local_cluster,
    network_named,
    one_or_mixed,
    usual_network,
)
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_shape import ModelSpec, read_model
from meshwright.profiles.stages import TEACHERS, Role
from meshwright.profiles.untrusted_text import load_json, read_text

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
_LANGUAGE_MODEL = ("ForCausalLM", "a language model")
_SCALAR_HEAD_MODEL = ("ForSequenceClassification", "a model with a scalar head")
_REWARD = "a model with a scalar head; needed where rewards names none"
_TEACHER = "model whose log-probabilities distill learns; it has the actor's vocabulary"
_MORE_TEACHERS = "another teacher; distill learns the weighted mean of all"
_REF = "reference policy of the KL penalty; without one there is no penalty; ppo needs one"
_ADAPTER = (
    "low-rank adapter (LoRA) of the actor or critic, trained while the other weights are frozen, except for a critic's "
    "scalar head; a ref of the same path may share the actor's weights"
)


_BALANCE = (
    "what keeps the load of the model's experts even: auxiliary_loss, or forced, as in a benchmark that routes at "
    "random; without it the busiest experts have the load that routers were measured to give them"
)


class ModelSource(Document):
    """The location of a model, the adapter that is trained in place of its weights, and the balance of its experts."""

    path: str = Field(
        description="Hugging Face directory, or a config.json when only planning; relative to the job file"
    )
    adapter: Adapter | None = Field(default=None, description=_ADAPTER)
    balance: Balance | None = Field(default=None, description=_BALANCE)


class Models(Document):
    """The models of a job, one for each role of its algorithm. The critic may name the reward model's directory; it
    then starts from those weights."""

    actor: ModelSource = Field(description="the policy that is trained")
    critic: ModelSource | None = Field(default=None, description="trained by ppo, and by no other algorithm")
    ref: ModelSource | None = Field(default=None, description=_REF)
    reward: ModelSource | None = Field(default=None, description=_REWARD)
    teacher: ModelSource | None = Field(default=None, description=_TEACHER)
    teacher_2: ModelSource | None = Field(default=None, description=_MORE_TEACHERS)
    teacher_3: ModelSource | None = Field(default=None, description=_MORE_TEACHERS)
    teacher_4: ModelSource | None = Field(default=None, description=_MORE_TEACHERS)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that have a model."""
        return tuple(role for role in Role if getattr(self, role.value) is not None)

    def source(self, role: Role) -> ModelSource:
        source: ModelSource | None = getattr(self, role.value)
        assert source is not None, role
        return source


def holds_language_model(directory: Path) -> bool:
    """True if a directory has the weights of a model with a vocabulary head. Raises BadInput for an unknown model."""
    return _has_weights(directory) and read_model(directory).architecture.endswith(_LANGUAGE_MODEL[0])


def _has_weights(directory: Path) -> bool:
    return any(any(directory.glob(name)) for name in _WEIGHT_FILES)


def require_heads(
    specs: Mapping[Role, ModelSpec], directories: Mapping[Role, Path], *, has_judge: bool = False
) -> None:
    """Raises BadInput if a model's weights lack the head that its role needs. A critic may start from a language model,
    with a zero head; a reward model may not, since all its scores would be zero. With `has_judge` the reward model is a
    language model."""
    language_models = dict.fromkeys((Role.ACTOR, Role.REF, *TEACHERS), _LANGUAGE_MODEL)
    reward = _LANGUAGE_MODEL if has_judge else _SCALAR_HEAD_MODEL
    for role, required in {**language_models, Role.REWARD: reward}.items():
        if role not in specs:
            continue
        architecture, directory = specs[role].architecture, directories[role]
        if not architecture.endswith(required[0]) and _has_weights(directory):
            missing = "scalar head (score.weight)" if required is _SCALAR_HEAD_MODEL else "vocabulary head"
            raise BadInput(
                f"models.{role.value}: {directory} holds a {architecture}, which has no {missing}; the {role.value} "
                f"must be {required[1]}, one of ...{required[0]}."
            )


def require_one_vocabulary(specs: Mapping[Role, ModelSpec], directories: Mapping[Role, Path]) -> None:
    """Raises BadInput for a teacher whose vocabulary size differs from the actor's. If both have a tokenizer, those are
    compared instead (`require_one_tokenizer`), because vocabulary sizes are padded differently."""
    has_tokenizer = {role: (directory / TOKENIZER).is_file() for role, directory in directories.items()}
    size = specs[Role.ACTOR].vocab_size
    for role in (teacher for teacher in TEACHERS if teacher in specs):
        if specs[role].vocab_size != size and not (has_tokenizer[role] and has_tokenizer[Role.ACTOR]):
            raise BadInput(
                f"models.{role.value}: its vocabulary has {specs[role].vocab_size} tokens and the actor's {size}, and "
                f"a teacher scores the actor's tokens; give a teacher of the actor's vocabulary, or a {TOKENIZER} "
                f"beside both that shows that it is."
            )


def require_one_tokenizer(
    specs: Mapping[Role, ModelSpec], directories: Mapping[Role, Path], tokenizer: Path | None
) -> None:
    """Raises BadInput unless all models share one tokenizer, and each has an embedding row for every token.

    Tokenizers are compared, not vocabulary sizes, which are padded differently. All must have the vocabulary and the
    merges of the job's `tokenizer` (a file or a directory), and no id may be two different added tokens. If the job has
    no tokenizer, they are compared with that of the first model that has one.
    """
    files = {role: path for role, directory in directories.items() if (path := directory / TOKENIZER).is_file()}
    if tokenizer is not None and tokenizer.is_dir():
        tokenizer /= TOKENIZER
    reference = tokenizer if tokenizer is not None and tokenizer.is_file() else next(iter(files.values()), None)
    if reference is None:
        return
    text = read_text(reference, "tokenizer", MAX_TOKENIZER_BYTES)
    reference_vocabulary = _TokenizerVocabulary.read(reference, text)
    for role, spec in specs.items():
        if reference_vocabulary.num_ids > spec.vocab_size:
            raise BadInput(
                f"tokenizer {reference} has ids up to {reference_vocabulary.num_ids - 1} and the {role.value} has a "
                f"vocabulary of {spec.vocab_size}; give the tokenizer of the models, or resize the model's embedding."
            )
    for role, path in files.items():
        other = read_text(path, "tokenizer", MAX_TOKENIZER_BYTES)
        for sentence in (
            () if other == text else reference_vocabulary.differences(_TokenizerVocabulary.read(path, other))
        ):
            raise BadInput(
                f"the models must share one tokenizer, and that of the {role.value}, {path}, {sentence} {reference}; "
                "give models that were trained with one tokenizer."
            )


@dataclass(frozen=True, kw_only=True)
class _TokenizerVocabulary:
    """The tokens and ids of a tokenizer.json, without its padding, truncation and post-processing."""

    ids: Mapping[str, int]
    merges: tuple[str, ...]
    added: Mapping[int, str]

    @classmethod
    def read(cls, path: Path, text: str) -> _TokenizerVocabulary:
        """Read BPE, WordPiece and WordLevel, whose vocabulary is a mapping, and Unigram, whose vocabulary is a list."""
        try:
            document = load_json(text)
            model: Mapping[str, Any] = document["model"]
            vocabulary = model["vocab"]
            if isinstance(vocabulary, list):
                vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
            merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or ())
            added = {int(token["id"]): str(token["content"]) for token in document.get("added_tokens") or ()}
            if not all(isinstance(number, int) for number in vocabulary.values()):
                raise ValueError("an id in its vocabulary is not a number")
            return cls(ids=dict(vocabulary), merges=tuple(merges), added=added)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise BadInput(
                f"tokenizer {path} cannot be read: {type(error).__name__}: {error}; give a tokenizer.json as the "
                "tokenizers library writes it."
            ) from None

    @property
    def num_ids(self) -> int:
        return max((*self.ids.values(), *self.added), default=-1) + 1

    def differences(self, other: _TokenizerVocabulary) -> Iterator[str]:
        """Clauses on how another tokenizer differs, to be followed by the name of this one."""
        for token in sorted(other.ids.items() ^ self.ids.items(), key=lambda item: (item[1], item[0]))[:1]:
            yield f"has {other.ids.get(token[0])} for the token {token[0]!r} and not {self.ids.get(token[0])} as"
        if other.merges != self.merges:
            yield "has other merges than"
        for number in sorted(other.added.keys() & self.added.keys()):
            if other.added[number] != self.added[number]:
                yield f"has {other.added[number]!r} for id {number} and not {self.added[number]!r} as"


_GIB = 2**30
_NETWORK = "fabric between nodes, by name or typed in; default: the usual one of the device (`meshwright devices`)"
_CPUS = "processors of one host, for rewards; default: 8 for each GPU, or one for each rank on CPUs"


class ClusterSpec(Document):
    """A cluster of one kind of nodes: devices by name or typed in, and the network between nodes. `local` is this
    machine, or `nodes` machines like it."""

    device: str | Device = Field(default="local", description="a device's name, its facts, or local")
    nodes: int = Field(default=1, gt=0, le=MAX_NODES, description="number of machines")
    ranks_per_node: int | None = Field(
        default=None, gt=0, le=MAX_RANKS_PER_NODE, description="default: one per core on local, else 8"
    )
    network: str | Link | None = Field(default=None, description=_NETWORK)
    host_memory_gib: float = Field(default=1024.0, gt=0, description="memory of one host, in GiB; not used by local")
    host_cpus: int | None = Field(default=None, gt=0, le=2**16, description=_CPUS)

    @classmethod
    def explain_unknown_key(cls, key: str, /) -> str | None:
        """Return how a number of devices is written."""
        return "write nodes and ranks_per_node." if key in ("gpus", "num_gpus", "devices", "num_devices") else None

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
        if self.network is None:
            raise BadInput(
                f"cluster.nodes={self.nodes}: local is this machine and does not know the network to others like it; "
                "give cluster.network, by name or as seconds and bytes_per_second."
            )
        return this_machine.model_copy(update={"nodes": self.nodes, "inter_node": self._network()})

    def _network(self) -> Link:
        if isinstance(self.network, Link):
            return self.network
        usual = usual_network(self.device) if isinstance(self.device, str) else DEFAULT_NETWORK
        return network_named(self.network or usual)


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


_PROMPTS = (
    "JSON lines, a .parquet file, or a directory: one saved by `datasets`, or the files of a split as on the "
    "Hugging Face hub"
)
_COLUMNS = (
    "names of the columns in the files: prompt, and any others to pass on with it; a dot selects a field of a nested "
    "column, as reward_model.ground_truth"
)
_LONG_PROMPTS = (
    "prompts longer than workload.prompt.max are left out (filter), truncated to their last tokens (truncate_left), or "
    "the job is refused (refuse)"
)
_SPLIT = "split to read from a directory that has several"
_CHAT = "treat a text prompt as a user message and apply the tokenizer's chat template"

PROMPT = "prompt"
"""The column that every row has: a text, messages of a chat, or token ids."""


ANSWER = "answer"
"""A column that a row may have: a text with which rewards compare a response."""


class Data(Document):
    """The prompts of a job and their tokenizer; paths are relative to the job file."""

    prompts: str = Field(description=_PROMPTS)
    held_out: str | None = Field(default=None, description="file of held-out prompts, for evaluations")
    tokenizer: str = Field(description="tokenizer.json, or the directory that has it")
    long_prompts: Literal["filter", "truncate_left", "refuse"] = Field(default="filter", description=_LONG_PROMPTS)
    columns: Mapping[str, str] = Field(default={}, description=_COLUMNS)
    split: str = Field(default="train", description=_SPLIT)
    held_out_split: str = Field(default="test", description=_SPLIT)
    chat: bool = Field(default=False, description=_CHAT)

    @property
    def named_columns(self) -> Mapping[str, str]:
        """The columns to read: our name of each to its name in the files."""
        return {PROMPT: PROMPT, **self.columns}

    @property
    def optional_columns(self) -> Mapping[str, str]:
        """The columns that are read if the files have them, although the job does not name them: our name to theirs."""
        return {} if ANSWER in self.columns else {ANSWER: ANSWER}
