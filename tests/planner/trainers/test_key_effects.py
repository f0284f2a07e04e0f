"""Every key of a trainer is read, without effect on a plan, or named."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.trainers.config_keys import TrainerConfig, known_keys
from meshwright.planner.trainers.key_effects import NO_FIELD, REASONS, WITHOUT_EFFECT, has_no_effect, reasons_not_read
from meshwright.planner.trainers.parsed_config import ParsedConfig
from meshwright.planner.trainers.registry import READERS
from meshwright.profiles.stages import Role

FILES = {
    "verl": ("verl",),
    "openrlhf": ("openrlhf",),
    "nemo-rl": ("nemo_rl", "nemo_rl_grpo"),
    "slime": ("slime",),
    "skyrl": ("skyrl",),
    "areal": ("areal",),
}
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
    "skyrl": (
        "trainer.strategy",
        "trainer.algorithm.dynamic_sampling.type",
        "generator.max_turns",
        "trainer.policy.model.lora.rank",
        "generator.inference_engine.enable_pd",
    ),
    "areal": (
        "actor.backend",
        "rollout.max_head_offpolicyness",
        "actor.use_lora",
        "dynamic_bs",
        "actor.reward_scaling",
    ),
}


NUMBERS = {"verl": 636, "openrlhf": 167, "nemo-rl": 735, "slime": 396, "skyrl": 386, "areal": 1077}
"""How many keys of a trainer are known at least, of its files together."""

READ = {
    "verl": (
        "python3 -m verl.trainer.main_ppo model_engine=megatron data.train_batch_size=64 {verl_async} "
        "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.actor.use_kl_loss=True {verl_adapter} "
        "reward.reward_kwargs.overlong_buffer_cfg.enable=True {verl_scored}",
        "python3 -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo "
        "custom_reward_function.path=a.py actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.use_kl_loss=True "
        "critic.use_dynamic_bsz=True actor_rollout_ref.actor.use_dynamic_bsz=True",
    ),
    "openrlhf": (
        "python3 -m openrlhf.cli.train_ppo_ray --reward.model_name_or_path r --vllm.num_engines 8 {pools} "
        "--ds.lora.rank 4 --train.dynamic_batch_enable --reward.overlong_buffer_len 8 --data.max_len 8 "
        "--rollout.batch_size 8 --train.batch_size 8 --algo.kl.init_coef 0.1",
    ),
    "nemo-rl": (
        "grpo: {reward_shaping: {enabled: true}}\npolicy: {megatron_cfg: {enabled: true, peft: {enabled: true}}}\n",
        "grpo: {num_prompts_per_step: 8, async_grpo: {enabled: true}}\n"
        "policy: {dtensor_cfg: {lora_cfg: {enabled: true}}}\n",
        "ppo: {async_ppo: {enabled: true}}\npolicy: {generation: {colocated: {enabled: false}}, "
        "sequence_packing: {enabled: false}}\nenv: {reward_model: {model_name: r}}\ncluster: {num_nodes: 4}\n",
    ),
    "slime": (
        "python3 train.py --advantage-estimator ppo --colocate --rollout-batch-size 8 --rollout-max-response-len 8 "
        "--use-dynamic-batch-size --max-tokens-per-gpu 8",
        "python3 train.py --colocate --rollout-batch-size 8 --n-samples-per-prompt 2 --rollout-max-response-len 8 "
        "--use-kl-loss",
    ),
    "skyrl": (
        "python -m skyrl.train.entrypoints.main_base trainer.strategy=megatron trainer.algorithm.use_kl_loss=true "
        "trainer.algorithm.use_entropy_loss=true {skyrl_adapter} trainer.max_tokens_per_microbatch=8",
        "python -m examples.train.async.main_async trainer.strategy=megatron trainer.algorithm.use_kl_in_reward=true "
        "trainer.placement.colocate_all=false trainer.placement.colocate_policy_ref=false "
        "trainer.fully_async.max_staleness_steps=2 trainer.algorithm.use_kl_loss=false",
        "python -m skyrl.train.entrypoints.main_base trainer.algorithm.advantage_estimator=gae "
        "trainer.critic.model.path=c trainer.placement.colocate_all=false",
    ),
    "areal": (
        "actor: {backend: 'megatron:d4t2', kl_ctl: 0.1, path: m, use_lora: true, overlong_reward_penalty: true,"
        " overlong_tokens: 8, overlong_penalty_factor: 1.0}\nref: {backend: 'megatron:d8', path: m}\n"
        "critic: {backend: 'megatron:d8', path: m, optimizer: '${actor.optimizer}'}\n"
        "rollout: {backend: 'sglang:d8'}\nsglang: {max_running_requests: 8}\n",
        "actor: {backend: 'megatron:d8', scheduling_strategy: {type: colocation, target: rollout}}\n"
        "rollout: {backend: 'vllm:d8'}\ngconfig: {n_samples: 2}\nvllm: {max_num_seqs: 8}\n"
        "critic: {backend: 'megatron:d8', optimizer: {lr: 1.0}}\n",
        "allocation_mode: 'sglang[rollout]:d8p1t1|fsdp[actor]:d8'\ngconfig: {n_samples: 2}\n",
    ),
}
"""Configurations that ask for what their trainer's reader knows of."""

