"""The job that a user writes, and the facts that it resolves to.

`job.yaml` names models, a cluster, a workload, settings and data. `Facts` holds what planning needs, with every name
looked up. A plan contains its facts, so that it can be verified and explained without the job's files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from meshwright.planner.job.algorithm_rules import (
    AnyAlgorithm,
    graph_for,
    presets_with_graph,
    require_distillation,
    require_limited_sets,
    require_ref_is_base,
    require_reference,
    require_roles,
    require_settings_of_graph,
    require_trained_adapters,
    teacher_top_k_violations,
)
from meshwright.planner.job.algorithm_settings import (
    GRPO,
    PPO,
    RLOO,
    SETTINGS,
    TEACHER_TOP_K,
    Distill,
    LearningSettings,
    Reinforce,
)
from meshwright.planner.job.custom_graph import OwnGraph
from meshwright.planner.job.engine_environments import EngineEnvironments
from meshwright.planner.job.evaluation import Evaluation, evaluation_violations
from meshwright.planner.job.limits import judge_violations, position_violations, require_within_limits
from meshwright.planner.job.old_logprobs import (
    OLD_LOGPROBS,
    OldLogprobsChoice,
    old_logprobs_violations,
    resolved_old_logprobs,
    reward_penalty_violations,
)
from meshwright.planner.job.rewards_and_tools import Reward, RewardLoad, Tool, from_plan, require_unique_names
from meshwright.planner.job.sections import (
    AnyClusterSpec,
    ClusterSpec,
    Data,
    Models,
    require_heads,
    require_one_tokenizer,
    require_one_vocabulary,
)
from meshwright.planner.job.tokenizer_facts import TokenizerFacts, read_tokenizer_facts, tokenizer_violations
from meshwright.profiles.algorithms import Algorithm, OldLogprobs
from meshwright.profiles.documents import Difference, Document, build, differences, digest, read_yaml
from meshwright.profiles.errors import BadInput, require_none
from meshwright.profiles.frameworks import EAGER, EngineName, own_engine, require_graph_support
from meshwright.profiles.hardware import AnyCluster
from meshwright.profiles.model_parts.fp8_weights import GenerationWeights, require_quantisable
from meshwright.profiles.model_shape import ModelSpec, read_model
from meshwright.profiles.stages import GENERATE, Role, StageGraph
from meshwright.profiles.workload import Workload, lengths_of_workload, workload_with_lengths

_SCALAR_HEAD_ROLES = (Role.CRITIC, Role.REWARD)
_CONTROLLERS = "adapt chunk sizes and the overcommit during the run (OPPO), up to the plan's values"
_CACHE = (
    "what happens to the KV cache of sequences in flight when the weights change: keep that of the older weights, or "
    "recompute it with the new ones before the next token (AReaL, arXiv:2505.24298)"
)
_ENGINE = (
    "generation engine: our own, eager or with decode steps as CUDA graphs (the default on a GPU for models without "
    "experts), vllm, which run starts on CPUs, sglang, with which run was never tried, or trtllm, which can only be "
    "planned for; auto: the one of our own and those in engines with the fastest plan"
)
AUTO: Final = "auto"
"""The engine of a job that leaves the choice to the plan."""
_ENGINES = "environments of the engines that run in processes of their own"
_GENERATION_WEIGHTS = (
    "number format of the weights that the actor generates with, and of the activations they multiply; default: the "
    "precision"
)
_PRECISION = "number format of weights and activations; moments and main weights are fp32"
_CLUSTER = "local, a device's name, or a description of the cluster"
_STALENESS = "largest number of actor updates between sampling a token and training on it; 0 is synchronous"
_ALGORITHM = (
    "what a step does: ppo also trains a critic; distill learns the teachers' log-probabilities of the actor's "
    "samples; the others compare the samples of a step and have no critic; or the job's own graph of stages"
)
_REWARDS = "functions and judges that score responses; the weighted sum with the reward model's score is the reward"
_REWARD_MODEL_WEIGHT = "weight of the reward model's score beside the rewards"
_TOOL = "tool that answers the turns of a rollout; needed by run where workload.turns is given"
_LOADS = "rewards that run on hosts"
_TOKENIZER = "digests of the job's tokenizer and chat template, and the actor's end tokens"
_REF_IS_BASE = "the reference is the actor without its adapter, so that one copy of the weights may serve both"


CacheAfterRefit: TypeAlias = Literal["keep", "recompute"]


SETTINGS_KEYS: Mapping[Algorithm, str] = {
    algorithm: "reinforce" if algorithm == "reinforce++" else algorithm for algorithm in SETTINGS
}
"""The key of a job that holds the settings of each algorithm."""

DEFAULT_SETTINGS: Mapping[str, LearningSettings] = {
    SETTINGS_KEYS[algorithm]: kind() for algorithm, kind in SETTINGS.items()
}
"""The default settings, by key of a job."""


def settings_key(settings: LearningSettings) -> str:
    """The key of a job that holds settings of this type."""
    return next(key for key, default in DEFAULT_SETTINGS.items() if type(default) is type(settings))


class Job(Document):
    """The job as a user writes it: models, cluster, workload, settings of the algorithm and data.

    Names are not resolved yet. A job is an instance of the subclass that has the settings of its algorithm and no
    others: reading a job is reading a union that `algorithm` discriminates. A job with its own graph has the class of
    the settings that it gives, and is a `GraphJob` if it gives none.
    """

    model_config = ConfigDict(defer_build=True)

    deciding_keys = ("algorithm",)
    own_key: ClassVar[str] = ""
    """The key of the settings; empty for a job without."""

    algorithm: AnyAlgorithm = Field(default="ppo", description=_ALGORITHM)
    models: Models = Field(description="location of each model of the algorithm")
    cluster: AnyClusterSpec = Field(default="local", description=_CLUSTER)
    precision: Literal["fp32", "bf16"] = Field(default="bf16", description=_PRECISION)
    workload: Workload = Field(description="batch sizes and lengths of a step")
    staleness: int = Field(default=0, ge=0, le=8, description=_STALENESS)
    controllers: bool = Field(default=False, description=_CONTROLLERS)
    cache_after_refit: CacheAfterRefit = Field(default="keep", description=_CACHE)
    old_logprobs: OldLogprobsChoice = Field(default="recompute", description=OLD_LOGPROBS)
    engine: EngineName | Literal["auto"] | None = Field(default=None, description=_ENGINE)
    engines: EngineEnvironments = Field(default=EngineEnvironments(), description=_ENGINES)
    generation_weights: GenerationWeights | None = Field(default=None, description=_GENERATION_WEIGHTS)
    rewards: tuple[Reward, ...] = Field(default=(), max_length=16, description=_REWARDS)
    reward_model_weight: float = Field(default=1.0, description=_REWARD_MODEL_WEIGHT)
    tool: Tool | None = Field(default=None, description=_TOOL)
    evaluation: Evaluation = Field(default=Evaluation(), description="when the policy is evaluated on held-out prompts")
    data: Data | None = Field(default=None, description="needed by run, not by plan")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of a subclass, and for `Job` itself the union of them all."""
        if cls is not Job:
            return handler(source)
        choices = {kind.__name__: handler.generate_schema(kind) for kind in JOB_KINDS}
        return core_schema.tagged_union_schema(choices, _job_kind)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON Schema of the union: anyOf and not oneOf, because a job with its own graph and without settings is
        valid in several of the classes."""
        written = handler(schema)
        return {("anyOf" if key == "oneOf" else key): value for key, value in written.items()}

    @classmethod
    def explain_unknown_key(cls, key: str, /) -> str | None:
        algorithm = next((algorithm for algorithm, known in SETTINGS_KEYS.items() if known == key), None)
        if algorithm is None:
            return None
        return (
            f"it has the settings of algorithm={algorithm}, and this job has its settings under {cls.own_key}; move "
            "them there or remove them."
        )

    @model_validator(mode="after")
    def _check_algorithm(self) -> Self:
        require_roles(self.algorithm, self.models.roles, self.workload, has_environment=bool(self.rewards))
        require_unique_names(self.rewards)
        for sentence in evaluation_violations(
            self.evaluation,
            max_response=self.workload.max_response,
            has_reward_model=Role.REWARD in self.models.roles,
        ):
            raise ValueError(sentence)
        if self.tool and not self.workload.turns:
            raise ValueError("tool: single-turn rollouts call no tool; give workload.turns, or remove tool")
        graph = graph_for(self.algorithm, self.models.roles, self.workload, has_environment=bool(self.rewards))
        require_trained_adapters(
            [role for role in self.models.roles if self.models.source(role).adapter], graph.train_stage
        )
        if isinstance(self.algorithm, OwnGraph) and self.own_key and not self.algorithm.states_losses:
            require_settings_of_graph([SETTINGS_KEYS[preset] for preset in self.presets], self.own_key)
        if isinstance(self.algorithm, OwnGraph) and self.preset:
            require_roles(self.preset, self.models.roles, self.workload, has_environment=bool(self.rewards))
        require_reference(self.own_key, self.settings, self.models.roles)
        require_limited_sets(self.workload.kept_tokens, self.settings, self.own_key)
        if isinstance(self.settings, Distill):
            require_distillation(self.settings, self.algorithm, self.models.roles, has_environment=bool(self.rewards))
        job = self._without_default_penalty()
        for sentence in job._old_logprobs_violations():
            raise ValueError(sentence)
        return job

    def _old_logprobs_violations(self) -> Iterator[str]:
        yield from old_logprobs_violations(self.resolved_old_logprobs, self.algorithm, self.workload)
        yield from reward_penalty_violations(self.resolved_old_logprobs, self.settings, self.own_key, self.models.roles)

    @property
    def resolved_old_logprobs(self) -> OldLogprobs:
        """The source of the log-probabilities before the updates, with auto resolved."""
        return resolved_old_logprobs(self.old_logprobs, self.algorithm, self.workload, self.settings, self.models.roles)

    def _without_default_penalty(self) -> Self:
        """The job with a KL coefficient of 0 if it has no reference and does not give the coefficient."""
        if Role.REF in self.models.roles or not getattr(self.settings, "kl_coefficient", 0.0) or not self.own_key:
            return self
        settings = self.settings.model_copy(update={"kl_coefficient": 0.0})
        return self.model_copy(update={self.own_key: settings})

    @property
    def settings(self) -> LearningSettings:
        """The settings of the algorithm; those of a job that gives none for its own graph are the defaults."""
        return SETTINGS[self.preset]() if self.preset else LearningSettings()

    @property
    def presets(self) -> tuple[Algorithm, ...]:
        """The algorithm; for a job with its own graph, the presets with the same graph."""
        if not isinstance(self.algorithm, OwnGraph):
            return (self.algorithm,)
        return presets_with_graph(self.algorithm, self.models.roles, self.workload, has_environment=bool(self.rewards))

    @property
    def preset(self) -> Algorithm | None:
        """The algorithm whose settings and losses apply. Of several presets with the job's own graph, it is the one
        whose settings the job gives; None where there is no such preset."""
        presets = self.presets
        named = presets if len(presets) == 1 else [one for one in presets if SETTINGS_KEYS[one] == self.own_key]
        return next(iter(named), None)

    @property
    def learns_from_rewards(self) -> bool:
        """True unless teachers alone say what is learned."""
        if not isinstance(self.settings, Distill):
            return True
        if isinstance(self.algorithm, OwnGraph):
            return bool(self.algorithm.scorers)
        return bool(self.rewards) or Role.REWARD in self.models.roles

    @property
    def all_rewards(self) -> tuple[Reward, ...]:
        """The rewards on hosts: those of training, then those of the evaluation sets."""
        return (*self.rewards, *(reward for one in self.evaluation.sets.values() for reward in one.rewards))

    @property
    def reward_weights(self) -> tuple[float, ...]:
        """The weights of the rewards on hosts, in their order."""
        return tuple(reward.weight for reward in self.rewards)


class GraphJob(Job):
    """A job with its own graph that gives no settings."""


class PPOJob(Job):
    """A job with settings of PPO."""

    own_key = "ppo"

    algorithm: Literal["ppo"] | OwnGraph = Field(default="ppo", description=_ALGORITHM)
    ppo: PPO = Field(default=PPO(), description="settings of algorithm ppo")

    @property
    def settings(self) -> PPO:
        return self.ppo


class GRPOJob(Job):
    """A job with settings of GRPO."""

    own_key = "grpo"

    algorithm: Literal["grpo"] | OwnGraph = Field(description=_ALGORITHM)
    grpo: GRPO = Field(default=GRPO(), description="settings of algorithm grpo")

    @property
    def settings(self) -> GRPO:
        return self.grpo


class RLOOJob(Job):
    """A job with settings of RLOO."""

    own_key = "rloo"

    algorithm: Literal["rloo"] | OwnGraph = Field(description=_ALGORITHM)
    rloo: RLOO = Field(default=RLOO(), description="settings of algorithm rloo")

    @property
    def settings(self) -> RLOO:
        return self.rloo


class ReinforceJob(Job):
    """A job with settings of REINFORCE++."""

    own_key = "reinforce"

    algorithm: Literal["reinforce++"] | OwnGraph = Field(description=_ALGORITHM)
    reinforce: Reinforce = Field(default=Reinforce(), description="settings of algorithm reinforce++")

    @property
    def settings(self) -> Reinforce:
        return self.reinforce


class DistillJob(Job):
    """A job with settings of on-policy distillation."""

    own_key = "distill"

    algorithm: Literal["distill"] | OwnGraph = Field(description=_ALGORITHM)
    distill: Distill = Field(default=Distill(), description="settings of algorithm distill")

    @property
    def settings(self) -> Distill:
        return self.distill


JOB_KINDS: tuple[type[Job], ...] = (PPOJob, GRPOJob, RLOOJob, ReinforceJob, DistillJob, GraphJob)
"""The members of the union that a job is."""


def _job_kind(value: Any) -> str:
    """The name of the class of a job; `GraphJob`, whose error lists all algorithms, for one that does not exist."""
    if isinstance(value, Job):
        return type(value).__name__
    given = value if isinstance(value, dict) else {}
    algorithm = given.get("algorithm", "ppo")
    keys = [SETTINGS_KEYS[name] for name in SETTINGS if name == algorithm]
    if isinstance(algorithm, dict):
        keys = [key for key in DEFAULT_SETTINGS if key in given]
    return next((kind.__name__ for kind in JOB_KINDS if kind.own_key in keys), GraphJob.__name__)


class RoleModels(Document):
    """The shapes of the models, one for each role of the algorithm."""

    actor: ModelSpec
    critic: ModelSpec | None = None
    ref: ModelSpec | None = None
    reward: ModelSpec | None = None
    teacher: ModelSpec | None = None
    teacher_2: ModelSpec | None = None
    teacher_3: ModelSpec | None = None
    teacher_4: ModelSpec | None = None

    @cached_property
    def by_name(self) -> Mapping[str, ModelSpec]:
        """The models that the job has, by role."""
        return {name: spec for name, spec in self if spec is not None}

    def spec(self, role: Role) -> ModelSpec:
        return self.by_name[role.value]

    def with_names_of(self, others: RoleModels) -> RoleModels:
        """The same shapes, with the names of other models in the same roles."""
        names = {role: spec.name for role, spec in others.by_name.items()}
        return RoleModels(
            **{role: replace(spec, name=names.get(role, spec.name)) for role, spec in self.by_name.items()}
        )


class Facts(Document):
    """All inputs of a plan, with names resolved."""

    algorithm: AnyAlgorithm = Field(default="ppo", description=_ALGORITHM)
    models: RoleModels
    cluster: AnyCluster
    precision: Literal["fp32", "bf16"]
    workload: Workload
    staleness: int = Field(default=0, ge=0, le=8, description=_STALENESS)
    controllers: bool = Field(default=False, description=_CONTROLLERS)
    cache_after_refit: CacheAfterRefit = Field(default="keep", description=_CACHE)
    old_logprobs: OldLogprobs = Field(default="recompute", description=OLD_LOGPROBS)
    teacher_top_k: int | None = Field(default=None, gt=0, description=TEACHER_TOP_K)
    engine: EngineName = Field(default=EAGER, description="generation engine")
    generation_weights: GenerationWeights | None = Field(default=None, description=_GENERATION_WEIGHTS)
    rewards: tuple[RewardLoad, ...] = Field(default=(), max_length=16, description=_LOADS)
    ref_is_base: bool = Field(default=False, description=_REF_IS_BASE)
    tokenizer: TokenizerFacts | None = Field(default=None, description=_TOKENIZER)

    @model_validator(mode="after")
    def _check_algorithm(self) -> Self:
        roles = tuple(map(Role, self.models.by_name))
        require_roles(self.algorithm, roles, self.workload, has_environment=bool(self.rewards))
        require_graph_support(self.engine, self.cluster.kind, has_experts=self.models.actor.experts is not None)
        if self.generation_weights:
            require_quantisable(self.models.actor, self.cluster, self.precision, self.engine)
        require_ref_is_base(self.models.by_name, self.graph.train_stage, ref_is_base=self.ref_is_base)
        kept_tokens = self.workload.kept_tokens
        for sentence in teacher_top_k_violations(
            self.teacher_top_k, self.algorithm, self.models.actor.vocab_size, kept_tokens
        ):
            raise ValueError(sentence)
        for sentence in old_logprobs_violations(self.old_logprobs, self.algorithm, self.workload):
            raise ValueError(sentence)
        if self.workload.images and not self.models.actor.image_encoder:
            raise ValueError(
                f"workload.images: model {self.models.actor.name} of the actor reads no images; give one that does, or "
                "remove workload.images"
            )
        return self

    @cached_property
    def graph(self) -> StageGraph:
        """The stages of a step of this job."""
        graph = graph_for(
            self.algorithm,
            tuple(map(Role, self.models.by_name)),
            self.workload,
            has_environment=bool(self.rewards),
            ref_is_base=self.ref_is_base,
            old_logprobs=self.old_logprobs,
            teacher_top_k=self.teacher_top_k,
        )
        return graph.with_quantised(GENERATE) if self.generation_weights else graph

    def digests(self) -> dict[str, str]:
        """SHA-256 of each part's canonical text."""
        return {name: digest(getattr(self, name)) for name in ("cluster", "models", "workload")}


