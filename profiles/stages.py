"""The stages of a PPO step: what each reads and writes. The edges between stages follow from that."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import networkx as nx


class Role(StrEnum):
    """Whose weights a stage uses."""

    ACTOR = "actor"
    CRITIC = "critic"
    REF = "ref"
    REWARD = "reward"


class Mode(StrEnum):
    """How a stage uses the hardware."""

    PREFILL = "prefill"
    DECODE = "decode"
    FORWARD = "forward"
    TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One function call of a PPO step. `reads` and `writes` name fields of the experience, one row per sequence."""

    name: str
    role: Role
    modes: tuple[Mode, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @cached_property
    def trains(self) -> bool:
        return Mode.TRAIN in self.modes

    @cached_property
    def generates(self) -> bool:
        return Mode.DECODE in self.modes


class Values(NamedTuple):
    """What a field of the experience holds of each token, or one for the sequence; `dtype` is torch's name of it."""

    dtype: Literal["int64", "int32", "uint8", "float32"] = "float32"
    is_one: bool = False

    @property
    def num_bytes(self) -> int:
        """Of one value."""
        return {"int64": 8, "int32": 4, "uint8": 1, "float32": 4}[self.dtype]


_VALUES = {
    "tokens": Values("int64"),
    "prompt_lengths": Values("int64", is_one=True),
    "truncated": Values("uint8", is_one=True),
    "scores": Values(is_one=True),
    "versions": Values("int32"),
}


def values_of(field: str) -> Values:
    """Those of a field of the experience: most have an fp32 number per token."""
    return _VALUES.get(field, Values())


_SCORED = ("tokens", "prompt_lengths", "truncated", "scores", "ref_logprobs", "values", "proximal_logprobs")

STAGES: tuple[Stage, ...] = (
    Stage(
        name="actor_generate",
        role=Role.ACTOR,
        modes=(Mode.PREFILL, Mode.DECODE),
        reads=(),
        writes=("tokens", "prompt_lengths", "truncated", "behaviour_logprobs", "versions"),
    ),
    Stage(name="reward_score", role=Role.REWARD, modes=(Mode.FORWARD,), reads=("tokens",), writes=("scores",)),
    Stage(name="ref_logprob", role=Role.REF, modes=(Mode.FORWARD,), reads=("tokens",), writes=("ref_logprobs",)),
    Stage(name="critic_value", role=Role.CRITIC, modes=(Mode.FORWARD,), reads=("tokens",), writes=("values",)),
    Stage(
        name="actor_logprob", role=Role.ACTOR, modes=(Mode.FORWARD,), reads=("tokens",), writes=("proximal_logprobs",)
    ),
    Stage(
        name="actor_train",
        role=Role.ACTOR,
        modes=(Mode.TRAIN,),
        reads=(*_SCORED, "behaviour_logprobs", "versions"),
        writes=(),
    ),
    Stage(name="critic_train", role=Role.CRITIC, modes=(Mode.TRAIN,), reads=_SCORED, writes=()),
)

STAGE_BY_NAME = {stage.name: stage for stage in STAGES}

TRAIN_STAGE = {stage.role: stage.name for stage in STAGES if stage.trains}
"""The stage that owns the weights of a trained role; other stages of that role are refit from it."""


class StageEdge(NamedTuple):
    """The fields that one stage writes and another reads within a step."""

    producer: str
    consumer: str
    fields: tuple[str, ...]


STAGE_EDGES = tuple(
    StageEdge(producer.name, consumer.name, fields)
    for producer in STAGES
    for consumer in STAGES
    if (fields := tuple(field for field in consumer.reads if field in producer.writes))
)
"""By producer and consumer in the order of the stages."""


def stage_graph() -> nx.DiGraph[str]:
    """The edges as a graph, each with its `fields`."""
    import networkx as nx

    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(stage.name for stage in STAGES)
    for producer, consumer, fields in STAGE_EDGES:
        graph.add_edge(producer, consumer, fields=fields)
    return graph