FILLED = {
    "verl_async": "trainer.v1.trainer_mode=separate_async actor_rollout_ref.rollout.nnodes=1",
    "verl_adapter": "actor_rollout_ref.model.lora.rank=8 algorithm.use_kl_in_reward=True",
    "verl_scored": "reward.reward_model.enable=True reward.reward_model.enable_resource_pool=True "
    "reward.reward_model.nnodes=1 reward.reward_model.n_gpus_per_node=8",
    "skyrl_adapter": "trainer.policy.model.lora.rank=8 trainer.algorithm.overlong_buffer_len=8",
    "pools": " ".join(f"--{role}.num_nodes 1 --{role}.num_gpus_per_node 8" for role in Role),
}


IN_YAML = ("nemo-rl", "areal")
"""Trainers whose configurations here are YAML."""


def asked_of(trainer: str, directory: Path) -> set[str]:
    """Every key that the reader of a trainer looks at in one of the configurations."""
    found: set[str] = set()
    for text in READ[trainer]:
        path = directory / ("run.yaml" if trainer in IN_YAML else "run.sh")
        path.write_text(text if trainer in IN_YAML else text.format(**FILLED))
        found |= READERS[trainer].read(path).read_keys
    return found


@pytest.mark.parametrize("trainer", FILES)
def test_every_key_of_a_trainer_is_read_or_without_effect_or_named_with_what_is_to_be_known_of_it(
    trainer: str, tmp_path: Path
) -> None:
    keys = {key for file in FILES[trainer] for key in known_keys(file).keys} - asked_of(trainer, tmp_path)
    told = reasons_not_read(trainer, keys)
    assert sorted(key for key, reason in told.items() if reason == NO_FIELD) == []
    assert {key for key in keys if not has_no_effect(trainer, key)} == set(told)
    assert sum(len(known_keys(file).keys) for file in FILES[trainer]) >= NUMBERS[trainer]


def test_a_key_of_a_kind_that_no_pattern_has_is_named_all_the_same() -> None:
    assert reasons_not_read("slime", ["a-flag-of-tomorrow"]) == {"a-flag-of-tomorrow": NO_FIELD}


def test_each_reason_is_a_sentence_of_its_own_and_each_pattern_is_of_one_reason() -> None:
    patterns = [pattern for _, several in REASONS for pattern in several]
    assert len(set(patterns)) == len(patterns)
    assert len({reason for reason, _ in REASONS}) == len(REASONS)


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


def read(tmp_path: Path, *more: str) -> ParsedConfig:
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
    assert read(tmp_path, key).by_name[word] == value


def test_every_given_key_is_read_or_named_or_without_effect(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "algorithm.filter_groups.enable=True",
        "actor_rollout_ref.actor.megatron.param_offload=True",
        "+some.new.key=3",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    )
    assert set(found.unmodelled) == {
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "algorithm.filter_groups.enable=True",
        "actor_rollout_ref.actor.megatron.param_offload=True",
        "some.new.key=3",
    }
    assert set(found.ignored) >= {"data.train_files", "trainer.logger"}
    assert any("workload.turns" in reason for reason in found.unmodelled.values())


def test_a_key_with_its_default_is_not_named() -> None:
    given = TrainerConfig(
        known=known_keys("verl"), values={"algorithm.filter_groups.enable": False, "critic.rollout_n": 3}
    )
    told, plain = given.split_unread("verl", ("critic.*",))
    assert told == {}
    assert plain == ("algorithm.filter_groups.enable", "critic.rollout_n")


@pytest.mark.parametrize(
    ("trainer", "key"),
    [
        ("verl", "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"),
        ("verl", "actor_rollout_ref.rollout.engine_kwargs.sglang.speculative_num_draft_tokens"),
        ("nemo-rl", "policy.generation.vllm_kwargs.speculative_config"),
        ("slime", "sglang-speculative-num-draft-tokens"),
    ],
)
def test_drafts_are_reported_wherever_a_trainer_has_their_keys(trainer: str, key: str) -> None:
    """Many arguments of an engine have no effect on a plan, and drafts have one."""
    assert "workload.speculation" in reasons_not_read(trainer, [key]).get(key, "")
