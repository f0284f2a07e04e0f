"""The losses of the training stages of a job, and the rules for a graph of the job's own that `run` can execute.

The algorithm whose settings the job gives decides how an own graph trains: its rewards, its advantages and its clip.
A training stage may name another loss, or compute its advantages or its loss with a function of the job's own. The
runtime knows fields of the experience by name, so each role's output has one name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.job.algorithm_settings import GRPO, PPO, RLOO, Distill
from meshwright.planner.job.custom_graph import LOSSES, OwnGraph, OwnStage
from meshwright.planner.job.job import DEFAULT_SETTINGS, SETTINGS_KEYS, Job
from meshwright.profiles.algorithms import BEHAVIOUR_LOGPROBS, OldLogprobs, graph_of
from meshwright.profiles.stages import (
    ENVIRONMENT,
    GENERATE,
    REWARDS,
    TEACHER_LOGPROBS,
    TEACHERS,
    Role,
    Stage,
)

PROXIMAL = "proximal_logprobs"

FIELD_OF_ROLE: Mapping[Role, str] = {
    Role.ACTOR: PROXIMAL,
    Role.REF: "ref_logprobs",
    Role.CRITIC: "values",
    Role.REWARD: "scores",
    **TEACHER_LOGPROBS,
}
"""The field that an inference of each role writes: log-probabilities, values or scores."""

_SCALAR_ROLES = (Role.CRITIC, Role.REWARD)

_HOSTED = graph_of("grpo", has_environment=True)


@dataclass(frozen=True, kw_only=True)
class StageLoss:
    """How a training stage learns from a batch.

    `old_logprobs` is the field with the log-probabilities of the policy before the update: the actor's own, or for
    another policy those of its role. Its values come from `source`; with "training" they are those of the generator
    until the forward pass of the update has its own.
    `is_rewarded`: the samples have scores of rewards, not of teachers. `advantages` and `function` are functions of the
    job's own, as module:function.
    """

    old_logprobs: str = PROXIMAL
    source: OldLogprobs = "recompute"
    is_distillation: bool = False
    is_rewarded: bool = True
    advantages: str | None = None
    function: str | None = None

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions of the job's own that it calls."""
        return tuple(path for path in (self.advantages, self.function) if path)


def stage_loss(job: Job, stage: Stage) -> StageLoss:
    """How a training stage of a job learns."""
    is_policy = stage.role not in _SCALAR_ROLES
    learns_from_teachers = is_policy and isinstance(job.settings, Distill)
    if not isinstance(job.algorithm, OwnGraph):
        return StageLoss(
            old_logprobs=old_logprobs_field(job),
            source=job.resolved_old_logprobs,
            is_distillation=learns_from_teachers,
            is_rewarded=job.learns_from_rewards,
        )
    stated = next(own for own in job.algorithm.stages if own.name == stage.name)
    return StageLoss(
        old_logprobs=FIELD_OF_ROLE[stage.role] if is_policy else PROXIMAL,
        is_distillation=stated.loss == "distill" or learns_from_teachers,
        is_rewarded=job.learns_from_rewards,
        advantages=stated.advantages,
        function=stated.loss if stated.loss not in (None, *LOSSES) else None,
    )


def old_logprobs_field(job: Job) -> str:
    """The field of the experience with the actor's log-probabilities before the updates of a step."""
    return PROXIMAL if job.resolved_old_logprobs == "recompute" else BEHAVIOUR_LOGPROBS


def own_functions(job: Job) -> tuple[tuple[str, str], ...]:
    """The training stages of a job that call functions of its own, with each function."""
    if not isinstance(job.algorithm, OwnGraph):
        return ()
    return tuple(
        (stage.name, function)
        for stage in job.algorithm.graph().stages
        if stage.trains
        for function in stage_loss(job, stage).functions
    )


def own_graph_violations(job: Job) -> Iterator[str]:
    """One sentence for each reason why `run` cannot execute the job's own graph; none for a preset."""
    if not isinstance(job.algorithm, OwnGraph) or (job.preset and not job.algorithm.states_losses):
        return
    if not job.own_key:
        keys = [SETTINGS_KEYS[preset] for preset in job.presets] or list(DEFAULT_SETTINGS)
        yield (
            "algorithm is a graph of the job's own, and no settings say how it is trained; give those of "
            f"{' or '.join(keys)}, like {keys[0]}: {{}}."
        )
        return
    stages = job.algorithm.stages
    yield from _experience_violations(stages)
    yield from _scoring_violations(job, stages)
    for stage in stages:
        if stage.kind == "training":
            yield from _input_violations(job, stage, stages)
            yield from _loss_violations(job, stage)


def _experience_violations(stages: Sequence[OwnStage]) -> Iterator[str]:
    """Rules about the fields that stages write, which the runtime knows by name."""
    generated = graph_of("grpo").by_name[GENERATE].writes
    for stage in stages:
        if stage.kind == "generation" and set(stage.writes) != set(generated):
            yield f"{stage.name} writes {', '.join(stage.writes)}; run needs exactly {', '.join(generated)}."
        if stage.kind == "environment" and set(stage.writes) != set(_HOSTED.host_stages[0].writes):
            fields = ", ".join(_HOSTED.host_stages[0].writes)
            yield f"{stage.name} writes {', '.join(stage.writes)}; run needs exactly {fields}."
        if stage.kind == "environment" and set(stage.reads) != set(_HOSTED.host_stages[0].reads):
            yield f"{stage.name} must read {' and '.join(_HOSTED.host_stages[0].reads)}, which every reward is given."
        if stage.kind == "inference" and stage.role and stage.writes != (FIELD_OF_ROLE[stage.role],):
            yield (
                f"{stage.name} writes {', '.join(stage.writes)}; an inference of the {stage.role} computes one field: "
                f"let it write {FIELD_OF_ROLE[stage.role]}."
            )


