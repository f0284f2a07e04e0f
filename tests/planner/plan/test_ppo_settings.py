"""The settings of PPO that a job may give, and those that are refused in one sentence."""

from __future__ import annotations

import json

import pytest

from meshwright.planner.job.algorithm_settings import PPO
from meshwright.profiles.documents import Document, parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import Role


class WithSettings(Document):
    """As a job holds them."""

    ppo: PPO = PPO()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"missing_end_score": -1.0, "missing_end_penalty": 2.0},
            "job: ppo: missing_end_score=-1.0 replaces the score that missing_end_penalty=2.0 would be taken off; "
            "give one of them.",
        ),
        (
            {"truncation": "bootstrap", "missing_end_score": 0.0},
            "job: ppo: missing_end_score=0.0 applies to truncated responses, whose score truncation=bootstrap "
            "ignores; remove it, or choose truncation=terminal.",
        ),
        (
            {"truncation": "bootstrap", "missing_end_penalty": 1.0},
            "job: ppo: missing_end_penalty=1.0 applies to truncated responses, whose score truncation=bootstrap "
            "ignores; remove it, or choose truncation=terminal.",
        ),
        ({"truncation": "end"}, "job: ppo.truncation is 'end': input should be 'terminal' or 'bootstrap'."),
        (
            {"missing_end_penalty": -1.0},
            "job: ppo.missing_end_penalty is -1.0: input should be greater than or equal to 0.",
        ),
        (
            {"actor_schedule": {"decay": "cosine"}},
            "job: ppo.actor_schedule: decay=cosine needs decay_steps, steps of the run, warm-up included, after "
            "which the rate stays at its minimum; add it.",
        ),
        (
            {"critic_schedule": {"decay_steps": 9}},
            "job: ppo.critic_schedule: decay_steps=9 has no effect with decay=constant; choose another decay.",
        ),
        (
            {"critic_schedule": {"min_ratio": 0.5}},
            "job: ppo.critic_schedule: min_ratio=0.5 has no effect with decay=constant; choose another decay.",
        ),
        (
            {"actor_schedule": {"decay": "linear", "decay_steps": 5, "warmup_steps": 5}},
            "job: ppo.actor_schedule: decay_steps=5 includes warmup_steps=5 and must be larger; raise it.",
        ),
        ({"adam_beta2": 1.0}, "job: ppo.adam_beta2 is 1.0: input should be less than 1."),
        ({"target_kl": 0.0}, "job: ppo.target_kl is 0.0: input should be greater than 0."),
    ],
)
def test_settings_that_contradict_each_other_are_refused_in_one_sentence(
    settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(BadInput) as refused:
        parse(WithSettings, json.dumps({"ppo": settings}), "job")
    assert str(refused.value) == sentence


def test_a_cut_response_ends_by_default() -> None:
    assert PPO().truncation == "terminal"
    assert parse(WithSettings, '{"ppo": {"missing_end_penalty": 1}}', "job").ppo.missing_end_penalty == 1


def test_the_critic_has_a_rate_of_its_own() -> None:
    ppo = PPO(actor_learning_rate=2.0, critic_learning_rate=3.0)
    assert (ppo.learning_rate(Role.ACTOR, 0), ppo.learning_rate(Role.CRITIC, 0)) == (2.0, 3.0)