def read_job(path: Path) -> Job:
    """The job in a YAML file. Raises BadInput naming the key and the rule."""
    return read_yaml(Job, path, "job")


def resolve(job: Job, directory: Path) -> Facts:
    """Return the facts of a job whose paths are relative to `directory`.

    They have this project's own engine if the job leaves the choice to the plan. Raises BadInput for a name or a file
    that cannot be resolved.
    """
    directories = {role: directory / job.models.source(role).path for role in job.models.roles}
    judge = job.algorithm.judge if isinstance(job.algorithm, OwnGraph) else None
    scalar_roles = (Role.CRITIC,) if judge else _SCALAR_HEAD_ROLES
    specs = {role: read_model(directories[role], scalar_head=role in scalar_roles) for role in directories}
    for role in job.models.roles:
        longest = job.workload.max_tokens + (judge.max_added_tokens if judge and role is Role.REWARD else 0)
        specs[role] = specs[role].with_balance(job.models.source(role).balance).for_sequences(longest)
    specs = {role: replace(spec, adapter=job.models.source(role).adapter) for role, spec in specs.items()}
    real_paths = {role: os.path.realpath(path) for role, path in directories.items()}
    require_heads(specs, directories, has_judge=judge is not None)
    require_one_vocabulary(specs, directories)
    tokenizer = directory / job.data.tokenizer if job.data else None
    require_one_tokenizer(specs, directories, tokenizer)
    cluster = (ClusterSpec(device=job.cluster) if isinstance(job.cluster, str) else job.cluster).resolve()
    by_name = {role.value: spec for role, spec in specs.items()}
    require_within_limits(by_name, cluster, job.workload, "job")
    require_none(position_violations(by_name, job.workload), "workload")
    top_k = job.settings.teacher_top_k if isinstance(job.settings, Distill) else None
    vocab_size, kept_tokens = specs[Role.ACTOR].vocab_size, job.workload.kept_tokens
    require_none(teacher_top_k_violations(top_k, job.algorithm, vocab_size, kept_tokens), "distill")
    if judge:
        require_none(judge_violations(specs, judge, job.workload), "job")
    own_engine_name = own_engine(cluster.kind, has_experts=specs[Role.ACTOR].experts is not None)
    return build(
        Facts,
        "job",
        algorithm=job.algorithm,
        models=RoleModels(**by_name),
        cluster=cluster,
        precision=job.precision,
        workload=job.workload,
        staleness=job.staleness,
        controllers=job.controllers,
        cache_after_refit=job.cache_after_refit,
        old_logprobs=job.resolved_old_logprobs,
        teacher_top_k=top_k,
        engine=own_engine_name if job.engine is None or job.engine == AUTO else job.engine,
        generation_weights=job.generation_weights,
        rewards=tuple(reward.load for reward in job.rewards),
        ref_is_base=specs[Role.ACTOR].adapter is not None
        and real_paths.get(Role.REF) == real_paths[Role.ACTOR]
        and not _trains_ref(job),
        tokenizer=read_tokenizer_facts(directories[Role.ACTOR], tokenizer),
    )


