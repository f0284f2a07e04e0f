"""A job has the models that its algorithm has roles for, and samples to compare where it compares them."""

from __future__ import annotations

import pytest

from meshwright.planner.job.algorithm_rules import require_roles, require_teacher_weights
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.environment.dynamic_sampling import DynamicSampling
from meshwright.profiles.stages import Role
from meshwright.profiles.workload import Workload
from tests.planner.jobs import small_facts

ALL = (Role.ACTOR, Role.CRITIC, Role.REF, Role.REWARD)
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
        ("distill", (Role.ACTOR, Role.TEACHER), 1),
        ("distill", (Role.ACTOR, Role.TEACHER, Role.TEACHER_2), 4),
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
        (
            "grpo",
            (*NO_CRITIC, Role.TEACHER),
            4,
            r"models\.teacher: algorithm=grpo has no stage of that role; remove it",
        ),
        (
            "distill",
            (Role.ACTOR,),
            1,
            "missing key 'models.teacher': algorithm=distill has a stage of that role; add it",
        ),
        ("distill", (Role.ACTOR, Role.TEACHER_2), 1, "missing key 'models.teacher': algorithm=distill"),
        (
            "distill",
            (Role.ACTOR, Role.TEACHER, Role.REWARD),
            1,
            r"workload\.group_size=1: algorithm=distill compares the rewards of a prompt's samples",
        ),
        ("distill", (Role.ACTOR, Role.TEACHER, Role.REF), 1, r"models\.ref: algorithm=distill has no stage"),
        ("rloo", NO_CRITIC, 1, r"workload\.group_size=1: algorithm=rloo compares the samples of a prompt"),
    ],
)
def test_others_are_refused_in_one_sentence(
    algorithm: Algorithm, roles: tuple[Role, ...], group_size: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        require_roles(algorithm, roles, workload(group_size))


def test_a_distillation_may_have_rewards_of_groups_but_drops_none() -> None:
    roles = Role.ACTOR, Role.TEACHER
    require_roles("distill", roles, workload(2), has_environment=True)
    require_roles("distill", (*roles, Role.REWARD), workload(2))
    require_roles("distill", roles, workload(2).model_copy(update={"best_of": 4}), has_environment=True)
    with pytest.raises(ValueError, match=r"^workload\.best_of: no rewards say which sample is best; add rewards, or"):
        require_roles("distill", roles, workload(2).model_copy(update={"best_of": 4}))
    sampled = workload(2).model_copy(update={"dynamic_sampling": DynamicSampling(acceptance=0.5)})
    with pytest.raises(ValueError, match="algorithm=distill learns from the tokens of these too; remove it"):
        require_roles("distill", roles, sampled, has_environment=True)


def test_every_teacher_has_a_weight_or_none_has() -> None:
    roles = (Role.ACTOR, Role.TEACHER, Role.TEACHER_2)
    require_teacher_weights((), roles)
    require_teacher_weights((1.0, 3.0), roles)
    sentence = r"^distill\.teacher_weights has 1 weights and models has 2 teachers \(teacher, teacher_2\); give one"
    with pytest.raises(ValueError, match=sentence):
        require_teacher_weights((1.0,), roles)
