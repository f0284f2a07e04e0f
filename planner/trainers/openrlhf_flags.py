"""Flags of OpenRLHF before and after version 0.11, mapped to their names in 0.11.

Sources: its examples/scripts before and after 0.11, and openrlhf/cli/train_ppo_ray.py of 0.11.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.planner.trainers.config_keys import TrainerConfig

_OLD_LENGTHS = ("prompt_max_len", "generate_max_len")
"""Flags before 0.11 for the maximum lengths of a prompt and of a response; 0.11 has one for both together and
one for a response."""

_OLD_OFFLOAD = "ref_reward_offload"
"""A flag before 0.11 that became two: `ref.offload` and `reward.offload`."""

_NEW_GROUP, _GROUP = "fsdp.", "ds."
"""The flag group of sharding and offload after 0.11, and in 0.11."""

CURRENT_NAMES: Mapping[str, str] = {
    **{
        f"{model}_{name}": f"{model}.{name}"
        for model in ("actor", "critic", "ref", "reward")
        for name in ("num_nodes", "num_gpus_per_node")
    },
    **{
        f"vllm_{name}": f"vllm.{name}"
        for name in ("num_engines", "tensor_parallel_size", "gpu_memory_utilization", "sync_backend", "enable_sleep")
    },
    **{
        f"colocate_{old}": f"train.colocate_{new}"
        for old, new in (("all_models", "all"), ("actor_ref", "actor_ref"), ("critic_reward", "critic_reward"))
    },
    "adam_offload": "ds.adam_offload",
    "actor_learning_rate": "actor.adam.lr",
    "advantage_estimator": "algo.advantage.estimator",
    "agent_func_path": "train.agent_func_path",
    "async_train": "train.async_enable",
    "critic_learning_rate": "critic.adam.lr",
    "critic_pretrain": "critic.model_name_or_path",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "enforce_eager": "vllm.enforce_eager",
    "entropy_loss_coef": "actor.entropy_coef",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "gamma": "algo.advantage.gamma",
    "generate_max_len": "rollout.max_new_tokens",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_estimator": "algo.kl.estimator",
    "lambd": "algo.advantage.lambd",
    "lora_rank": "ds.lora.rank",
    "max_epochs": "train.max_epochs",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "normalize_reward": "reward.normalize_enable",
    "num_episodes": "train.num_episodes",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "packing_samples": "ds.packing_samples",
    "policy_loss_type": "actor.policy_loss_type",
    "pretrain": "actor.model_name_or_path",
    "prompt_data": "data.prompt_dataset",
    "remote_rm_url": "reward.remote_url",
    "reward_pretrain": "reward.model_name_or_path",
    "ring_attn_size": "ds.ring_attn_size",
    "rollout_batch_size": "rollout.batch_size",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "stop_properly_penalty_coef": "reward.stop_properly_penalty_coef",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "train_batch_size": "train.batch_size",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "use_kl_loss": "algo.kl.use_loss",
    "value_clip": "critic.value_clip",
    "zero_stage": "ds.zero_stage",
}
"""The names in 0.11 of flags before it; `config_keys.read_flags` renames by this table."""


def with_current_flags(config: TrainerConfig) -> TrainerConfig:
    """Convert the flags that `CURRENT_NAMES` cannot: those that 0.11 merged or split, and the group that later versions
    renamed. Flags in `CURRENT_NAMES` are renamed already."""

    def rename(values: Mapping[str, Any]) -> dict[str, Any]:
        return {_current_name(config, key): value for key, value in _merge_old(values).items()}

    return replace(config, values=rename(config.values), other_branch=rename(config.other_branch))


def _current_name(config: TrainerConfig, key: str) -> str:
    name = key.replace(_NEW_GROUP, _GROUP, 1) if key.startswith(_NEW_GROUP) else key
    return name if config.known.knows(name) else key


def _merge_old(values: Mapping[str, Any]) -> dict[str, Any]:
    merged = {key: value for key, value in values.items() if key not in (_OLD_LENGTHS[0], _OLD_OFFLOAD)}
    prompt, response = values.get(_OLD_LENGTHS[0]), values.get(CURRENT_NAMES[_OLD_LENGTHS[1]])
    if isinstance(prompt, int) and isinstance(response, int):
        merged["data.max_len"] = prompt + response
    if values.get(_OLD_OFFLOAD):
        merged |= {"ref.offload": True, "reward.offload": True}
    return merged
