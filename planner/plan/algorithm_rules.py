"""What an algorithm asks of the rest of a job: which models it has, and how many samples of a prompt."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from meshwright.planner.plan.learning_settings import LearningSettings
from meshwright.profiles.algorithms import COMPARES_GROUPS, Algorithm, graph_of
from meshwright.profiles.stages import Role
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


def _violations(
    algorithm: Algorithm, roles: Collection[Role], workload: Workload, has_environment: bool
) -> Iterator[str]:
    has_reward = Role.REWARD in roles or not has_environment
    wanted = graph_of(algorithm, has_ref=Role.REF in roles, has_reward=has_reward).roles
    for role in Role:
        if role in wanted and role not in roles:
            yield f"missing key 'models.{role}': algorithm={algorithm} has a stage of that role; add it"
        if role in roles and role not in wanted:
            yield f"models.{role}: algorithm={algorithm} has no stage of that role; remove it"
    if algorithm in COMPARES_GROUPS and workload.group_size == 1:
        yield (
            f"workload.group_size=1: algorithm={algorithm} compares the samples of a prompt with each other; use 2 or "
            "more"
        )
