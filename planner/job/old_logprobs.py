"""The source of the log-probabilities of the policy before the updates of a step: its rules, and what `auto` means.

A forward pass of the actor before the updates is always right. It is left out where the pass of the only update has the
same numbers, and where the job accepts the numbers that the generation recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final, Literal, TypeAlias

from meshwright.planner.job.algorithm_rules import AnyAlgorithm
from meshwright.planner.job.algorithm_settings import GRPO, LearningSettings
from meshwright.planner.job.custom_graph import OwnGraph
from meshwright.profiles.algorithms import OldLogprobs
from meshwright.profiles.stages import Role
from meshwright.profiles.workload import Workload

OldLogprobsChoice: TypeAlias = OldLogprobs | Literal["auto"]

OLD_LOGPROBS: Final = (
    "log-probabilities that the policy ratio divides by: recompute: by a forward pass of the actor before the updates; "
    "generator: as recorded when the tokens were sampled, with ratios truncated at importance_cap; training: by the "
    "forward pass of the only update of a step, where the ratio is 1; auto: training where it is allowed, else "
    "recompute, which are equal in mathematics"
)
"""Description of the key `old_logprobs` of a job and of its facts."""


def old_logprobs_violations(old_logprobs: OldLogprobs, algorithm: AnyAlgorithm, workload: Workload) -> Iterator[str]:
    """One sentence for each rule that the choice breaks with the stages and the updates of a step."""
    if old_logprobs == "recompute":
        return
    if isinstance(algorithm, OwnGraph):
        yield (
            f"old_logprobs={old_logprobs}: algorithm is the job's own graph, whose losses read the log-probabilities "
            "of an inference of the actor; use recompute, or name a preset"
        )
        return
    num_updates = workload.num_minibatches * workload.num_epochs
    if old_logprobs == "training" and num_updates > 1:
        yield (
            f"old_logprobs=training: num_minibatches={workload.num_minibatches} and num_epochs={workload.num_epochs} "
            f"make {num_updates} updates of a step, and only the first one starts from the policy whose "
            "log-probabilities are needed; use one update, or recompute or generator"
        )
    if old_logprobs == "training" and algorithm == "distill":
        yield (
            "old_logprobs=training: algorithm=distill compares its teachers with the student's log-probabilities "
            "before the update; use recompute or generator"
        )


def reward_penalty_violations(
    old_logprobs: OldLogprobs, settings: LearningSettings, settings_key: str, roles: Collection[Role]
) -> Iterator[str]:
    """One sentence if rewards need log-probabilities that only the update computes."""
    coefficient = getattr(settings, "kl_coefficient", 0.0)
    if old_logprobs == "training" and coefficient and Role.REF in roles and not isinstance(settings, GRPO):
        yield (
            f"old_logprobs=training: {settings_key}.kl_coefficient={coefficient:g} is a penalty inside the reward, "
            "which needs log-probabilities before the update; use 0, or recompute or generator"
        )


def resolved_old_logprobs(
    choice: OldLogprobsChoice,
    algorithm: AnyAlgorithm,
    workload: Workload,
    settings: LearningSettings,
    roles: Collection[Role],
) -> OldLogprobs:
    """The choice, with auto replaced by the fastest one that is equal in mathematics to recompute.

    A step without the pass of recompute has one stage less and is otherwise the same, so it is never slower and nothing
    has to be searched.
    """
    if choice != "auto":
        return choice
    violations = (
        *old_logprobs_violations("training", algorithm, workload),
        *reward_penalty_violations("training", settings, "", roles),
    )
    return "recompute" if violations else "training"