def _trains_ref(job: Job) -> bool:
    """True if the job's own graph trains the reference."""
    return isinstance(job.algorithm, OwnGraph) and Role.REF in job.algorithm.trained


def require_job(planned: Facts, job: Job, directory: Path, *, lengths_are_observed: bool = False) -> None:
    """Raises BadInput unless the facts of a plan are those of this job, its bound on staleness included.

    The plan may differ in: the cluster, if it is of the same kind; the distribution of lengths if it was observed in a
    trace, but not the maximum lengths; waves of dynamic sampling and measured latencies that the job does not state;
    and the names of the models, whose directories may have moved.
    """
    job = job.model_copy(update=from_plan(job.rewards, job.workload, planned.rewards, planned.workload))
    facts = resolve(job, directory)
    if job.engine == AUTO and planned.engine in (facts.engine, *job.engines.named):
        facts = facts.model_copy(update={"engine": planned.engine})
    if lengths_are_observed and (facts.workload.turns is None) == (planned.workload.turns is None):
        facts = facts.model_copy(
            update={"workload": workload_with_lengths(facts.workload, lengths_of_workload(planned.workload))}
        )
    stated, chosen = facts.workload.dynamic_sampling, planned.workload.dynamic_sampling
    if stated and chosen:
        sampling = stated.completed_by_plan(chosen, shares_are_observed=lengths_are_observed)
        facts = facts.model_copy(update={"workload": facts.workload.model_copy(update={"dynamic_sampling": sampling})})
    if facts.cluster.kind != planned.cluster.kind:
        raise BadInput(
            f"the plan was made for another job: it is for a {planned.cluster.kind} cluster and the job's cluster is "
            f"{facts.cluster.kind}; plan this job again."
        )
    if str(facts.algorithm) != str(planned.algorithm):
        raise BadInput(
            f"the plan was made for another job: algorithm is {planned.algorithm} in the plan and {facts.algorithm} in "
            "the job; plan this job again."
        )
    facts = facts.model_copy(update={"models": facts.models.with_names_of(planned.models)})
    if violations := tuple(_file_violations(planned, facts, job, directory)):
        raise BadInput(f"the plan was made for another job: {' '.join(violations)}")
    compared = facts.model_copy(
        update={"cluster": planned.cluster, "models": planned.models, "tokenizer": planned.tokenizer}
    )
    for difference in differences(planned, compared):
        raise BadInput(
            f"the plan was made for another job: {difference.describe('the plan', 'the job')}; plan this job again."
        )


def _file_violations(planned: Facts, facts: Facts, job: Job, directory: Path) -> Iterator[str]:
    """Yield a sentence for each model that has another shape than the plan's (one for roles with the same directory),
    and for each fact of the tokenizer that differs."""
    first: dict[str, Difference] = {}
    places: set[str] = set()
    for difference in differences(planned.models, facts.models):
        first.setdefault(difference.key.partition(".")[0], difference)
    for role, difference in first.items():
        if role not in facts.models.by_name or role not in planned.models.by_name:
            yield f"there is a {role} model in only one of the plan and the job; plan this job again."
            continue
        place = str(directory / job.models.source(Role(role)).path)
        if place in places:
            continue
        places.add(place)
        yield (
            f"models.{difference.describe('the plan', place)}; give the directory of the planned model, as --model "
            f"{role}=DIR, or plan this job again."
        )
    tokenizer = directory / job.data.tokenizer if job.data else None
    actor = directory / job.models.actor.path
    yield from tokenizer_violations(planned.tokenizer, facts.tokenizer, actor, tokenizer)
