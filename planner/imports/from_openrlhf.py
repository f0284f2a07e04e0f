"""Import of OpenRLHF configurations: the flags of `train_ppo_ray` in a script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.planner.export.known_keys import known_keys
from meshwright.planner.imports.estimators import (
    GRPO_ESTIMATOR,
    LOSS_MEANS,
    PPO_ESTIMATOR,
    REINFORCE_BASELINE_ESTIMATOR,
    REINFORCE_ESTIMATOR,
    RLOO_ESTIMATOR,
    USER_FUNCTION,
    Estimator,
    FunctionReward,
    TrainingSetup,
    estimator_of,
)
from meshwright.planner.imports.given_keys import TrainerConfig, read_flags
from meshwright.planner.imports.openrlhf_flags import CURRENT_NAMES, with_current_flags
from meshwright.planner.imports.said import (
    MEMORY_SHARE,
    ParsedConfig,
    ParsedField,
    cluster_of,
    consecutive_pools,
    layout_of,
    nodes_of_ranks,
)
from meshwright.profiles.stages import Role

_STAGES = {
    "actor": ("actor_train", "actor_logprob"),
    "critic": ("critic_train", "critic_value"),
    "ref": ("ref_logprob",),
    "reward": ("reward_score",),
}

_ESTIMATOR = "algo.advantage.estimator"
_ESTIMATORS: Mapping[str, Estimator] = {
    "gae": PPO_ESTIMATOR,
    "group_norm": GRPO_ESTIMATOR,
    "dr_grpo": Estimator(algorithm="grpo", settings={"normalise_by_std": False}),
    "rloo": RLOO_ESTIMATOR,
    "trl_rloo": RLOO_ESTIMATOR,  # rloo's name in 0.5
    "reinforce": REINFORCE_ESTIMATOR,
    "reinforce_baseline": REINFORCE_BASELINE_ESTIMATOR,
}


def read_openrlhf(path: Path, changed: Mapping[str, Any] | None = None) -> ParsedConfig:
    """Read the configuration in a script; `changed` are keys with values that override its own.

    Raises BadInput naming a flag that a job cannot express.
    """
    config = with_current_flags(read_flags(path, known_keys("openrlhf"), CURRENT_NAMES, changed=changed))
    setup = _training_setup(config)
    notes: list[str] = []
    if config.integer("ds.zero_stage") > 1:
        notes.append(
            f"--ds.zero_stage {config.value('ds.zero_stage')} is costed as ZeRO-1: optimizer state alone is sharded."
        )
    if (loss := config.value("actor.policy_loss_type")) != "ppo":
        notes.append(f"--actor.policy_loss_type {loss}: a job clips each token's ratio as PPO, which costs as much.")
    notes += setup.notes()
    fields = [*_workload_fields(setup), *_model_fields(setup), *_algorithm_fields(setup), *_placement_fields(setup)]
    fields += _generation_fields(setup)
    steps_ahead = int(bool(config.value("train.async_enable")))
    return setup.parsed("openrlhf", fields, steps_ahead=steps_ahead, notes=notes, unused=_unused_keys(setup))


def _unused_keys(setup: TrainingSetup) -> Iterator[str]:
    """Patterns of keys that other keys make unused."""
    if not setup.stages("critic_train"):
        yield from ("critic.*", "train.colocate_critic_reward")
    if not setup.has_ref:
        yield from ("ref.*", "train.colocate_actor_ref")
    if setup.reward is not None:
        yield "reward.num_*"
    together = {"all": "*.num_*", "actor_ref": "ref.num_*", "critic_reward": "reward.num_*"}
    for name, pattern in together.items():
        if setup.config.value(f"train.colocate_{name}"):
            yield pattern


def _training_setup(config: TrainerConfig) -> TrainingSetup:
    """The algorithm by the rules of train_ppo_ray: a reference model exists where the KL penalty has a coefficient."""
    estimator, kl = estimator_of(config, _ESTIMATOR, _ESTIMATORS), "algo.kl.init_coef"
    has_ref, in_loss = config.number(kl) > 0, bool(config.value("algo.kl.use_loss")) and estimator is not PPO_ESTIMATOR
    return TrainingSetup(
        config=config,
        key=_ESTIMATOR,
        estimator=estimator,
        has_ref=has_ref,
        kl_in_loss=kl if in_loss and has_ref else None,
        kl_in_reward=kl if not in_loss and (has_ref or estimator is PPO_ESTIMATOR) else None,
        reward=None if _has_reward_model(config) else FunctionReward(USER_FUNCTION, ("reward.remote_url",)),
    )


def _workload_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    samples = config.integer("rollout.n_samples_per_prompt")
    batch = config.integer("rollout.batch_size") * samples
    longest = config.integer("data.max_len")
    response = config.integer_or("rollout.max_new_tokens", longest // 2)
    yield ParsedField("workload.batch_size", batch, ("rollout.batch_size", "rollout.n_samples_per_prompt"))
    yield from setup.group(samples, "rollout.n_samples_per_prompt")
    yield ParsedField("workload.prompt", max(1, longest - response), ("data.max_len", "rollout.max_new_tokens"))
    yield ParsedField("workload.response", response, ("rollout.max_new_tokens",))
    yield ParsedField(
        "workload.num_minibatches", max(1, batch // config.integer("train.batch_size")), ("train.batch_size",)
    )
    yield ParsedField("workload.num_epochs", config.integer("train.max_epochs"), ("train.max_epochs",))


def _model_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    actor, reward = config.text("actor.model_name_or_path"), config.text("reward.model_name_or_path")
    critic = config.text("critic.model_name_or_path") or (str(reward).split(",")[0] if reward else actor)
    for role, path in (("actor", actor), ("ref", actor), ("critic", critic)):
        if role in setup.graph.roles:
            yield ParsedField(
                f"models.{role}", str(path), (f"{'actor' if role == 'ref' else role}.model_name_or_path",)
            )
    if _has_reward_model(config):
        yield ParsedField("models.reward", str(reward).split(",")[0], ("reward.model_name_or_path",))


def _has_reward_model(config: TrainerConfig) -> bool:
    model, function = config.text("reward.model_name_or_path"), config.text("reward.remote_url")
    return bool(model) and not function


def _algorithm_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    fields = {
        "gamma": "algo.advantage.gamma",
        "gae_lambda": "algo.advantage.lambd",
        "value_clip": "critic.value_clip",
        "temperature": "rollout.temperature",
        "weight_decay": "actor.adam.weight_decay",
        "max_grad_norm": "actor.max_norm",
        "entropy_coefficient": "actor.entropy_coef",
    }
    rates = {"actor_learning_rate": "actor.adam.lr", "critic_learning_rate": "critic.adam.lr"}
    fields |= {field: key for field, key in rates.items() if config.has(key)}
    yield from setup.settings(fields)
    yield from setup.sampling(top_p="rollout.top_p")
    yield from setup.overlong("reward.overlong_buffer_len", "reward.overlong_penalty_factor")
    yield from setup.adapter("ds.lora.rank", "ds.lora.alpha")
    key = "actor.eps_clip_low_high"
    low, high = config.pair(key) if config.has(key) else (config.number("actor.eps_clip"),) * 2
    for name, value in (("clip_ratio", low), ("clip_ratio_high", high)):
        yield from setup.setting(name, value, key if config.has(key) else "actor.eps_clip")
    key = "actor.loss_agg_mode"
    if loss_mean := LOSS_MEANS.get(config.value(key)):
        yield from setup.setting("loss_mean", loss_mean, key)


def _model_pool(config: TrainerConfig, model: str) -> tuple[int, int]:
    return config.integer(f"{model}.num_nodes"), config.integer(f"{model}.num_gpus_per_node")


def _pool_sizes(setup: TrainingSetup) -> dict[str, tuple[int, int]]:
    """The pools as (nodes, ranks per node), by the first model of each; engines with their own pool are `vllm`."""
    config, roles = setup.config, setup.graph.roles
    if config.value("train.colocate_all"):
        sizes = {"actor": _model_pool(config, "actor")}
    else:
        separate = ["actor", *(["critic"] if Role.CRITIC in roles else [])]
        separate += [] if config.value("train.colocate_actor_ref") or Role.REF not in roles else ["ref"]
        with_critic = config.value("train.colocate_critic_reward") and Role.CRITIC in roles
        separate += [] if with_critic or not _has_reward_model(config) else ["reward"]
        sizes = {model: _model_pool(config, model) for model in separate}
    if not config.value("train.colocate_all") or config.value("train.async_enable"):
        sizes["vllm"] = nodes_of_ranks(config.integer("vllm.num_engines") * config.integer("vllm.tensor_parallel_size"))
    return sizes


def _pools(setup: TrainingSetup) -> dict[str, str]:
    """The pool of each model, and of the engines."""
    sizes = _pool_sizes(setup)
    pools = dict(consecutive_pools((name, nodes * ranks) for name, (nodes, ranks) in sizes.items()))
    critic = pools.get("critic", pools["actor"])
    return {
        "actor": pools["actor"],
        "critic": critic,
        "ref": pools.get("ref", pools["actor"]),
        "reward": pools.get("reward", critic),
        "vllm": pools.get("vllm", pools["actor"]),
    }


def _placement_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    nodes, per_node = cluster_of(_pool_sizes(setup))
    yield ParsedField("cluster.nodes", nodes, ("actor.num_nodes", "train.colocate_all"))
    yield ParsedField("cluster.ranks_per_node", per_node, ("actor.num_gpus_per_node",))
    pools = _pools(setup)
    degrees = {"tp": config.integer("ds.tensor_parallel_size"), "cp": config.integer("ds.ring_attn_size")}
    recomputes = bool(config.value("actor.gradient_checkpointing_enable"))
    optimizer_sleeps = bool(config.value("ds.enable_sleep")) or bool(config.value("ds.adam_offload"))
    for model, stages in _STAGES.items():
        for stage in setup.stages(*stages):
            num_ranks = int(pools[model].partition(":")[2])
            keys = (f"{model}.num_nodes", f"{model}.num_gpus_per_node", "train.colocate_all")
            yield ParsedField(f"{stage}.pool", pools[model], keys)
            degree_keys = ("ds.tensor_parallel_size", "ds.ring_attn_size")
            yield ParsedField(f"{stage}.layout", str(layout_of(degrees, num_ranks)), degree_keys)
            yield _micro_batch_field(config, stage, degrees["cp"])
            if stage.endswith("train"):
                key = "actor.gradient_checkpointing_enable"
                yield ParsedField(f"{stage}.recompute", "full" if recomputes else "none", (key,))
                yield ParsedField(
                    f"{stage}.offload",
                    "optimizer" if optimizer_sleeps else "none",
                    ("ds.enable_sleep", "ds.adam_offload"),
                )
    for model in ("ref", "reward"):
        offload = "weights" if config.value(f"{model}.offload") else "none"
        for stage in setup.stages(*_STAGES[model]):
            yield ParsedField(f"{stage}.offload", offload, (f"{model}.offload",))


def _micro_batch_field(config: TrainerConfig, stage: str, cp: int) -> ParsedField:
    group = "train" if stage.endswith("train") else "rollout"
    if config.value("train.dynamic_batch_enable"):
        key = f"{group}.max_tokens_per_gpu"
        budget = config.integer_or(key, config.integer("train.max_tokens_per_gpu"))
        return ParsedField(f"{stage}.micro_batch_tokens", budget * cp, (key,))
    key = f"{group}.micro_batch_size"
    return ParsedField(f"{stage}.micro_batch_size", config.integer(key), (key,))


def _generation_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    yield ParsedField("actor_generate.pool", _pools(setup)["vllm"], ("vllm.num_engines", "train.colocate_all"))
    key = "vllm.tensor_parallel_size"
    yield ParsedField("actor_generate.tp", config.integer(key), (key,))
    yield ParsedField("actor_generate.pp", 1, (key,))
    key = "vllm.gpu_memory_utilization"
    yield ParsedField(MEMORY_SHARE, config.number(key), (key,))
