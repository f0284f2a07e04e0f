"""What was written for SkyRL is read as the plan that it was written for; what it cannot have is refused by its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.trainers.parsed_config import ParsedConfig
from meshwright.planner.trainers.skyrl import read_skyrl
from meshwright.profiles.errors import BadInput
from tests.planner.trainers.written import assert_is_read, plan_of, written


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_choice_that_is_read_is_the_plans(tmp_path: Path, staleness: int) -> None:
    plan = plan_of("skyrl", staleness)
    assert_is_read(plan, read_skyrl(written("skyrl", plan, tmp_path)))


def configured(tmp_path: Path, *keys: str, module: str = "skyrl.train.entrypoints.main_base") -> ParsedConfig:
    """What a configuration of GRPO on eight ranks says, with keys behind it."""
    given = ["trainer.strategy=megatron", "trainer.placement.policy_num_gpus_per_node=8"]
    given += ["generator.inference_engine.num_engines=8", "trainer.train_batch_size=32"]
    given += ["trainer.policy_mini_batch_size=16", "generator.n_samples_per_prompt=8"]
    path = tmp_path / "run.sh"
    path.write_text(f"uv run -m {module} {' '.join([*given, *keys])}\n")
    return read_skyrl(path)


def test_a_token_budget_replaces_the_rows_of_every_pass(tmp_path: Path) -> None:
    found = configured(tmp_path, "trainer.max_tokens_per_microbatch=4096", "trainer.micro_train_batch_size_per_gpu=4")
    values = found.by_name
    stages = ("actor_train", "actor_logprob", "ref_logprob")
    assert [values[f"{stage}.micro_batch_tokens"] for stage in stages] == [4096] * 3
    assert not any(field.what.endswith("micro_batch_size") for field in found.fields)
    assert found.unmodelled == {}


def test_without_checkpoints_of_gradients_nothing_is_recomputed(tmp_path: Path) -> None:
    assert configured(tmp_path).by_name["actor_train.recompute"] == "full"
    key = "trainer.policy.megatron_config.transformer_config_kwargs.recompute_granularity"
    assert configured(tmp_path, f"{key}=selective").by_name["actor_train.recompute"] == "selective"
    assert configured(tmp_path, "trainer.gradient_checkpointing=false").by_name["actor_train.recompute"] == "none"


def test_models_that_share_ranks_are_offloaded_and_others_are_not(tmp_path: Path) -> None:
    apart = ("trainer.placement.colocate_all=false", "trainer.placement.ref_num_gpus_per_node=8")
    found = configured(tmp_path, *apart, module="examples.train.async.main_async")
    assert (found.by_name["actor_train.offload"], found.by_name["ref_logprob.offload"]) == ("optimizer", "weights")
    assert found.steps_ahead == 1
    own = configured(tmp_path, *apart, "trainer.placement.colocate_policy_ref=false").by_name
    assert (own["actor_train.offload"], own["ref_logprob.offload"]) == ("none", "none")
    assert (own["actor_train.pool"], own["ref_logprob.pool"], own["actor_generate.pool"]) == ("0:8", "8:8", "16:8")


def test_more_steps_of_staleness_are_read_as_one_and_told(tmp_path: Path) -> None:
    found = configured(tmp_path, "trainer.fully_async.enabled=true", "trainer.fully_async.max_staleness_steps=4")
    assert found.steps_ahead == 1
    assert "trainer.fully_async.max_staleness_steps=4 is read as 1: generation is one step ahead." in found.notes


def test_fsdp_leaves_layouts_and_rows_to_the_search_and_says_so(tmp_path: Path) -> None:
    found = configured(tmp_path, "trainer.strategy=fsdp")
    assert not any(field.what.endswith(("layout", "micro_batch_size", "offload")) for field in found.fields)
    assert any("trainer.strategy is not megatron" in note for note in found.notes)


def test_another_loss_is_told_and_an_aggregation_that_a_job_lacks_leaves_its_default(tmp_path: Path) -> None:
    found = configured(
        tmp_path, "trainer.algorithm.policy_loss_type=gspo", "trainer.algorithm.loss_reduction=prompt_mean"
    )
    assert "grpo.loss_mean" not in found.by_name
    assert any("policy_loss_type=gspo: a job clips each token's ratio" in note for note in found.notes)
    assert any("loss_reduction=prompt_mean is not a loss aggregation" in note for note in found.notes)


def test_engines_that_do_not_take_all_ranks_that_they_share_are_refused_with_both_numbers(tmp_path: Path) -> None:
    sentence = r"num_engines=8: the engines have 16 ranks, and with .*colocate_all=true they share all 8 of the policy"
    with pytest.raises(BadInput, match=sentence):
        configured(tmp_path, "generator.inference_engine.tensor_parallel_size=2")
    with pytest.raises(BadInput, match=r"^trainer.policy.megatron_config.tensor_model_parallel_size=3 does not divide"):
        configured(tmp_path, "trainer.policy.megatron_config.tensor_model_parallel_size=3")


def test_a_critic_is_refused_where_megatron_trains_since_skyrl_then_has_none(tmp_path: Path) -> None:
    gae = "trainer.algorithm.advantage_estimator=gae"
    with pytest.raises(BadInput, match=r"advantage_estimator=gae needs a critic, and with trainer.strategy=megatron"):
        configured(tmp_path, gae)
    critic = "trainer.critic.model.path=m"
    assert configured(tmp_path, gae, critic, "trainer.strategy=fsdp").by_name["models.critic"] == "m"


def test_a_misspelt_key_is_reported_once_with_the_key_that_was_meant(tmp_path: Path) -> None:
    found = configured(tmp_path, "trainer.plicy_mini_batch_size=4")
    reason = found.unmodelled["trainer.plicy_mini_batch_size=4"]
    assert reason == "it is not a key of skyrl 0.3.0; did you mean 'trainer.policy_mini_batch_size'?"
    assert not any("plicy" in line for line in (*found.notes, *found.ignored))
