"""What a stage is, one function call of a step, and the graph of them: the edges follow from what each reads and
writes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple

from meshwright.profiles.errors import require_none

GENERATE = "actor_generate"
"""The name that the stage which generates has in every graph."""

ENVIRONMENT = "environment_score"
"""The name of the stage in which hosts score responses."""

REWARDS, REWARD_SECONDS, REWARD_ERROR = "environment_scores", "environment_seconds", "environment_error"
"""What it writes of a response: a number for every reward of the job in their order, how long after the end of the
response each was known, and of one whose reward failed the sentence that says so, as bytes."""

TOTAL_SCORES = "total_scores"
"""What a response is paid where hosts or teachers score it: made when all that they say is read."""

SCORE_SIZES = "score_sizes"
"""The largest term of that sum, without its sign: a sum is known to the rounding of it."""

RESPONSE_LENGTHS, SEQUENCE_DIGESTS = "response_lengths", "sequence_digests"
"""What generation tells of a sequence of a wave beside what stages read: its tokens behind the prompt, and a number
that is the same for sequences that are the same token by token."""

TOLD = -1
"""In the field "versions", in place of the version of the weights that drew a token: a tool told it."""


class Role(StrEnum):
    """Whose weights a stage uses."""

    ACTOR = "actor"
    CRITIC = "critic"
    REF = "ref"
    REWARD = "reward"
    TEACHER = "teacher"
    TEACHER_2 = "teacher_2"
    TEACHER_3 = "teacher_3"
    TEACHER_4 = "teacher_4"


TEACHERS = (Role.TEACHER, Role.TEACHER_2, Role.TEACHER_3, Role.TEACHER_4)
"""Those whose log-probabilities a student learns, as many of the first as a job names."""


TEACHER_LOGPROBS: Mapping[Role, str] = {role: f"{role}_logprobs" for role in TEACHERS}
"""By teacher, the field of the experience that has its log-probabilities."""


class Mode(StrEnum):
    """How a stage uses the hardware."""

    PREFILL = "prefill"
    DECODE = "decode"
    FORWARD = "forward"
    TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One function call of a step. `reads` and `writes` name fields of the experience, one row per sequence.

    `is_trained` says that some stage of the graph trains the weights that this one uses, and `may_stream` that it can
    read responses in chunks while they are generated. `base_of` names the role whose weights without their adapter are
    those of this stage. What `is_quantised` has its linears in 8-bit floats, a copy that serves no other stage.
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

    @cached_property
    def trains(self) -> bool:
        return Mode.TRAIN in self.modes

    @cached_property
    def generates(self) -> bool:
        return Mode.DECODE in self.modes

    @cached_property
    def may_share(self) -> bool:
        """Whether a copy of the weights may serve this stage and others."""
        return not self.is_quantised and (self.is_trained or self.base_of is not None)

    @cached_property
    def copied_role(self) -> Role:
        """Whose copies may serve this stage."""
        return self.base_of or self.role

    @property
    def is_refit(self) -> bool:
        """Whether a copy of the weights that is its own would have to be brought those that are trained."""
        return self.is_trained and not self.trains


@dataclass(frozen=True, kw_only=True)
class HostStage:
    """An environment stage: it runs on workers of hosts and has no rank. It `reads` what the generation writes, of each
    response when that ends."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


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
    TOTAL_SCORES: Values(is_one=True),
    REWARD_ERROR: Values("uint8"),
    "versions": Values("int32"),
}


def values_of(field: str) -> Values:
    """Those of a field of the experience: most have an fp32 number per token."""
    return _VALUES.get(field, Values())


class StageEdge(NamedTuple):
    """The fields that one stage writes and another reads within a step."""

    producer: str
    consumer: str
    fields: tuple[str, ...]


