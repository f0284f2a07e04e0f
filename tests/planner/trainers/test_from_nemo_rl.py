"""What was written for NeMo-RL is read as the plan that it was written for."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.trainers.nemo_rl import read_nemo_rl
from meshwright.planner.trainers.parsed_config import ParsedConfig
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.errors import BadInput
from tests.planner.trainers.written import assert_is_read, plan_of, written


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_every_choice_that_is_read_is_the_plans(tmp_path: Path, staleness: int, algorithm: Algorithm) -> None:
    plan = plan_of("nemo-rl", staleness, algorithm)
    found = read_nemo_rl(written("nemo-rl", plan, tmp_path))
    assert_is_read(plan, found)


def configured(tmp_path: Path, text: str) -> ParsedConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return read_nemo_rl(path)


def test_grpo_has_the_defaults_of_its_own_configuration_and_no_value_model(tmp_path: Path) -> None:
    found = configured(tmp_path, "grpo: {num_prompts_per_step: 8}\npolicy: {megatron_cfg: {enabled: true}}\n")
    words = found.by_name
    assert (found.algorithm, words["workload.group_size"], words["workload.batch_size"]) == ("grpo", 16, 128)
    assert (words["workload.prompt"], words["workload.response"]) == (256, 256)
    assert (words["grpo.kl_coefficient"], words["grpo.loss_mean"]) == (0.01, "token")
    assert "models.ref" in words
    assert not any(one.what.startswith(("critic", "models.critic", "ppo")) for one in found.fields)
    assert any("use_leave_one_out_baseline" in note for note in found.notes)


def test_a_reference_that_is_not_asked_is_none(tmp_path: Path) -> None:
    text = """
grpo: {adv_estimator: {name: reinforce_plus_plus, minus_baseline: true}, skip_reference_policy_logprobs_calculation: 1}
loss_fn: {reference_policy_kl_penalty: 0.0}
"""
    words = configured(tmp_path, text).by_name
    assert (words["algorithm"], words["reinforce.group_baseline"]) == ("reinforce++", True)
    assert "models.ref" not in words


def test_other_trainings_and_estimators_are_refused_by_their_keys(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"dpo.epochs: configuration .* does not configure reinforcement learning"):
        configured(tmp_path, "dpo: {epochs: 1}\npolicy: {train_micro_batch_size: 2}\n")
    with pytest.raises(BadInput, match=r"grpo.adv_estimator.name=gdpo is not an algorithm of a job"):
        configured(tmp_path, "grpo: {adv_estimator: {name: gdpo}}\npolicy: {train_micro_batch_size: 2}\n")


@pytest.mark.parametrize("defaults", ["distillation_math.yaml", "../dpo.yaml", "sft_openmathinstruct2.yaml"])
def test_a_file_of_another_training_is_refused_where_it_is_not_beside_the_configuration(
    tmp_path: Path, defaults: str
) -> None:
    with pytest.raises(
        BadInput, match=rf"defaults: {defaults}: configuration .* does not configure reinforcement learning"
    ):
        configured(tmp_path, f"defaults: {defaults}\npolicy: {{train_micro_batch_size: 2}}\n")
    with pytest.raises(
        BadInput, match=r"teacher.model_name: configuration .* does not configure reinforcement learning"
    ):
        configured(tmp_path, "policy: {train_micro_batch_size: 2}\nteacher: {model_name: t}\n")


def test_a_refusal_names_the_file_that_is_not_beside_the_configuration(tmp_path: Path) -> None:
    text = "defaults: ../../grpo_own_megatron.yaml\npolicy: {megatron_cfg: {pipeline_model_parallel_size: 2}}\n"
    with pytest.raises(BadInput, match=r"grpo_own_megatron.yaml is not beside the configuration, .* put it there"):
        configured(tmp_path, text)


@pytest.mark.parametrize(
    ("defaults", "more", "is_read"),
    [
        ("grpo_math_1B_megatron.yaml", "", True),
        ("grpo_math_1B.yaml", "", False),
        ("ppo_math_1B.yaml", "", False),
        ("grpo_own.yaml", "", False),
        ("grpo_own.yaml", "  megatron_cfg: {tensor_model_parallel_size: 1}\n", True),
    ],
)
def test_what_trains_is_known_by_the_file_that_is_not_there_or_by_megatrons_keys(
    tmp_path: Path, defaults: str, more: str, *, is_read: bool
) -> None:
    found = configured(tmp_path, f"defaults: {defaults}\npolicy:\n  train_micro_batch_size: 2\n{more}")
    assert ("actor_train.layout" in found.by_name) is is_read


def test_packed_micro_batches_are_budgets_of_all_ranks_that_share_a_sequence(tmp_path: Path) -> None:
    text = """
