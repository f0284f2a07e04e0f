"""A job has the models that its algorithm has roles for, and samples to compare where it compares them."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.algorithm_rules import require_roles
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.stages import Role
from meshwright.profiles.workload import Workload
from tests.planner.jobs import small_facts

ALL = tuple(Role)
NO_CRITIC = (Role.ACTOR, Role.REF, Role.REWARD)


def workload(group_size: int) -> Workload:
    return small_facts().workload.model_copy(update={"group_size": group_size})


@pytest.mark.parametrize(
    ("algorithm", "roles", "group_size"),
    [
        ("ppo", ALL, 1),
        ("ppo", ALL, 4),
        ("grpo", NO_CRITIC, 4),
        ("rloo", (Role.ACTOR, Role.REWARD), 2),
        ("reinforce++", NO_CRITIC, 1),
    ],
)
def test_models_and_groups_that_an_algorithm_has_stages_for_are_taken(
    algorithm: Algorithm, roles: tuple[Role, ...], group_size: int
) -> None:
    require_roles(algorithm, roles, workload(group_size))


@pytest.mark.parametrize(
    ("algorithm", "roles", "group_size", "sentence"),
    [
        ("ppo", NO_CRITIC, 1, "missing key 'models.critic': algorithm=ppo has a stage of that role; add it"),
        ("ppo", (Role.ACTOR, Role.CRITIC, Role.REWARD), 1, "missing key 'models.ref': algorithm=ppo"),
        ("rloo", ALL, 4, r"models\.critic: algorithm=rloo has no stage of that role; remove it"),
        ("rloo", NO_CRITIC, 1, r"workload\.group_size=1: algorithm=rloo compares the samples of a prompt"),
    ],
)
def test_others_are_refused_in_one_sentence(
    algorithm: Algorithm, roles: tuple[Role, ...], group_size: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        require_roles(algorithm, roles, workload(group_size))