@dataclass(frozen=True)
class StageGraph:
    """The stages of a step, each behind those that it reads from, and those on hosts, which begin with the generation.
    Raises BadInput for stages that make no graph."""

    stages: tuple[Stage, ...]
    hosted: tuple[HostStage, ...] = ()

    def __post_init__(self) -> None:
        require_none(graph_violations(self.stages, self.hosted), "algorithm")

    @cached_property
    def by_name(self) -> Mapping[str, Stage]:
        """In the order of the stages."""
        return {stage.name: stage for stage in self.stages}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Of each stage in their order."""
        return {name: index for index, name in enumerate(self.names)}

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """Whose weights some stage uses, each once."""
        return tuple(dict.fromkeys(stage.role for stage in self.stages))

    @cached_property
    def train_stage(self) -> Mapping[Role, str]:
        """The stage that owns the weights of a trained role; other stages of that role are refit from it."""
        return {stage.role: stage.name for stage in self.stages if stage.trains}

    @cached_property
    def writer(self) -> Mapping[str, str]:
        """The stage that writes a field."""
        every: tuple[Stage | HostStage, ...] = (*self.stages, *self.hosted)
        return {field: stage.name for stage in every for field in stage.writes}

    @cached_property
    def edges(self) -> tuple[StageEdge, ...]:
        """By producer and consumer in the order of the stages."""
        return tuple(_edges(self.stages, self.stages))

    @cached_property
    def host_edges(self) -> tuple[StageEdge, ...]:
        """What stages read that hosts write, by producer and consumer in the order of the stages."""
        return tuple(_edges(self.hosted, self.stages))

    @cached_property
    def streaming(self) -> tuple[str, ...]:
        """The stages that may read responses while they are generated."""
        return tuple(stage.name for stage in self.stages if stage.may_stream)

    @cached_property
    def refit_targets(self) -> tuple[str, ...]:
        """The stages of trained roles that do not train: their copies, where they have one, are refit."""
        return tuple(stage.name for stage in self.stages if stage.is_refit)

    def trainer_of(self, stage: str) -> str:
        """The stage that trains the weights of a stage of a trained role."""
        return self.train_stage[self.by_name[stage].role]

    def refit_readers(self, target: str) -> tuple[str, ...]:
        """The stages that wait for the refit of a stage's copy: it, and those after it that may share the copy."""
        if self.by_name[target].is_quantised:
            return (target,)
        role, first = self.by_name[target].role, self.position[target]
        return tuple(stage.name for stage in self.stages[first:] if stage.role == role and not stage.trains)

    def with_quantised(self, stage: str) -> StageGraph:
        """The graph whose stage of this name has its linears in 8-bit floats."""
        stages = (replace(s, is_quantised=True) if s.name == stage else s for s in self.stages)
        return StageGraph(tuple(stages), self.hosted)

    def sharers(self, role: Role) -> tuple[str, ...]:
        """The stages that copies of a trained role may serve, the one that trains first: it owns the copy that others
        may share. Those that need no adapter come last: what they share is held by another."""
        mine = [s for s in self.stages if s.copied_role == role and not s.is_quantised]
        return tuple(s.name for s in sorted(mine, key=lambda s: (not s.trains, s.base_of is not None)))


def _edges(producers: Iterable[Stage | HostStage], consumers: Collection[Stage]) -> Iterator[StageEdge]:
    for producer in producers:
        for consumer in consumers:
            if fields := tuple(field for field in consumer.reads if field in producer.writes):
                yield StageEdge(producer.name, consumer.name, fields)


def graph_violations(stages: tuple[Stage, ...], hosted: tuple[HostStage, ...]) -> Iterator[str]:
    """One sentence per broken rule of stages that are to make a graph."""
    generating = next((index for index, stage in enumerate(stages, start=1) if stage.generates), 0)
    every: tuple[Stage | HostStage, ...] = (*stages[:generating], *hosted, *stages[generating:])
    yield from _names(every)
    yield from _fields(every)
    yield from _generation(stages)
    yield from _trained_roles(stages)


def _names(stages: Sequence[Stage | HostStage]) -> Iterator[str]:
    names = [stage.name for stage in stages]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"the stage {name} is listed {names.count(name)} times; list it once."


def _fields(stages: Sequence[Stage | HostStage]) -> Iterator[str]:
    """A stage stands behind those that it reads from, so that there is no circle."""
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
                told, writer = f"{stage.name} reads {field} before {writers[field]} writes it", writers[field]
                circle = _circle(writer, stage.name, {one.name: one.reads for one in stages}, writers)
                if circle:
                    ways = " -> ".join((stage.name, *circle))
                    yield f"{told}, and they read from each other in a circle ({ways}); let one of them read less."
                else:
                    yield f"{told}; put {writer} first."
        written.update(stage.writes)


def _circle(
    start: str, end: str, reads: Mapping[str, Sequence[str]], writers: Mapping[str, str]
) -> tuple[str, ...] | None:
    """A way from one stage to another along what each reads, or None; every stage on it once."""
    ways: list[tuple[str, ...]] = [(start,)]
    seen = {start}
    while ways:
        way = ways.pop(0)
        if way[-1] == end:
            return way
        for name in dict.fromkeys(writers[field] for field in reads[way[-1]] if field in writers):
            if name not in seen:
                seen.add(name)
                ways.append((*way, name))
    return None


def _generation(stages: tuple[Stage, ...]) -> Iterator[str]:
    generating = [stage for stage in stages if stage.generates]
    if len(generating) != 1:
        told = ", ".join(stage.name for stage in generating) or "none"
        yield f"a step has exactly one stage that generates, and this has {len(generating)} ({told}); keep one."
    for stage in generating:
        if stage.name != GENERATE:
            yield f"the stage that generates is called {stage.name}; call it {GENERATE}."
        if stage.role is not Role.ACTOR or not stage.is_trained:
            yield f"{stage.name} generates with the {stage.role}, which is not trained; let the actor generate."


def _trained_roles(stages: tuple[Stage, ...]) -> Iterator[str]:
    for role in dict.fromkeys(stage.role for stage in stages):
        mine = [stage for stage in stages if stage.role is role]
        training = [stage.name for stage in mine if stage.trains]
        if len(training) > 1:
            yield f"the {role} is trained by {' and '.join(training)}; let one stage train it."
        for stage in mine:
            if stage.is_trained and not training:
                yield f"{stage.name} has is_trained, and no stage trains the {role}; add one that does."
            if training and not stage.is_trained:
                yield f"{stage.name} has no is_trained, and {training[0]} trains the {role}; set it."
