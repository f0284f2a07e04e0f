"""What a job may say of a distillation."""

from __future__ import annotations

import json

import pytest

from meshwright.planner.job.algorithm_rules import require_distillation, teacher_top_k_violations
from meshwright.planner.job.algorithm_settings import Distill
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import Role
from tests.planner.jobs import distill_facts, stated


def test_shares_add_up_to_one_and_are_alike_without_weights() -> None:
    assert Distill().shares(4) == (0.25,) * 4
    assert Distill(teacher_weights=(3.0, 1.0)).shares(2) == (0.75, 0.25)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"teacher_weights": [1.0, 0.0]}, "teacher_weights.1 is 0.0: input should be greater than 0"),
        ({"kl_coefficient": 0.1}, "kl_coefficient"),
        ({"teacher_top_k": 0}, "teacher_top_k is 0: input should be greater than 0"),
        (
            {"divergence": "forward"},
            "divergence=forward needs the teachers' distributions, .* set teacher_top_k, or use",
        ),
        ({"distillation_weight": 0}, "distillation_weight is 0: input should be greater than 0"),
    ],
)
def test_a_setting_that_has_no_meaning_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        parse(Distill, json.dumps(given), "job")


STUDENT_AND_TEACHER = (Role.ACTOR, Role.TEACHER)


@pytest.mark.parametrize(
    "given", [{"reward_scale": 2.0}, {"missing_end_penalty": 1.0}, {"distillation_weight": 0.5}, {"reward_clip": 1.0}]
)
def test_a_setting_of_rewards_needs_rewards(given: dict[str, float]) -> None:
    [(name, value)] = given.items()
    settings = Distill(**given)
    with pytest.raises(ValueError, match=rf"distill\.{name}={value} concerns rewards, and the job has none; remove it"):
        require_distillation(settings, "distill", STUDENT_AND_TEACHER, has_environment=False)
    require_distillation(settings, "distill", STUDENT_AND_TEACHER, has_environment=True)
    require_distillation(settings, "distill", (*STUDENT_AND_TEACHER, Role.REWARD), has_environment=False)


def test_distributions_are_of_the_preset_and_no_larger_than_the_vocabulary() -> None:
    facts = distill_facts()
    own = stated(facts.graph)
    with pytest.raises(
        ValueError, match=r"distill\.teacher_top_k=8: an inference of the job's own graph writes one field"
    ):
        require_distillation(Distill(teacher_top_k=8), own, STUDENT_AND_TEACHER, has_environment=False)
    [large] = teacher_top_k_violations(257, "distill", facts.models.actor.vocab_size, 0)
    assert large == "teacher_top_k=257 is more than the 256 tokens of the vocabulary; use 256 or less."
    [other] = teacher_top_k_violations(2, "ppo", 256, 0)
    assert other == "teacher_top_k=2: only algorithm=distill has teachers that report it; remove it."
    assert not [*teacher_top_k_violations(256, "distill", 256, 0), *teacher_top_k_violations(None, "ppo", 1, 8)]


def test_whole_distributions_are_not_cut_to_a_sampling_mask() -> None:
    [sentence] = teacher_top_k_violations(4, "distill", 256, 64)
    assert "workload.kept_tokens=64 makes them those over the sampling mask; remove one of the two." in sentence