grpo: {num_prompts_per_step: 8}
policy:
  max_total_sequence_length: 1000
  sequence_packing: {enabled: true, logprob_mb_tokens: 9000}
  megatron_cfg:
    {enabled: true, context_parallel_size: 2, activation_checkpointing: true, recompute_granularity: selective}
cluster: {gpus_per_node: 8}
"""
    words = configured(tmp_path, text).by_name
    assert words["actor_train.micro_batch_tokens"] == 4000
    assert words["actor_logprob.micro_batch_tokens"] == words["ref_logprob.micro_batch_tokens"] == 9000
    assert words["actor_train.recompute"] == "selective"


def test_the_longest_prompt_is_what_the_longest_response_leaves(tmp_path: Path) -> None:
    text = "grpo: {}\npolicy: {max_total_sequence_length: 1000, generation: {max_new_tokens: 700}}\n"
    words = configured(tmp_path, text).by_name
    assert (words["workload.prompt"], words["workload.response"]) == (300, 700)


def test_other_precisions_and_fp8_are_told_and_the_overlong_penalty_is_read(tmp_path: Path) -> None:
    text = """
grpo: {reward_shaping: {enabled: true, overlong_buffer_length: 64, overlong_buffer_penalty: 0.5}}
policy:
  precision: float32
  megatron_cfg: {enabled: true, fp8_cfg: {enabled: true, fp8: hybrid}}
  generation: {vllm_cfg: {kv_cache_dtype: fp8}}
"""
    found = configured(tmp_path, text)
    assert (found.by_name["grpo.overlong_tokens"], found.by_name["grpo.overlong_penalty"]) == (64, 0.5)
    assert any("policy.precision=float32" in note for note in found.notes)
    assert "FP8 training is not modelled" in found.unmodelled["policy.megatron_cfg.fp8_cfg.enabled=True"]
    assert "FP8 training is not modelled" in found.unmodelled["policy.megatron_cfg.fp8_cfg.fp8=hybrid"]
    assert "policy.generation.vllm_cfg.kv_cache_dtype=fp8" in found.unmodelled


def test_a_minibatch_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"policy.train_global_batch_size=0 sequences are not a minibatch; use 1"):
        configured(tmp_path, "grpo: {}\npolicy: {train_global_batch_size: 0, train_micro_batch_size: 2}\n")


def test_what_leaves_no_rank_to_train_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("policy: {generation: {colocated: {enabled: false, resources: {gpus_per_node: 1}}}}\n")
    with pytest.raises(BadInput, match="leaves no rank to train"):
        read_nemo_rl(path)


def test_defaults_that_are_not_there_say_which_training_it_is_and_are_told(tmp_path: Path) -> None:
    found = configured(tmp_path, "defaults: ./grpo-llama-8b.yaml\npolicy: {train_micro_batch_size: 2}\n")
    assert found.algorithm == "grpo"
    assert any("defaults: ./grpo-llama-8b.yaml is not beside the configuration" in note for note in found.notes)
    known = configured(tmp_path, "defaults: ../grpo_math_1B.yaml\npolicy: {train_micro_batch_size: 2}\n")
    assert not any("defaults" in note for note in known.notes)


def test_degrees_that_do_not_divide_their_ranks_are_refused_by_their_keys(tmp_path: Path) -> None:
    degrees = "megatron_cfg: {enabled: true, tensor_model_parallel_size: 3, pipeline_model_parallel_size: 2}"
    sentence = (
        r"^policy.megatron_cfg.tensor_model_parallel_size=3 x policy.megatron_cfg.pipeline_model_parallel_size=2 does "
        "not divide the 8 ranks"
    )
    with pytest.raises(BadInput, match=sentence):
        configured(tmp_path, f"grpo: {{}}\ncluster: {{gpus_per_node: 8}}\npolicy: {{{degrees}}}\n")


@pytest.mark.parametrize("base", ["./dapo-qwen3-8b.yaml", "../cispo-qwen3-8b.yaml", "grpo-8b.yaml"])
def test_a_variant_of_grpo_is_known_by_the_file_that_is_not_there(tmp_path: Path, base: str) -> None:
    assert configured(tmp_path, f"defaults: {base}\npolicy: {{train_micro_batch_size: 2}}\n").algorithm == "grpo"
