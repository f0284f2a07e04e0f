"""What ranks hold of held-out responses comes to one record, wherever the parts of a score are."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from meshwright.planner.job.job import Job
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import REWARDS
from meshwright.runtime.execution.held_out import HeldOutPart, evaluated_fields, evaluation_of
from meshwright.runtime.messages.experience import StepExperience

WORKLOAD = {"batch_size": 2, "prompt": {"max": 4, "fixed": 2}, "response": {"max": 4, "fixed": 2}}
PATH = {"path": "none"}
DISTILL = {
    "algorithm": "distill",
    "models": {"actor": PATH, "teacher": PATH, "teacher_2": PATH},
    "distill": {"teacher_weights": [3, 1]},
}
GRPO = {
    "algorithm": "grpo",
    "models": {"actor": PATH, "reward": PATH},
    "rewards": [{"name": "third", "function": "exact_match", "weight": 2.0}],
    "reward_model_weight": 0.5,
}


def job(document: dict[str, Any]) -> Job:
    group = {"group_size": 2} if document["algorithm"] == "grpo" else {}
    return parse(Job, json.dumps({**document, "workload": WORKLOAD | group}), "job")


def part(asked: Job, prompt_set: str = "held_out", /, **fields: dict[int, list[float]]) -> HeldOutPart:
    """Of a rank that holds these, of two rows with two tokens of a prompt and two that were drawn."""
    batch = StepExperience(step=3, rows=range(2), held_out=prompt_set)
    for row in range(2):
        batch.experience.put("tokens", row, torch.arange(4))
        batch.experience.put("prompt_lengths", row, torch.tensor([2]))
        batch.experience.put("versions", row, torch.full((4,), 3))
        batch.experience.put("behaviour_logprobs", row, torch.tensor([0.0, -1.0, -2.0, 0.0]))
    for name, rows in fields.items():
        for row, values in rows.items():
            batch.experience.put(name, row, torch.tensor(values))
    return HeldOutPart.of(batch, asked)


def test_teachers_and_the_student_may_be_on_different_ranks() -> None:
    asked = job(DISTILL)
    student = part(asked, proximal_logprobs={0: [0, -1.0, -2.0, 0], 1: [0, -1.0, -2.0, 0]})
    one = part(asked, teacher_logprobs={0: [9, -1.5, -2.5, 9], 1: [9, -1.0, -2.0, 9]})
    other = part(asked, teacher_2_logprobs={0: [9, -2.0, -3.0, 9], 1: [9, -3.0, -4.0, 9]})
    found = evaluation_of([other, student, one], 3, asked)
    assert found.scores == pytest.approx((0.75 * -0.5 + 0.25 * -1.0, 0.25 * -2.0))
    assert found.reported_score == -found.mean_score > 0
    assert found.by_teachers
    assert found.generator_gap == 0.0
    assert found.mean_response_tokens == 2


def test_a_paid_response_has_the_sum_of_what_its_ranks_say() -> None:
    asked = job(GRPO)
    scored = part(asked, scores={0: [2.0], 1: [-4.0]})
    hosted = part(asked, **{REWARDS: {0: [1.0], 1: [0.5]}})
    found = evaluation_of([scored, hosted], 3, asked)
    assert found.scores == (0.5 * 2.0 + 2.0 * 1.0, 0.5 * -4.0 + 2.0 * 0.5)
    assert found.reported_score == found.mean_score
    assert not found.by_teachers


def test_a_set_is_scored_by_its_own_rewards_alone_unless_the_model_has_a_weight_there() -> None:
    own = {"prompts": "none", "rewards": [{"name": "own", "function": "maths_answer", "weight": 3.0}]}
    for weight, expected in ((0.0, (3.0, 1.5)), (0.25, (3.5, 0.5))):
        sets = {"hard": own | {"reward_model_weight": weight}, "easy": {"prompts": "none"}}
        asked = job({**GRPO, "evaluation": {"sets": sets}})
        scored = part(asked, "hard", **({"scores": {0: [2.0], 1: [-4.0]}} if weight else {}))
        hosted = part(asked, "hard", **{REWARDS: {0: [1.0], 1: [0.5]}})
        found = evaluation_of([scored, hosted], 3, asked, "hard")
        assert (found.prompt_set, found.title) == ("hard", "hard")
        assert found.scores == expected
        assert ("scores" in evaluated_fields(asked, "hard")) == (weight != 0)
        assert "scores" in evaluated_fields(asked, "easy")
    hosted = part(asked, "easy", **{REWARDS: {0: [1.0], 1: [0.5]}}, scores={0: [2.0], 1: [-4.0]})
    assert evaluation_of([hosted], 3, asked, "easy").scores == (0.5 * 2.0 + 2.0 * 1.0, 0.5 * -4.0 + 2.0 * 0.5)


def test_a_distillation_may_be_evaluated_by_rewards() -> None:
    sets = {"hard": {"prompts": "none", "rewards": [{"name": "own", "function": "maths_answer"}]}}
    asked = job({**DISTILL, "evaluation": {"sets": sets}})
    found = evaluation_of([part(asked, "hard", **{REWARDS: {0: [1.0], 1: [0.0]}})], 3, asked, "hard")
    assert (found.mean_score, found.by_teachers) == (0.5, False)
    assert evaluated_fields(asked, "hard") == ("tokens", "proximal_logprobs")


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        ({"held_out": {"prompts": "none"}}, "this is the name of the prompts of data.held_out; give the set another"),
        ({"train": {"prompts": "none"}}, "this is the name of the metrics of training; give the set another name"),
        ({"hard": {"prompts": "none", "max_response": 5}}, "max_response=5 is above the 4 tokens after a prompt that "),
        ({"hard": {"prompts": "none", "reward_model_weight": 1}}, "reward_model_weight=1 is beside no rewards of this"),
        (
            {"hard": {"prompts": "none", "rewards": [{"name": "a", "function": "exact_match"}] * 2}},
            "evaluation.sets.hard.rewards: the name a is given twice; give each reward its own",
        ),
        ({"Hard set": {"prompts": "none"}}, "Hard set"),
    ],
)
def test_a_set_that_cannot_be_evaluated_is_refused_in_a_sentence(sets: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        job({**GRPO, "evaluation": {"sets": sets}})
    assert sentence in str(refused.value)


def test_a_weight_of_a_reward_model_needs_one() -> None:
    rewards = [{"name": "own", "function": "exact_match"}]
    sets = {"hard": {"prompts": "none", "rewards": rewards, "reward_model_weight": 2}}
    with pytest.raises(BadInput, match=r"reward_model_weight=2 weighs a reward model, and the job has none; use 0"):
        job({**DISTILL, "evaluation": {"sets": sets}})


def test_only_evaluations_that_are_scored_alike_are_compared() -> None:
    """A set may be changed when a run is resumed; a rise between two ways to score it would be none."""
    rewards = [{"name": "own", "function": "exact_match"}]
    plain, later = {"prompts": "a"}, {"prompts": "b", "split": "other", "every_steps": 3}
    short, scored = {"prompts": "a", "max_response": 2}, {"prompts": "a", "rewards": rewards}
    weighed = {**scored, "reward_model_weight": 0.5}

    def digest(one: dict[str, Any]) -> str:
        return job({**GRPO, "evaluation": {"sets": {"hard": one}}}).evaluation.digest("hard", "prompts")

    assert digest(plain) == digest(later) == "prompts"
    assert len({digest(one) for one in (plain, short, scored, weighed)}) == 4
    assert job(GRPO).evaluation.digest("held_out", "prompts") == "prompts"


def test_a_set_has_the_interval_of_all_unless_it_has_its_own() -> None:
    sets = {"hard": {"prompts": "none"}, "easy": {"prompts": "none", "every_steps": 0}}
    evaluation = job({**GRPO, "evaluation": {"every_steps": 5, "sets": sets}}).evaluation
    assert [evaluation.interval(name) for name in ("held_out", "hard", "easy")] == [5, 5, 0]
