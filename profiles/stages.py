"""Stages, the function calls of one training step, and the dataflow graph that they form.

A stage declares which fields of the experience it reads and writes; the edges of the graph follow from these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple

from meshwright.profiles.errors import require_none

GENERATE = "actor_generate"
"""Name of the generation stage in every graph."""

ENVIRONMENT = "environment_score"
"""Name of the stage in which host workers score responses."""

REWARDS, REWARD_SECONDS, REWARD_ERROR = "environment_scores", "environment_seconds", "environment_error"
"""Fields that the environment stage writes for each response: one score per reward, in the job's order;
seconds from the end of the response until each score was known; and the error message of a failed reward, as bytes."""

TOTAL_SCORES = "total_scores"
"""Field with the final scalar reward of a response that hosts or teachers score; computed when all scores are known."""

SCORE_SIZES = "score_sizes"
"""Field with the largest absolute term of the total score, which bounds the rounding error of the sum."""

RESPONSE_LENGTHS, SAMPLED_LENGTHS, SEQUENCE_DIGESTS = "response_lengths", "sampled_lengths", "sequence_digests"
"""Fields that generation reports for each sequence of a wave, in addition to what stages read: the number of tokens
after the prompt, the number of sampled ones among them, and a hash that is equal for sequences with equal tokens."""

KEPT_TOKENS, KEPT_COUNTS = "kept_tokens", "kept_counts"
"""Fields with the sampling mask: the tokens that a sequence could have sampled at each of its positions, one set after
another, and the size of the set of each position, which is 0 where no token was sampled."""

SAMPLING_MASK = (KEPT_TOKENS, KEPT_COUNTS)

TOOL_TOKEN_VERSION = -1
"""Value of the field "versions" for tool tokens; sampled tokens have the version of the weights that sampled them."""


class Role(StrEnum):
    """The model whose weights a stage uses."""

    ACTOR = "actor"
    CRITIC = "critic"
    REF = "ref"
    REWARD = "reward"
    TEACHER = "teacher"
    TEACHER_2 = "teacher_2"
    TEACHER_3 = "teacher_3"
    TEACHER_4 = "teacher_4"


TEACHERS = (Role.TEACHER, Role.TEACHER_2, Role.TEACHER_3, Role.TEACHER_4)
"""Roles whose log-probabilities a student learns; a job with n teachers has the first n."""


TEACHER_LOGPROBS: Mapping[Role, str] = {role: f"{role}_logprobs" for role in TEACHERS}
"""Field of the experience with the log-probabilities of each teacher."""

TEACHER_TOP_TOKENS: Mapping[Role, str] = {role: f"{role}_top_tokens" for role in TEACHERS}
"""Field with each teacher's k likeliest tokens at every position that predicts a token of the response, one position
after the other."""

TEACHER_TOP_LOGPROBS: Mapping[Role, str] = {role: f"{role}_top_logprobs" for role in TEACHERS}
"""Field with the log-probabilities of those k tokens and, after them, of all other tokens together: k + 1 for each
position."""


class Mode(StrEnum):
    """The computation mode of a stage, which determines how it uses the hardware."""

    PREFILL = "prefill"
    DECODE = "decode"
    FORWARD = "forward"
    TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One function call of a step. `reads` and `writes` name fields of the experience, one row per sequence.

    `is_trained`: some stage of the graph trains the weights that this stage uses. `may_stream`: the stage can read
    responses in chunks while they are generated. `base_of`: the role whose weights, without the adapter, this stage
    uses. `is_quantised`: linear layers have weights in 8-bit floats, in a copy of the weights that no other stage uses.
    `judges`: the stage generates a verdict on each sequence, and its score is read off the verdict. `top_tokens`: the
    number of likeliest tokens of each prediction that a teacher reports, and that the loss of a student compares.
    """

    name: str
    role: Role
    modes: tuple[Mode, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    is_trained: bool = False
    may_stream: bool = False
    base_of: Role | None = None
    is_quantised: bool = False
    judges: bool = False
    top_tokens: int = 0

    @cached_property
    def trains(self) -> bool:
        return Mode.TRAIN in self.modes

    @cached_property
    def generates(self) -> bool:
        return Mode.DECODE in self.modes

    @cached_property
    def may_share(self) -> bool:
        """True if this stage may share a copy of the weights with other stages."""
        return not self.is_quantised and (self.is_trained or self.base_of is not None)

    @cached_property
    def copied_role(self) -> Role:
        """The role whose copies of the weights this stage may use."""
        return self.base_of or self.role

    @cached_property
    def num_distributions(self) -> int:
        """Number of teachers whose likeliest tokens this stage reports, or reads to learn from them."""
        fields = TEACHER_TOP_TOKENS.values()
        return sum(field in fields for field in (self.reads if self.trains else self.writes))

    @property
    def needs_refit(self) -> bool:
        """True if a separate copy of the weights for this stage would have to be refit from the trained copy."""
        return self.is_trained and not self.trains


@dataclass(frozen=True, kw_only=True)
class HostStage:
    """An environment stage, which runs on host workers and has no ranks.

    It `reads` the fields that generation writes, for each response as soon as the response is complete.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class FieldType(NamedTuple):
    """The values of one field of the experience: one per token, or with `per_sequence` one per sequence. `KEPT_TOKENS`
    has several per sampled token.

    A field of `distributions` has k values for each token of the response, and `num_added` more. `dtype` is the name
    of a torch dtype.
    """

    dtype: Literal["int64", "int32", "uint8", "float32"] = "float32"
    per_sequence: bool = False
    distributions: bool = False
    num_added: int = 0

    def num_values(self, prompt: float, response: float, top_tokens: int) -> float:
        """Number of values of a sequence whose prompt and response have these tokens, or of the mean sequence."""
        if self.per_sequence:
            return 1
        return response * (top_tokens + self.num_added) if self.distributions else prompt + response

    @property
    def num_bytes(self) -> int:
        """Bytes of one value."""
        return {"int64": 8, "int32": 4, "uint8": 1, "float32": 4}[self.dtype]


_FIELD_TYPES = {
    "tokens": FieldType("int64"),
    "prompt_lengths": FieldType("int64", per_sequence=True),
    "truncated": FieldType("uint8", per_sequence=True),
    "scores": FieldType(per_sequence=True),
    TOTAL_SCORES: FieldType(per_sequence=True),
    REWARD_ERROR: FieldType("uint8"),
    "versions": FieldType("int32"),
    KEPT_TOKENS: FieldType("int32"),
    KEPT_COUNTS: FieldType("int32"),
    **{field: FieldType("int32", distributions=True) for field in TEACHER_TOP_TOKENS.values()},
    **{field: FieldType(distributions=True, num_added=1) for field in TEACHER_TOP_LOGPROBS.values()},
}


def field_type(field: str) -> FieldType:
    """Return dtype and granularity of a field of the experience; the default is one fp32 value per token."""
    return _FIELD_TYPES.get(field, FieldType())


class StageEdge(NamedTuple):
    """The fields that one stage writes and another reads within a step."""

    producer: str
    consumer: str
    fields: tuple[str, ...]


@dataclass(frozen=True)
class StageGraph:
    """The stages of a step in topological order, and the stages on hosts, which run while generation does.

    `selects_samples` is True if only some of the samples that generation and the reward model process are trained on,
    selected by their scores. Raises BadInput if the stages do not form a graph.
    """

    stages: tuple[Stage, ...]
    host_stages: tuple[HostStage, ...] = ()
    selects_samples: bool = False

    def __post_init__(self) -> None:
        require_none(graph_violations(self.stages, self.host_stages), "algorithm")

    @cached_property
    def by_name(self) -> Mapping[str, Stage]:
        """Stages by name, in their order."""
        return {stage.name: stage for stage in self.stages}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Index of each stage in `stages`."""
        return {name: index for index, name in enumerate(self.names)}

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """The roles whose weights some stage uses, each once."""
        return tuple(dict.fromkeys(stage.role for stage in self.stages))

    @cached_property
    def train_stage(self) -> Mapping[Role, str]:
        """The training stage of each trained role; it owns the weights, and other stages are refit from it."""
        return {stage.role: stage.name for stage in self.stages if stage.trains}

    @cached_property
    def writer(self) -> Mapping[str, str]:
        """The stage that writes each field."""
        all_stages: tuple[Stage | HostStage, ...] = (*self.stages, *self.host_stages)
        return {field: stage.name for stage in all_stages for field in stage.writes}

    @cached_property
    def edges(self) -> tuple[StageEdge, ...]:
        """Edges between stages on ranks, sorted by producer, then consumer, in the order of the stages."""
        return tuple(_edges(self.stages, self.stages))

    @cached_property
    def host_edges(self) -> tuple[StageEdge, ...]:
        """Edges from stages on hosts to stages on ranks, sorted like `edges`."""
        return tuple(_edges(self.host_stages, self.stages))

    @cached_property
    def streaming(self) -> tuple[str, ...]:
        """The stages that may read responses while they are generated."""
        return tuple(stage.name for stage in self.stages if stage.may_stream)

    @cached_property
    def refit_targets(self) -> tuple[str, ...]:
        """The stages of trained roles that do not train; their copies of the weights, if any, are refit."""
        return tuple(stage.name for stage in self.stages if stage.needs_refit)

    def trainer_of(self, stage: str) -> str:
        """Return the stage that trains the weights which a stage of a trained role uses."""
        return self.train_stage[self.by_name[stage].role]

    def refit_readers(self, target: str) -> tuple[str, ...]:
        """The stages that wait for the refit of a stage's copy: itself and later stages that may share the copy."""
        if self.by_name[target].is_quantised:
            return (target,)
        role, first = self.by_name[target].role, self.position[target]
        return tuple(stage.name for stage in self.stages[first:] if stage.role == role and not stage.trains)

    def with_quantised(self, stage: str) -> StageGraph:
        """The graph with the linear layers of the named stage in 8-bit floats."""
        stages = (replace(s, is_quantised=True) if s.name == stage else s for s in self.stages)
        return replace(self, stages=tuple(stages))

    def sharers(self, role: Role) -> tuple[str, ...]:
        """The stages that may share copies of a trained role's weights.

        The training stage comes first: it owns the copy that others may share. Stages that use the weights without the
        adapter come last, because the copy that they share belongs to another stage.
        """
        stages = [s for s in self.stages if s.copied_role == role and not s.is_quantised]
        return tuple(s.name for s in sorted(stages, key=lambda s: (not s.trains, s.base_of is not None)))


def _edges(producers: Iterable[Stage | HostStage], consumers: Collection[Stage]) -> Iterator[StageEdge]:
    for producer in producers:
        for consumer in consumers:
            if fields := tuple(field for field in consumer.reads if field in producer.writes):
                yield StageEdge(producer.name, consumer.name, fields)


def graph_violations(stages: tuple[Stage, ...], host_stages: tuple[HostStage, ...]) -> Iterator[str]:
    """One sentence for each rule that the stages break, so that they form no graph."""
    # stages on hosts run while generation does, so they come right after it
    generating = next((index for index, stage in enumerate(stages, start=1) if stage.generates), 0)
    all_stages: tuple[Stage | HostStage, ...] = (*stages[:generating], *host_stages, *stages[generating:])
    yield from _duplicate_names(all_stages)
    yield from _field_violations(all_stages)
    yield from _generation_violations(stages)
    yield from _training_violations(stages)


def _duplicate_names(stages: Sequence[Stage | HostStage]) -> Iterator[str]:
    names = [stage.name for stage in stages]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"the stage {name} is listed {names.count(name)} times; list it once."


def _field_violations(stages: Sequence[Stage | HostStage]) -> Iterator[str]:
    """One sentence for each field that is written twice, or read before or without being written.

    A stage must come after the stages that it reads from, so that there is no cycle.
    """
    writers: dict[str, str] = {}
    for stage in stages:
        for field in stage.writes:
            if field in writers:
                yield f"{stage.name} writes {field}, and so does {writers[field]}; let one stage write it."
            writers.setdefault(field, stage.name)
    written: set[str] = set()
    for stage in stages:
        for field in stage.reads:
            if field not in writers:
                yield f"{stage.name} reads {field}, which no stage writes; add a stage that does."
            elif field not in written:
                message, writer = f"{stage.name} reads {field} before {writers[field]} writes it", writers[field]
                path = _path(writer, stage.name, {one.name: one.reads for one in stages}, writers)
                if path:
                    cycle = " -> ".join((stage.name, *path))
                    yield f"{message}, and they read from each other in a cycle ({cycle}); let one of them read less."
                else:
                    yield f"{message}; put {writer} first."
        written.update(stage.writes)


def _path(
    start: str, end: str, reads: Mapping[str, Sequence[str]], writers: Mapping[str, str]
) -> tuple[str, ...] | None:
    """A shortest path from one stage to another along the fields that each reads; None if there is none."""
    paths: list[tuple[str, ...]] = [(start,)]
    visited = {start}
    while paths:
        path = paths.pop(0)
        if path[-1] == end:
            return path
        for name in dict.fromkeys(writers[field] for field in reads[path[-1]] if field in writers):
            if name not in visited:
                visited.add(name)
                paths.append((*path, name))
    return None


def _generation_violations(stages: tuple[Stage, ...]) -> Iterator[str]:
    generating = [stage for stage in stages if stage.generates]
    if len(generating) != 1:
        names = ", ".join(stage.name for stage in generating) or "none"
        yield f"a step has exactly one stage that generates, and this has {len(generating)} ({names}); keep one."
    for stage in generating:
        if stage.name != GENERATE:
            yield f"the stage that generates is called {stage.name}; call it {GENERATE}."
        if stage.role is not Role.ACTOR or not stage.is_trained:
            yield f"{stage.name} generates with the {stage.role}, which is not trained; let the actor generate."


def _training_violations(stages: tuple[Stage, ...]) -> Iterator[str]:
    for role in dict.fromkeys(stage.role for stage in stages):
        stages_of_role = [stage for stage in stages if stage.role is role]
        training = [stage.name for stage in stages_of_role if stage.trains]
        if len(training) > 1:
            yield f"the {role} is trained by {' and '.join(training)}; let one stage train it."
        for stage in stages_of_role:
            if stage.is_trained and not training:
                yield f"{stage.name} has is_trained, and no stage trains the {role}; add one that does."
            if training and not stage.is_trained:
                yield f"{stage.name} has no is_trained, and {training[0]} trains the {role}; set it."
