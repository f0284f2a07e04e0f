"""NeMo-RL's own rules hold in what is written for it."""

from __future__ import annotations

import pytest

from meshwright.profiles.errors import BadInput
from tests.planner.trainers.configurations import configuration, plan_ahead
from tests.planner.trainers.plans import best


def test_reference_and_log_probabilities_have_the_degrees_of_the_policy() -> None:
    found, plan = configuration("nemo-rl"), best("nemo-rl").plan
    layouts = {plan.placement(stage).layout for stage in ("actor_train", "actor_logprob", "ref_logprob")}
    assert len(layouts) == 1
    assert found["policy.megatron_cfg.tensor_model_parallel_size"] == next(iter(layouts)).tp


def test_rewards_have_ranks_of_their_own_and_no_pipeline() -> None:
    plan = best("nemo-rl").plan
    assert plan.choice("reward_score", "pool") != plan.choice("actor_train", "pool")
    assert plan.placement("reward_score").layout.pp == 1
    found = configuration("nemo-rl")
    assert found["data.default.env_name"] == "reward_model"


def test_generation_ahead_is_apart_asynchronous_and_corrected() -> None:
    found = configuration("nemo-rl", plan_ahead("nemo-rl"))
    assert found["ppo.async_ppo.enabled"] is True
    assert found["policy.generation.colocated.enabled"] is False
    assert found["policy.generation.vllm_cfg.async_engine"] is True
    assert found["loss_fn.use_importance_sampling_correction"] is True
    assert found["ppo.reward_shaping.enabled"] is False
    assert configuration("nemo-rl")["policy.generation.colocated.enabled"] is True


def test_grpo_has_its_penalty_in_the_loss_and_the_mean_of_the_group_for_a_baseline() -> None:
    found = configuration("nemo-rl", best("nemo-rl", algorithm="grpo").plan)
    assert found["grpo.skip_reference_policy_logprobs_calculation"] is True
    assert found["loss_fn.reference_policy_kl_penalty"] == 0.0
    assert found["loss_fn.use_kl_in_reward"] is False
    assert found["grpo.use_leave_one_out_baseline"] is False
    assert found["grpo.normalize_rewards"] is True
    assert not [key for key in found if key.startswith(("ppo.", "value"))]
    ahead = configuration("nemo-rl", plan_ahead("nemo-rl", "grpo"))
    assert ahead["grpo.async_grpo.enabled"] is ahead["loss_fn.use_importance_sampling_correction"] is True


def test_grpo_of_several_epochs_is_refused() -> None:
    plan = best("nemo-rl", algorithm="grpo").plan
    workload = plan.facts.workload.model_copy(update={"num_epochs": 2})
    facts = plan.facts.model_copy(update={"workload": workload})
    with pytest.raises(BadInput, match=r"workload.num_epochs=2: NeMo-RL trains GRPO for one epoch in a step; use 1"):
        configuration("nemo-rl", plan.model_copy(update={"facts": facts}))
