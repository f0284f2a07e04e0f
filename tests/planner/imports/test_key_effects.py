"""Every key of a trainer is read, without effect on a plan, or named."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.export.known_keys import known_keys
from meshwright.planner.imports.given_keys import GivenKeys
from meshwright.planner.imports.key_effects import WITHOUT_EFFECT, has_no_effect, named
from meshwright.planner.imports.readers import READERS
from meshwright.planner.imports.said import Configured

FILES = {"verl": ("verl",), "openrlhf": ("openrlhf",), "nemo-rl": ("nemo_rl", "nemo_rl_grpo"), "slime": ("slime",)}
DECIDING = {
    "verl": (
        "actor_rollout_ref.rollout.max_num_seqs",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "actor_rollout_ref.rollout.multi_turn.enable",
        "algorithm.filter_groups.enable",
        "actor_rollout_ref.rollout.quantization",
        "actor_rollout_ref.model.lora.rank",
        "actor_rollout_ref.actor.optim.weight_decay",
        "actor_rollout_ref.actor.optim.lr_warmup_steps",
        "actor_rollout_ref.rollout.top_p",
        "actor_rollout_ref.rollout.pipeline_model_parallel_size",
    ),
    "openrlhf": ("ds.lora.rank", "algo.dynamic_filtering_enable", "reward.overlong_buffer_len", "actor.entropy_coef"),
    "nemo-rl": (
        "policy.precision",
        "policy.megatron_cfg.peft.enabled",
        "policy.megatron_cfg.optimizer.optimizer_cpu_offload",
    ),
    "slime": ("optimizer-cpu-offload", "use-opd", "accumulate-allreduce-grads-in-fp32", "lora-rank", "rollout-top-k"),
}


@pytest.mark.parametrize("trainer", FILES)
def test_a_key_is_without_effect_or_named_with_a_reason(trainer: str) -> None:
    for file in FILES[trainer]:
        keys = [key for key in known_keys(file).keys if not has_no_effect(trainer, key)]
        told = named(trainer, known_keys(file).keys)
        assert list(told) == keys
        assert all(len(reason) > 10 for reason in told.values())


@pytest.mark.parametrize("trainer", FILES)
def test_what_decides_is_never_without_effect(trainer: str) -> None:
    assert [key for key in DECIDING[trainer] if has_no_effect(trainer, key)] == []


def test_a_pattern_is_listed_once() -> None:
    for patterns in WITHOUT_EFFECT.values():
        assert len(set(patterns)) == len(patterns)


COMMAND = """\
python3 -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo data.train_batch_size=64 \\
  data.max_prompt_length=100 data.max_response_length=400 data.train_files=x.parquet trainer.logger=console \\
  actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 {more}
"""


def read(tmp_path: Path, *more: str) -> Configured:
    (tmp_path / "run.sh").write_text(COMMAND.format(more=" ".join(more)))
    return READERS["verl"].read(tmp_path / "run.sh")


@pytest.mark.parametrize(
    ("key", "word", "value"),
    [
        ("actor_rollout_ref.model.lora_rank=16", "adapter.rank", 16),
        ("actor_rollout_ref.model.lora.rank=8", "adapter.rank", 8),
        ("actor_rollout_ref.rollout.top_p=0.9", "grpo.top_p", 0.9),
        ("actor_rollout_ref.rollout.top_k=-1", "grpo.top_k", 0),
        ("actor_rollout_ref.actor.optim.weight_decay=0.1", "grpo.weight_decay", 0.1),
        ("actor_rollout_ref.actor.optim.clip_grad=0.5", "grpo.max_grad_norm", 0.5),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=7", "grpo.actor_schedule.warmup_steps", 7),
        ("actor_rollout_ref.rollout.quantization=fp8", "generation_weights", "fp8"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.7", "engine.memory_share", 0.7),
        ("custom_reward_function.path=mine.py", "reward.function", "reward:score"),
        ("trainer.logger=none", "reward.function", "maths_answer"),
    ],
)
def test_keys_that_decide_are_read(tmp_path: Path, key: str, word: str, value: object) -> None:
    assert read(tmp_path, key).words[word] == value


def test_every_given_key_is_read_or_named_or_without_effect(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "algorithm.filter_groups.enable=True",
        "actor_rollout_ref.actor.megatron.param_offload=True",
        "+some.new.key=3",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    )
    assert set(found.named) == {
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "algorithm.filter_groups.enable=True",
        "actor_rollout_ref.actor.megatron.param_offload=True",
        "some.new.key=3",
    }
    assert set(found.unread) >= {"data.train_files", "trainer.logger"}
    assert any("workload.turns" in reason for reason in found.named.values())


def test_a_key_with_its_default_is_not_named() -> None:
    given = GivenKeys(known=known_keys("verl"), given={"algorithm.filter_groups.enable": False, "critic.rollout_n": 3})
    told, plain = given.accounted("verl", ("critic.*",))
    assert told == {}
    assert plain == ("algorithm.filter_groups.enable", "critic.rollout_n")
