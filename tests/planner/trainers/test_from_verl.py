"""What was written for verl is read as the plan that it was written for."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.trainers.parsed_config import ParsedConfig
from meshwright.planner.trainers.verl import read_verl
from meshwright.profiles.errors import BadInput
from tests.planner.trainers.written import assert_is_read, plan_of, written

ACTOR = "actor_rollout_ref.actor"
MICRO_BATCHES = (
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
)


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_choice_that_is_read_is_the_plans(tmp_path: Path, staleness: int) -> None:
    plan = plan_of("verl", staleness)
    found = read_verl(written("verl", plan, tmp_path))
    assert_is_read(plan, found)


def configured(tmp_path: Path, *overrides: str) -> ParsedConfig:
    """What a GRPO configuration says, with overrides behind it."""
    given = ["model_engine=megatron", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", *MICRO_BATCHES]
    path = tmp_path / "run.sh"
    path.write_text(f"python3 -m verl.trainer.main_ppo {' '.join([*given, *overrides])}\n")
    return read_verl(path)


def test_grpo_has_groups_its_own_settings_and_no_critic(tmp_path: Path) -> None:
    found = configured(tmp_path, f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean")
    words = found.by_name
    assert (found.algorithm, words["workload.group_size"], words["workload.batch_size"]) == ("grpo", 4, 4096)
    assert words["workload.num_minibatches"] == 4
    assert (words["grpo.clip_ratio_high"], words["grpo.loss_mean"]) == (0.28, "sequence")
    assert words["grpo.normalise_by_std"] is True
    assert not any(one.what.partition(".")[0] in ("ppo", "critic_train", "critic_value") for one in found.fields)
    assert "models.critic" not in words


@pytest.mark.parametrize(("said", "steps"), [(0, 0), (1, 0), (2, 1), (20, 19)])
def test_a_critic_warms_up_before_the_step_of_the_first_update_of_the_actor(
    tmp_path: Path, said: int, steps: int
) -> None:
    overrides = ("algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1", f"trainer.critic_warmup={said}")
    assert configured(tmp_path, *overrides).by_name["ppo.critic_warmup_steps"] == steps


def test_an_engine_that_is_costed_is_read_and_another_is_not(tmp_path: Path) -> None:
    named = {name: configured(tmp_path, f"actor_rollout_ref.rollout.name={name}").by_name for name in ("sglang", "hf")}
    assert named["sglang"]["engine"] == "sglang"
    assert "engine" not in named["hf"]


def test_a_kl_penalty_asks_for_a_reference(tmp_path: Path) -> None:
    assert "models.ref" not in configured(tmp_path).by_name
    in_loss = configured(tmp_path, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.003")
    assert in_loss.by_name["grpo.kl_coefficient"] == 0.003
    assert "ref_logprob.layout" in in_loss.by_name
    assert all("reward function" in note for note in in_loss.notes)
    in_reward = configured(tmp_path, "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.02")
    assert in_reward.by_name["grpo.kl_coefficient"] == 0.02
    sentence = "algorithm.kl_ctrl.kl_coef is read as the coefficient of a KL penalty in the loss"
    assert any(sentence in note for note in in_reward.notes)


@pytest.mark.parametrize(
    ("estimator", "algorithm"),
    [("rloo", "rloo"), ("reinforce_plus_plus", "reinforce++"), ("reinforce_plus_plus_baseline", "reinforce++")],
)
def test_the_other_estimators_are_algorithms_too(tmp_path: Path, estimator: str, algorithm: str) -> None:
    found = configured(tmp_path, f"algorithm.adv_estimator={estimator}")
    assert found.algorithm == algorithm
    assert found.by_name.get("reinforce.group_baseline", False) is estimator.endswith("baseline")


def test_an_estimator_that_no_job_has_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"algorithm.adv_estimator=gpg is not an algorithm of a job; configure one of gae"
    ):
        configured(tmp_path, "algorithm.adv_estimator=gpg")
    with pytest.raises(BadInput, match=r"critic.enable=False"):
        configured(tmp_path, "algorithm.adv_estimator=gae", "critic.enable=False")


def test_a_single_sample_of_a_prompt_has_its_score_as_its_advantage(tmp_path: Path) -> None:
    found = configured(tmp_path, "actor_rollout_ref.rollout.n=1")
    assert (found.algorithm, found.by_name["workload.group_size"]) == ("reinforce++", 1)
    assert any("actor_rollout_ref.rollout.n=1 with algorithm.adv_estimator=grpo" in note for note in found.notes)


def test_on_policy_distillation_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"distillation.enabled=True: on-policy distillation .* is not read"):
        configured(tmp_path, "distillation.enabled=True", "distillation.nnodes=1")


def test_keys_of_another_engine_are_known_though_this_version_does_not_list_them(tmp_path: Path) -> None:
    found = configured(
        tmp_path, f"{ACTOR}.fsdp_config.param_offload=True", f"{ACTOR}.fsdp_config.forward_prefetch=False"
    )
    assert not any("is not a key of verl" in note for note in found.notes)
    assert f"{ACTOR}.fsdp_config.param_offload=True" in found.unmodelled
    assert not any("forward_prefetch" in key for key in found.unmodelled)


def test_megatrons_own_offload_of_the_optimizer_is_read(tmp_path: Path) -> None:
    key = f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True"
    words = configured(tmp_path, key, "model_engine=megatron").by_name
    assert words["actor_train.offload"] == "optimizer"


def test_losses_that_no_job_has_are_told_and_a_degree_that_a_script_computes_is_named(tmp_path: Path) -> None:
    found = configured(tmp_path, f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=token-sum")
    assert sum("policy_loss.loss_mode=gspo" in note or "loss_agg_mode=token-sum" in note for note in found.notes) == 2
    assert "grpo.loss_mean" not in found.by_name
    with pytest.raises(BadInput, match=r"pipeline_model_parallel_size=\$STAGES: STAGES is set by no line"):
        configured(tmp_path, f"{ACTOR}.megatron.pipeline_model_parallel_size=$STAGES")


def test_a_micro_batch_that_no_key_gives_stays_free_and_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    keys = (
        "model_engine=megatron",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        *MICRO_BATCHES[:2],
    )
    path.write_text(f"python3 -m verl.trainer.main_ppo {' '.join([*keys, f'{ACTOR}.use_kl_loss=True'])}\n")
    found = read_verl(path)
    assert "ref_logprob.micro_batch_size" not in found.by_name
    assert any(note.startswith("ref_logprob: no key gives the rows") for note in found.notes)


def test_fsdp_leaves_layouts_free_and_unknown_keys_are_told(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "python3 -m verl.trainer.main_ppo trainer.nnodes=2 trainer.colour=red actor_rollout_ref.rollout.n=4\n"
    )
    found = read_verl(path)
    assert not any(one.what.endswith(".layout") for one in found.fields)
    assert found.by_name["workload.batch_size"] == 4096
    assert found.unmodelled["trainer.colour=red"] == "it is not a key of verl 0.9.1"
    assert any("FSDP" in note for note in found.notes)


def test_degrees_that_do_not_divide_their_ranks_are_refused_by_their_keys(tmp_path: Path) -> None:
    trained = r"^actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3 does not divide the 8 ranks of its pool"
    with pytest.raises(BadInput, match=trained):
        configured(tmp_path, f"{ACTOR}.megatron.tensor_model_parallel_size=3")
    engine = r"^actor_rollout_ref.rollout.tensor_model_parallel_size=3 does not divide"
    with pytest.raises(BadInput, match=engine):
        configured(tmp_path, "actor_rollout_ref.rollout.tensor_model_parallel_size=3")