def _scoring_violations(job: Job, stages: Sequence[OwnStage]) -> Iterator[str]:
    """Rules about what the job's settings need of the whole graph."""
    assert isinstance(job.algorithm, OwnGraph)
    scorers = job.algorithm.scorers
    if isinstance(job.settings, Distill) and not any(stage.role in TEACHERS for stage in stages):
        yield "the job's settings are distill, and no stage has a teacher's log-probabilities; add an inference of one."
    if not isinstance(job.settings, Distill) and not scorers:
        yield (
            f"no stage scores the samples, and the job's settings are {job.own_key}, which learns from rewards; add a "
            f"reward model or {ENVIRONMENT}, or give distill: {{}}."
        )
    for stage in stages:
        if isinstance(job.settings, Distill) and stage.kind == "training" and stage.role in TEACHERS:
            yield (
                f"{stage.name} trains the {stage.role}, and the job's settings are distill, whose teachers stay as "
                "they are; give the settings of another algorithm, and loss: distill to stages that learn from "
                "teachers."
            )
    if job.workload.dynamic_sampling and not isinstance(job.settings, GRPO | RLOO):
        yield (
            "workload.dynamic_sampling drops groups whose samples have the same reward, and the job's settings are "
            f"{job.own_key}, which learns from these too; give the settings of grpo or rloo, or remove it."
        )
    compares = isinstance(job.settings, GRPO | RLOO) or (isinstance(job.settings, Distill) and bool(scorers))
    if compares and job.workload.group_size == 1:
        yield (
            f"workload.group_size=1: {job.own_key} compares the samples of a prompt with each other; use 2 or more, or "
            "other settings."
        )


def _input_violations(job: Job, stage: OwnStage, stages: Sequence[OwnStage]) -> Iterator[str]:
    """Rules about the fields that each training stage reads, whatever its loss."""
    assert stage.role is not None
    needed = {PROXIMAL: Role.ACTOR}
    if stage.role not in _SCALAR_ROLES:
        needed[FIELD_OF_ROLE[stage.role]] = stage.role
    for field, role in needed.items():
        if field not in stage.reads:
            yield f"{stage.name} must read {field}, which an inference of the {role} writes; add it to its reads."
    if isinstance(job.settings, Distill):
        for teacher in (other for other in stages if other.kind == "inference" and other.role in TEACHERS):
            if not set(teacher.writes) <= set(stage.reads):
                yield f"{stage.name} must read {teacher.writes[0]}, from which samples are scored; add it to its reads."
    assert isinstance(job.algorithm, OwnGraph)
    for scorer in job.algorithm.scorers:
        field = REWARDS if scorer.kind == "environment" else FIELD_OF_ROLE[Role.REWARD]
        if field not in stage.reads:
            yield f"{stage.name} must read {field}, from which its rewards are computed; add it to its reads."


def _loss_violations(job: Job, stage: OwnStage) -> Iterator[str]:
    """Rules about the loss that a training stage names, and about the fields that this loss reads."""
    is_scalar, subject = stage.role in _SCALAR_ROLES, f"{stage.name} trains the {stage.role}"
    loss = stage.loss or ("value" if is_scalar else "policy")
    if is_scalar and loss in ("policy", "distill"):
        yield f"{subject}, which predicts no tokens, with loss={loss}; use value or module:function."
    elif not is_scalar and loss == "value":
        yield f"{subject}, which predicts tokens, with loss=value; use policy, distill or module:function."
    elif stage.role is Role.REWARD and loss == "value":
        yield f"{subject} with loss=value, which is a critic's; give it a loss of your own as module:function."
    elif loss == "value" and "values" not in stage.reads:
        yield f"{stage.name} must read values, near which its loss clips the new ones; add it to its reads."
    elif loss == "value" and not isinstance(job.settings, PPO):
        yield (
            f"{stage.name} has the value loss of PPO, and the job's settings are {job.own_key}; give ppo: {{}}, or a "
            "loss of your own as module:function."
        )
    elif not is_scalar and not stage.advantages:
        yield from _advantage_violations(job, stage, loss)


def _advantage_violations(job: Job, stage: OwnStage, loss: str) -> Iterator[str]:
    """Rules about the fields from which the advantages of a policy are computed."""
    teachers = [TEACHER_LOGPROBS[role] for role in TEACHERS if role is not stage.role]
    if loss == "distill" and not set(teachers).intersection(stage.reads):
        yield (
            f"{stage.name} learns from teachers and reads the log-probabilities of none; add {teachers[0]} to its "
            "reads."
        )
    if loss != "distill" and isinstance(job.settings, PPO) and "values" not in stage.reads:
        yield (
            f"{stage.name} has the advantages of PPO and does not read values; add it to its reads, or give "
            "advantages: module:function."
        )
