"""The description of another trainer: its deployment modes, its keys, and how a plan is written for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from meshwright.planner.job.algorithm_settings import LearningSettings
from meshwright.planner.job.custom_graph import OwnGraph
from meshwright.planner.job.job import DEFAULT_SETTINGS, SETTINGS_KEYS, Facts, Job
from meshwright.planner.plan.plan import Plan
from meshwright.planner.trainers.config_keys import KnownKeys, known_keys
from meshwright.planner.trainers.deployment_modes import DeploymentMode
from meshwright.profiles.algorithms import Algorithm, OldLogprobs
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import EngineName
from meshwright.profiles.stages import TEACHERS, Role
from meshwright.profiles.workload import Workload

ConfigValue: TypeAlias = str | int | float | bool | tuple[float, float] | None
"""The value of a trainer's key."""


USER_FUNCTION = "reward:score"
"""The reward function where no job names one; the user writes it."""


@dataclass(frozen=True)
class KeyValue:
    """One key of a trainer, its value, and the field of the plan or the job, or the rule, that it comes from."""

    key: str
    value: ConfigValue
    origin: str


@dataclass(frozen=True, kw_only=True)
class ExportInput:
    """The inputs of an export: a plan and, for the algorithm's settings and the models' paths, the job where it is
    given.

    The job's paths are relative to `directory`.
    """

    plan: Plan
    job: Job | None = None
    directory: Path | None = None

    @property
    def algorithm(self) -> Algorithm:
        """The name of the preset; `OtherTrainer.require_expressible` refuses a job with its own graph."""
        algorithm = self.plan.facts.algorithm
        assert not isinstance(algorithm, OwnGraph)
        return algorithm

    @property
    def settings(self) -> LearningSettings:
        """The settings of the algorithm; its defaults where no job is given."""
        return self.job.settings if self.job else DEFAULT_SETTINGS[SETTINGS_KEYS[self.algorithm]]

    def setting(self, field: str, key: str) -> Iterator[KeyValue]:
        """A setting under a trainer's key, if the algorithm has it."""
        if field in type(self.settings).model_fields:
            origin = f"job: {SETTINGS_KEYS[self.algorithm]}.{field}"
            yield KeyValue(key, getattr(self.settings, field), origin)

    def settings_by_key(self, fields: Mapping[str, str]) -> Iterator[KeyValue]:
        """The settings that the algorithm has, from a mapping of our fields to a trainer's keys."""
        return (setting for field, key in fields.items() for setting in self.setting(field, key))

    def path(self, role: Role) -> str:
        """The absolute path of a model's directory; `models/` and the model's name where there is no job.

        Raises BadInput where the job names a config.json, from which no trainer loads weights.
        """
        if self.job is None:
            return f"models/{self.plan.facts.models.spec(role).name}"
        path = os.path.abspath((self.directory or Path()) / self.job.models.source(role).path)
        if path.endswith(".json"):
            raise BadInput(
                f"models.{role}.path={self.job.models.source(role).path} is a config.json, and a trainer loads a model "
                "from its directory; give the directory with the weights in the job."
            )
        return path

    @property
    def reward_function(self) -> str | None:
        """The reward function, as module:function or by its built-in name; None where a reward model scores."""
        if not self.plan.facts.rewards:
            return None
        return (self.job.rewards[0].function if self.job and self.job.rewards else None) or USER_FUNCTION


