"""What an algorithm asks of the rest of a job: which models it has, and how many samples of a prompt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright.planner.plan.learning_settings import LearningSettings
from meshwright.profiles.algorithms import COMPARES_GROUPS, Algorithm, graph_of
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import TEACHERS, Role
from meshwright.profiles.workload import Workload


def require_roles(
    algorithm: Algorithm, roles: Collection[Role], workload: Workload, *, has_environment: bool = False
) -> None:
    """Raises ValueError, in the words that a document is refused with, for the first rule that is broken. A job whose
    rewards are on hosts needs no reward model."""
    for sentence in _violations(algorithm, roles, workload, has_environment):
        raise ValueError(sentence)


def require_own_settings(algorithm: Algorithm, own: str, given: Collection[str]) -> None:
    """Raises ValueError where a job gives the settings of an algorithm under another key than its `own`."""
    for key in given:
        if key != own:
            raise ValueError(
                f"{key}: algorithm={algorithm} has its settings under {own}; move them there or remove them"
            )


def require_reference(own: str, settings: LearningSettings, roles: Collection[Role]) -> None:
    """Raises ValueError for a setting that needs a reference model where none is named. Defaults need none."""
    if Role.REF in roles or "kl_coefficient" not in settings.model_fields_set:
        return
    coefficient = getattr(settings, "kl_coefficient", 0.0)
    if coefficient:
        raise ValueError(
            f"{own}.kl_coefficient={coefficient:g} keeps the actor to a reference and models.ref names none; name one, "
            "or use 0"
        )


def require_teacher_weights(weights: Sequence[float], roles: Iterable[Role]) -> None:
    """Raises ValueError unless there is a weight for every teacher among these roles, or none."""
    teachers = [role for role in roles if role in TEACHERS]
    if weights and len(weights) != len(teachers):
        raise ValueError(
            f"distill.teacher_weights has {len(weights)} weights and models has {len(teachers)} teachers "
            f"({', '.join(teachers)}); give one weight to each, or none at all"
        )


def require_no_work_ahead(workload: Workload, staleness: int) -> None:
    """Raises ValueError for dynamic sampling under a bound on staleness: a wave waits for the scores of the last one,
    which belong to the same step."""
    if workload.dynamic_sampling and staleness:
        raise ValueError(
            f"workload.dynamic_sampling with staleness={staleness} is not known yet: a wave waits for the "
            "scores of the one before; use staleness 0"
        )


def require_adapted(roles: Iterable[Role]) -> None:
    """Raises ValueError for the first of these roles, whose models have adapters, that is not the actor."""
    for role in roles:
        if role is not Role.ACTOR:
            raise ValueError(f"models.{role}.adapter: only the actor is trained by an adapter; remove it")


def require_base(models: Mapping[str, ModelSpec], *, ref_is_base: bool) -> None:
    """Raises ValueError where facts say that the reference is the actor without its adapter, and it cannot be, or as
    `require_adapted`."""
    require_adapted(Role(name) for name, spec in models.items() if spec.adapter)
    actor, ref = models[Role.ACTOR], models.get(Role.REF)
    if ref_is_base and (actor.adapter is None or ref != replace(actor, adapter=None)):
        raise ValueError(
            "ref_is_base=true, and the reference is not the actor without an adapter; set it to false, or give the "
            "actor an adapter and the reference its shape"
        )


def _violations(
    algorithm: Algorithm, roles: Collection[Role], workload: Workload, has_environment: bool
) -> Iterator[str]:
    has_reward = Role.REWARD in roles or not has_environment
    num_teachers = max(1, sum(role in TEACHERS for role in roles))
    wanted = graph_of(algorithm, has_ref=Role.REF in roles, has_reward=has_reward, num_teachers=num_teachers).roles
    if algorithm == "distill" and has_environment:
        yield "rewards: algorithm=distill learns from its teachers and pays no rewards; remove them"
    for role in Role:
        if role in wanted and role not in roles:
            yield f"missing key 'models.{role}': algorithm={algorithm} has a stage of that role; add it"
        if role in roles and role not in wanted:
            yield f"models.{role}: algorithm={algorithm} has no stage of that role; remove it"
    if workload.dynamic_sampling and algorithm not in COMPARES_GROUPS:
        yield (
            f"workload.dynamic_sampling: algorithm={algorithm} does not compare the samples of a group; use "
            f"{' or '.join(COMPARES_GROUPS)}, or remove it"
        )
    if algorithm in COMPARES_GROUPS and workload.group_size == 1:
        yield (
            f"workload.group_size=1: algorithm={algorithm} compares the samples of a prompt with each other; use 2 or "
            "more"
        )
