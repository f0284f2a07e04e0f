"""A graph of stages that a job gives in place of the name of a preset algorithm, and the rules for a graph that can be
planned.

A step has one stage that generates. All other stages work on the tokens that it writes, and the stages that train come
last. One stage may be a filter, which keeps the best-scored samples of each prompt. A filter takes no time itself: the
stages after it wait for the scores that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from meshwright.planner.job.generated_verdicts import JudgeSpec
from meshwright.planner.job.rewards_and_tools import is_function_path
from meshwright.profiles.documents import Document
from meshwright.profiles.stages import ENVIRONMENT, HostStage, Mode, Role, Stage, StageGraph, graph_violations

Kind: TypeAlias = Literal["generation", "inference", "training", "environment", "filter"]

MODES: Mapping[Kind, tuple[Mode, ...]] = {
    "generation": (Mode.PREFILL, Mode.DECODE),
    "inference": (Mode.FORWARD,),
    "training": (Mode.TRAIN,),
}
"""The hardware modes of each kind of stage; a stage of the environment uses only processors of hosts."""

_TOKENS = "tokens"

_NAME = "^[a-z][a-z0-9_]*$"
_ROLE = "model whose weights the stage uses; an environment and a filter have none"
_KIND = (
    "generation samples responses, inference is a forward pass, training updates its role, environment scores on "
    "hosts, "
    "filter keeps the best samples of each prompt"
)
_FIELD = "fields of the experience that the stage {}; a field that no preset has is one fp32 number for each token"
_STREAM = "true if an inference stage that reads only tokens may read responses in chunks while they are generated"
_LOSS = (
    "loss of a training stage: policy (the default of a language model), value (the default of the critic), distill, "
    "or module:function of a module that run is allowed to load"
)
_ADVANTAGES = (
    "module:function that computes the advantages of a training stage, in place of those of the algorithm whose "
    "settings the job gives"
)
_JUDGE = (
    "for an inference of the reward model: the model is a language model, which generates a verdict on each sequence, "
    "and the text of the verdict is read as its score"
)
_STAGES = "stages of a step, each after those that it reads from"

LOSSES = ("policy", "value", "distill")
"""The losses that a training stage can name; `planner.job.graph_losses` says what each needs."""

FieldName: TypeAlias = Annotated[str, Field(pattern=_NAME, max_length=40)]


class OwnStage(Document):
    """One stage of a step, as the job describes it."""

    name: str = Field(pattern=_NAME, max_length=40, description="name of the stage")
    kind: Kind = Field(description=_KIND)
    role: Role | None = Field(default=None, description=_ROLE)
    reads: tuple[FieldName, ...] = Field(default=(), max_length=32, description=_FIELD.format("reads"))
    writes: tuple[FieldName, ...] = Field(default=(), max_length=32, description=_FIELD.format("writes"))
    may_stream: bool = Field(default=False, description=_STREAM)
    loss: str | None = Field(default=None, description=_LOSS)
    advantages: str | None = Field(default=None, description=_ADVANTAGES)
    judge: JudgeSpec | None = Field(default=None, description=_JUDGE)


class OwnGraph(Document):
    """The stages of a step, given by the job in place of the name of a preset algorithm."""

    stages: tuple[OwnStage, ...] = Field(min_length=1, max_length=16, description=_STAGES)

    @model_validator(mode="after")
    def _makes_a_graph(self) -> Self:
        rules = (
            *(_fields_once, _roles, _generation, _inputs, _inference, _training, _losses, _judging),
            *(_environment, _sharing, _filtering),
        )
        for rule in rules:
            for sentence in rule(self.stages):
                raise ValueError(sentence)
        for sentence in graph_violations(self._device_stages(), self._host_stages):
            raise ValueError(sentence)
        return self

    def __str__(self) -> str:
        return "the job's own graph"

    @cached_property
    def trained(self) -> tuple[Role, ...]:
        """The roles that some stage trains."""
        return tuple(stage.role for stage in self.stages if stage.role and stage.kind == "training")

    def graph(self, *, ref_is_base: bool = False) -> StageGraph:
        """The graph for planning; with `ref_is_base` the reference is the actor without its adapter."""
        return StageGraph(self._device_stages(ref_is_base), self._host_stages)

    @cached_property
    def states_losses(self) -> bool:
        """True if a training stage states its loss or its advantages."""
        return any(stage.loss or stage.advantages for stage in self.stages)

    @cached_property
    def judge(self) -> JudgeSpec | None:
        """The judge of the stage that generates verdicts, or None."""
        return next((stage.judge for stage in self.stages if stage.judge), None)

    @cached_property
    def scorers(self) -> tuple[OwnStage, ...]:
        """The stages that score samples: a reward model and the environment."""
        return tuple(
            stage
            for stage in self.stages
            if stage.kind == "environment" or (stage.kind == "inference" and stage.role is Role.REWARD)
        )

    @cached_property
    def filter(self) -> OwnStage | None:
        """The stage that keeps the best samples, or None."""
        return next((stage for stage in self.stages if stage.kind == "filter"), None)

    @property
    def _host_stages(self) -> tuple[HostStage, ...]:
        environments = (stage for stage in self.stages if stage.kind == "environment")
        return tuple(HostStage(name=stage.name, reads=stage.reads, writes=stage.writes) for stage in environments)

    def _device_stages(self, ref_is_base: bool = False) -> tuple[Stage, ...]:
        return tuple(
            Stage(
                name=stage.name,
                role=stage.role,
                modes=MODES[stage.kind],
                reads=self._planned_reads(stage),
                writes=stage.writes,
                is_trained=stage.role in self.trained,
                may_stream=stage.may_stream and not self.filter,
                base_of=Role.ACTOR if ref_is_base and stage.role is Role.REF else None,
                judges=stage.judge is not None,
            )
            for stage in self.stages
            if stage.role
        )

    def _planned_reads(self, stage: OwnStage) -> tuple[str, ...]:
        """The fields that a stage reads, with the field that a filter writes replaced by the scores that it
        compares."""
        if not self.filter or not set(stage.reads).intersection(self.filter.writes):
            return stage.reads
        scores = [field for other in self.stages if other.kind == "inference" for field in other.writes]
        added_scores = [field for field in self.filter.reads if field in scores and field not in stage.reads]
        return (*(field for field in stage.reads if field not in self.filter.writes), *added_scores)


def is_same_graph(one: StageGraph, other: StageGraph) -> bool:
    """True if two graphs have the same stages; the order of stages and of their fields does not matter."""

    def unordered(graph: StageGraph) -> set[object]:
        stages = {
            (s.name, s.role, s.modes, frozenset(s.reads), frozenset(s.writes), s.may_stream, s.judges)
            for s in graph.stages
        }
        return {*stages, *((host.name, frozenset(host.reads), frozenset(host.writes)) for host in graph.host_stages)}

    return unordered(one) == unordered(other)


def _fields_once(stages: Sequence[OwnStage]) -> Iterator[str]:
    for stage in stages:
        for key, fields in (("reads", stage.reads), ("writes", stage.writes)):
            for field in fields:
                if fields.count(field) > 1:
                    yield f"{stage.name} {key} {field} {fields.count(field)} times; list it once"


def _roles(stages: Sequence[OwnStage]) -> Iterator[str]:
    for stage in stages:
        if stage.kind == "environment" and stage.role:
            yield f"{stage.name} runs on hosts and has role={stage.role}; an environment uses no weights: remove it"
        if stage.kind == "filter" and stage.role:
            yield f"{stage.name} filters and has role={stage.role}; a filter compares scores alone: remove it"
        if stage.kind not in ("environment", "filter") and stage.role is None:
            yield f"{stage.name} is a stage of {stage.kind} and has no role; say whose weights it uses"
    if not any(stage.kind == "training" and stage.role is Role.ACTOR for stage in stages):
        yield "no stage trains the actor, whose samples a step learns from; add one of kind=training and role=actor"


def _generation(stages: Sequence[OwnStage]) -> Iterator[str]:
    for stage in stages:
        if stage.kind == "generation" and stage.reads:
            yield f"{stage.name} generates and reads {stage.reads[0]}; it is given only prompts: let it read nothing"
        if stage.kind == "generation" and _TOKENS not in stage.writes:
            yield f"{stage.name} generates and does not write {_TOKENS}, which all other stages read; add it"


def _inputs(stages: Sequence[OwnStage]) -> Iterator[str]:
    for stage in stages:
        if stage.kind not in ("generation", "filter") and _TOKENS not in stage.reads:
            yield f"{stage.name} does not read {_TOKENS}, which it would work on; add it to its reads"


def _inference(stages: Sequence[OwnStage]) -> Iterator[str]:
    read = {field for stage in stages for field in stage.reads}
    for stage in stages:
        if stage.kind in ("inference", "environment", "filter") and not read.intersection(stage.writes):
            problem = f"writes {', '.join(stage.writes)}, which no stage reads" if stage.writes else "writes nothing"
            yield f"{stage.name} {problem}; let a later stage read what it writes, or remove {stage.name}"
        if stage.may_stream and (stage.kind != "inference" or stage.reads != (_TOKENS,)):
            yield (
                f"{stage.name} has may_stream=true, and only an inference stage that reads {_TOKENS} and nothing else "
                "can start before the generation ends; set it to false"
            )


def _training(stages: Sequence[OwnStage]) -> Iterator[str]:
    trained: list[OwnStage] = []
    for stage in stages:
        if stage.kind == "training" and stage.writes:
            yield f"{stage.name} trains and writes {stage.writes[0]}; an update ends a step: let it write nothing"
        if stage.kind != "training" and trained:
            yield f"{stage.name} comes after {trained[-1].name}, which trains; put the stages that train last"
        trained += [stage] if stage.kind == "training" else []


def _losses(stages: Sequence[OwnStage]) -> Iterator[str]:
    for stage in stages:
        for key, value in (("loss", stage.loss), ("advantages", stage.advantages)):
            if value and stage.kind != "training":
                yield f"{stage.name} is a stage of {stage.kind} and has {key}={value}; only training has one: remove it"
        if stage.loss and stage.loss not in LOSSES and not is_function_path(stage.loss):
            yield f"{stage.name} has loss={stage.loss!r}; use {', '.join(LOSSES)}, or the form module:function"
        if stage.advantages and not is_function_path(stage.advantages):
            yield f"{stage.name} has advantages={stage.advantages!r}; use the form module:function"
        if stage.advantages and stage.loss == "distill":
            yield (
                f"{stage.name} has loss=distill, whose advantages are those of its teachers, and advantages="
                f"{stage.advantages}; remove one of them"
            )


def _judging(stages: Sequence[OwnStage]) -> Iterator[str]:
    trained = {stage.role for stage in stages if stage.kind == "training"}
    for stage in (stage for stage in stages if stage.judge):
        if stage.kind != "inference" or stage.role is not Role.REWARD:
            yield f"{stage.name} has judge, which only an inference of the reward model has; remove it"
        elif stage.may_stream:
            yield f"{stage.name} has judge and may_stream=true, and a verdict is on a whole response; set it to false"
        elif stage.role in trained:
            yield (
                f"{stage.name} has judge, and a stage trains the reward model; a judge that learns is not supported: "
                "remove the stage that trains it"
            )


def _environment(stages: Sequence[OwnStage]) -> Iterator[str]:
    hosted = [stage for stage in stages if stage.kind == "environment"]
    if len(hosted) > 1:
        names = " and ".join(stage.name for stage in hosted)
        yield f"{names} are stages of the environment; one of them scores for all rewards: keep one"
    generated = {field for stage in stages if stage.kind == "generation" for field in stage.writes}
    for stage in hosted:
        if stage.name != ENVIRONMENT:
            yield f"the stage that scores on hosts is called {stage.name}; call it {ENVIRONMENT}"
        for field in stage.reads:
            if field not in generated:
                yield f"{stage.name} reads {field}, which the generation does not write; let it read what that writes"
        for reader in stages:
            read = [field for field in reader.reads if field in stage.writes]
            if read and reader.kind not in ("training", "filter"):
                yield (
                    f"{reader.name} reads {read[0]}, and only stages that train read what hosts write; let one of "
                    "those read it"
                )


def _sharing(stages: Sequence[OwnStage]) -> Iterator[str]:
    trained = {stage.role for stage in stages if stage.kind == "training"}
    for role in dict.fromkeys(stage.role for stage in stages if stage.role and stage.role not in trained):
        users = [stage.name for stage in stages if stage.role is role]
        if len(users) > 1:
            yield (
                f"{' and '.join(users)} use the {role}, which no stage trains, and only stages of a trained role share "
                "its weights; let one stage write what all of them do"
            )


def _filtering(stages: Sequence[OwnStage]) -> Iterator[str]:
    """Rules about a filter: all samples are scored, and only the stages that score see samples that are not kept."""
    filters = [stage for stage in stages if stage.kind == "filter"]
    if len(filters) > 1:
        names = " and ".join(stage.name for stage in filters)
        yield f"{names} are filters, and the samples of a prompt are selected once; keep one"
    trained = {stage.role for stage in stages if stage.kind == "training"}
    for filter_stage in filters[:1]:
        if len(filter_stage.writes) > 1:
            yield (
                f"{filter_stage.name} filters and writes {filter_stage.writes[1]} too; let it write one field, for "
                "what is kept"
            )
        if not filter_stage.reads:
            yield f"{filter_stage.name} filters and reads nothing; let it read the scores that samples are compared by"
        scorers = [stage for stage in stages if stage.role is Role.REWARD and stage.role not in trained]
        scorers += [stage for stage in stages if stage.kind == "environment"]
        yield from _filter_reads_all_scores(filter_stage, scorers, stages)
        yield from _stages_after_the_filter(filter_stage, scorers, stages)


def _filter_reads_all_scores(
    filter_stage: OwnStage, scorers: Sequence[OwnStage], stages: Sequence[OwnStage]
) -> Iterator[str]:
    """Rules about the filter's inputs: it comes after the stages that score and reads the scores of all of them, and
    nothing else."""
    generated = {field for stage in stages if stage.kind == "generation" for field in stage.writes}
    scores = {field: stage for stage in scorers for field in stage.writes}
    for field in filter_stage.reads:
        if field not in scores:
            yield (
                f"{filter_stage.name} reads {field}, which is no score; samples are compared by what a reward model "
                "that no stage trains and the environment write: let it read that"
            )
        elif stages.index(scores[field]) > stages.index(filter_stage):
            yield (
                f"{filter_stage.name} reads {field} before {scores[field].name} writes it; put {scores[field].name} "
                "first"
            )
    for scorer in scorers:
        if not set(filter_stage.reads).intersection(scorer.writes):
            yield f"{scorer.name} scores what {filter_stage.name} compares; let {filter_stage.name} read what it writes"
        for field in scorer.reads:
            if field not in generated:
                yield (
                    f"{scorer.name} reads {field}, and it scores all samples before {filter_stage.name} keeps some; "
                    "let it read only what the generation writes"
                )


def _stages_after_the_filter(
    filter_stage: OwnStage, scorers: Sequence[OwnStage], stages: Sequence[OwnStage]
) -> Iterator[str]:
    """Rules about the other stages: each reads the field that the filter writes, and comes after it."""
    for stage in stages:
        if stage is filter_stage or stage in scorers or stage.kind == "generation" or not filter_stage.writes:
            continue
        if filter_stage.writes[0] not in stage.reads:
            yield (
                f"{stage.name} does not read {filter_stage.writes[0]}, and all stages but those that score work on "
                f"what {filter_stage.name} keeps; add it to its reads"
            )
        elif stages.index(stage) < stages.index(filter_stage):
            yield (
                f"{stage.name} reads {filter_stage.writes[0]} before {filter_stage.name} writes it; put "
                f"{filter_stage.name} first"
            )
