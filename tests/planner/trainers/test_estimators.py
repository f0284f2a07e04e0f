"""The KL penalty of a configuration is read from where the algorithm has it."""

from __future__ import annotations

import pytest

from meshwright.planner.trainers.config_keys import TrainerConfig, known_keys
from meshwright.planner.trainers.parsed_config import (
    GRPO_ESTIMATOR,
    PPO_ESTIMATOR,
    REINFORCE_ESTIMATOR,
    RLOO_ESTIMATOR,
    Estimator,
    TrainingSetup,
)

GIVEN = TrainerConfig(known=known_keys("slime"), values={"kl-loss-coef": 0.1, "kl-coef": 0.2, "gamma": 0.9})


def configuration(estimator: Estimator, *, in_loss: bool, in_reward: bool) -> TrainingSetup:
    return TrainingSetup(
        config=GIVEN,
        key="advantage-estimator",
        estimator=estimator,
        has_ref=in_loss or in_reward,
        kl_in_loss="kl-loss-coef" if in_loss else None,
        kl_in_reward="kl-coef" if in_reward else None,
    )


@pytest.mark.parametrize(
    ("estimator", "in_loss", "in_reward", "coefficient", "is_told"),
    [
        (GRPO_ESTIMATOR, True, False, 0.1, False),
        (GRPO_ESTIMATOR, False, True, 0.2, True),
        (GRPO_ESTIMATOR, True, True, 0.1, True),
        (RLOO_ESTIMATOR, True, True, 0.2, True),
        (REINFORCE_ESTIMATOR, True, False, 0.1, True),
        (REINFORCE_ESTIMATOR, False, True, 0.2, False),
        (PPO_ESTIMATOR, False, True, 0.2, False),
        (GRPO_ESTIMATOR, False, False, None, False),
    ],
)
def test_the_penalty_of_its_own_place_is_preferred_and_another_place_is_told(
    estimator: Estimator, in_loss: bool, in_reward: bool, coefficient: float | None, is_told: bool
) -> None:
    found = configuration(estimator, in_loss=in_loss, in_reward=in_reward)
    kl = found.number_setting("kl_coefficient", found.kl_key) if found.kl_key else ()
    fields = [*found.algorithm_fields(), *kl]
    values = {one.what.partition(".")[2]: one.value for one in fields}
    assert values.get("kl_coefficient") == coefficient
    assert any(found.notes()) is is_told


def test_an_algorithm_takes_no_settings_of_another() -> None:
    grpo = configuration(GRPO_ESTIMATOR, in_loss=False, in_reward=False)
    assert not list(grpo.number_setting("gamma", "gamma"))
    ppo = configuration(PPO_ESTIMATOR, in_loss=False, in_reward=False)
    assert not list(ppo.number_setting("clip_ratio_high", "eps-clip-high"))
    fields = [*ppo.algorithm_fields(), *ppo.number_setting("gamma", "gamma")]
    assert [(one.what, one.value) for one in fields] == [
        ("algorithm", "ppo"),
        ("ppo.kl_coefficient", 0.0),
        ("ppo.gamma", 0.9),
    ]


def test_stages_are_those_of_the_algorithm() -> None:
    found = configuration(GRPO_ESTIMATOR, in_loss=False, in_reward=False)
    assert found.stages("actor_train", "critic_train", "ref_logprob") == ("actor_train",)