@dataclass(frozen=True, kw_only=True)
class OtherTrainer:
    """A trainer other than Meshwright, such as verl.

    `key_file` is the stem of the file in `data/` that lists its keys, and `other_key_files` are those of algorithms
    with keys of their own. `engine` generates unless a job names one of `other_engines`. `modes` yields the
    trainer's deployment modes for a job, `settings` the keys for a plan that one of them can express, and `files`
    the texts of the export by file name, the launch script first. `remarks` are sentences on what the user has to add,
    `algorithms` the ones whose settings can be written, and `supports_fp8` says whether generation with FP8 weights
    can be written. `unsupported_roles` has the reason for each role whose model the trainer does not have.
    `old_logprobs` has, for each source of old log-probabilities that a key of the trainer can choose, the algorithms
    with which it can; a forward pass of the actor before the updates is always possible.
    """

    name: str
    key_file: str
    engine: EngineName
    modes: Callable[[Facts], Iterator[DeploymentMode]]
    settings: Callable[[ExportInput], Iterator[KeyValue]]
    files: Callable[[ExportInput, Sequence[KeyValue]], Mapping[str, str]]
    other_key_files: tuple[str, ...] = ()
    other_engines: tuple[EngineName, ...] = ()
    remarks: tuple[str, ...] = ()
    algorithms: tuple[Algorithm, ...] = ("ppo",)
    supports_fp8: bool = False
    unsupported_roles: Mapping[Role, str] = field(default_factory=dict)
    old_logprobs: Mapping[OldLogprobs, tuple[Algorithm, ...]] = field(default_factory=dict)

    def modes_for(self, facts: Facts) -> Iterator[DeploymentMode]:
        """The deployment modes of the trainer, restricted to the stages that the job has."""
        return (mode.for_job(facts) for mode in self.modes(facts))

    @property
    def keys(self) -> KnownKeys:
        return known_keys(self.key_file)

    def knows(self, key: str) -> bool:
        """True if the trainer accepts this key with one of its algorithms."""
        return any(known_keys(file).knows(key) for file in (self.key_file, *self.other_key_files))

    def with_engine(self, facts: Facts) -> Facts:
        """The facts with an engine that the trainer generates with."""
        return facts if facts.engine in self.other_engines else facts.model_copy(update={"engine": self.engine})

    def require_expressible(self, facts: Facts) -> None:
        """Raises BadInput for a job that no exporter supports, for FP8 generation unless `supports_fp8`, for a model
        among `unsupported_roles`, and for a source of old log-probabilities that is not among `old_logprobs`.

        Unsupported are judges behind a URL, several rewards together, multi-turn rollouts, dynamic sampling, best-of
        sampling, sampling masks, adapters, teachers and a job's own graph.
        """
        if facts.generation_weights and not self.supports_fp8:
            raise BadInput(
                f"generation_weights={facts.generation_weights} is not written for {self.name}; plan and run the job "
                "here, or leave it out and set it in the trainer by hand."
            )
        for feature in _unsupported_features(facts):
            raise BadInput(
                f"{feature} not written for {self.name}; plan and run the job here, or take pools and layouts over by "
                "hand."
            )
        if facts.old_logprobs != "recompute" and facts.algorithm not in self.old_logprobs.get(facts.old_logprobs, ()):
            raise BadInput(
                f"old_logprobs={facts.old_logprobs} is not written for {self.name}, which has no key for it with "
                f"algorithm={facts.algorithm}; plan and run the job here, or use recompute."
            )
        for role, reason in self.unsupported_roles.items():
            if role in facts.graph.roles:
                raise BadInput(
                    f"models.{role} is not written for {self.name}: {reason}; plan and run the job here, or choose "
                    "another trainer."
                )

    def require_exportable(self, facts: Facts) -> None:
        """Raises BadInput for a job that `require_expressible` refuses, and for an algorithm not in `algorithms`."""
        self.require_expressible(facts)
        if facts.algorithm not in self.algorithms:
            raise BadInput(
                f"algorithm={facts.algorithm} is not written for {self.name}, only {' and '.join(self.algorithms)}; "
                "run the plan here, or take its pools and layouts over by hand."
            )

    @property
    def label(self) -> str:
        """The trainer's name and the version whose keys are known."""
        return f"{self.name} {self.keys.version}"


def _unsupported_features(facts: Facts) -> Iterator[str]:
    """Features of a job that no exporter supports, each as the beginning of a sentence."""
    if judges := [reward.name for reward in facts.rewards if reward.is_remote]:
        yield f"judges behind a URL ({', '.join(judges)}) are"
    if facts.rewards and (Role.REWARD in facts.graph.roles or len(facts.rewards) > 1):
        yield f"several rewards together ({', '.join(reward.name for reward in facts.rewards)}) are"
    if turns := facts.workload.turns:
        yield f"rollouts of up to {turns.number.max} turns with a tool (workload.turns) are"
    yield from _unsupported_samples(facts.workload)
    for role, spec in facts.models.by_name.items():
        if spec.adapter:
            yield f"the {role}'s adapter of rank {spec.adapter.rank} is"
    if isinstance(facts.algorithm, OwnGraph):
        yield "the job's own graph (algorithm.stages) is"
    if facts.algorithm == "distill":
        yield f"distillation from teachers ({', '.join(role for role in TEACHERS if role in facts.graph.roles)}) is"


def _unsupported_samples(workload: Workload) -> Iterator[str]:
    """The same for what a workload says of its samples."""
    if workload.dynamic_sampling:
        yield "waves of prompts until enough groups have non-zero reward variance (workload.dynamic_sampling) are"
    if workload.best_of:
        yield f"the best {workload.group_size} of {workload.best_of} samples (workload.best_of) are"
    if workload.kept_tokens:
        yield f"the sampling mask of up to {workload.kept_tokens} tokens a position (workload.kept_tokens) is"
