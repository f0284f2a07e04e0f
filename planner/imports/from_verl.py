"""Import of verl configurations: hydra overrides in a script, or a YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.planner.export.known_keys import known_keys
from meshwright.planner.export.to_verl import VERL
from meshwright.planner.imports.estimators import (
    GRPO_ESTIMATOR,
    LOSS_MEANS,
    MATHS,
    PPO_ESTIMATOR,
    REINFORCE_BASELINE_ESTIMATOR,
    REINFORCE_ESTIMATOR,
    RLOO_ESTIMATOR,
    USER_FUNCTION,
    Estimator,
    FunctionReward,
    TrainingSetup,
    estimator_of,
    single_sample_notes,
)
from meshwright.planner.imports.given_keys import TrainerConfig, read_overrides
from meshwright.planner.imports.said import (
    MEGATRON_SIZES,
    MEMORY_SHARE,
    ParsedConfig,
    ParsedField,
    cluster_of,
    consecutive_pools,
    layout_notes,
    layout_of,
)
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout

_A, _R, _RM = "actor_rollout_ref", "actor_rollout_ref.rollout", "reward.reward_model"
_ENGINES = {f"{_A}.actor": ("actor_logprob", "actor_train"), "critic": ("critic_value", "critic_train")}
_DEGREES = {**MEGATRON_SIZES, "vpp": "virtual_pipeline_model_parallel_size"}

_STRATEGY = f"{_A}.actor.strategy"
_ESTIMATOR = "algorithm.adv_estimator"
_ESTIMATORS: Mapping[str, Estimator] = {
    "gae": PPO_ESTIMATOR,
    "grpo": GRPO_ESTIMATOR,
    "grpo_vectorized": GRPO_ESTIMATOR,
    "rloo": RLOO_ESTIMATOR,
    "rloo_vectorized": RLOO_ESTIMATOR,
    "reinforce_plus_plus": REINFORCE_ESTIMATOR,
    "reinforce_plus_plus_baseline": REINFORCE_BASELINE_ESTIMATOR,
}

_ENGINE_NAMES = (VERL.engine, *VERL.other_engines)


def read_verl(path: Path, changed: Mapping[str, Any] | None = None) -> ParsedConfig:
    """Read the configuration in a file; `changed` are keys with values that override its own.

    Raises BadInput naming a key that a job cannot express.
    """
    config = read_overrides(path, known_keys("verl"), changed=changed)
    setup = _training_setup(config)
    is_megatron = _is_megatron(config)
    notes: list[str] = []
    if not is_megatron:
        notes.append(
            "model_engine is not megatron: FSDP sharding is not modelled, so layouts and micro-batches are free."
        )
    if config.value("trainer.v1.trainer_mode") == "colocate_async":
        notes.append("trainer.v1.trainer_mode=colocate_async is read as sync: what it overlaps is not modelled.")
    notes += [*setup.notes(), *_loss_notes(config), *single_sample_notes(config, _ESTIMATOR, _ESTIMATORS, f"{_R}.n")]
    fields = [*_workload_fields(setup), *_model_fields(setup), *_algorithm_fields(setup)]
    fields += [*_pool_fields(setup), *_generation_fields(config)]
    if is_megatron:
        notes += _expert_notes(setup)
        fields += [*_training_fields(setup), *_reference_fields(setup)]
        notes += _free_micro_batch_notes(setup, fields)
    steps_ahead = int(config.value("trainer.v1.trainer_mode") == "separate_async")
    return setup.parsed("verl", fields, steps_ahead=steps_ahead, notes=notes, unused=_unused_keys(setup))


def _unused_keys(setup: TrainingSetup) -> Iterator[str]:
    """Patterns of keys that other keys make unused."""
    config = setup.config
    if not setup.has_ref:
        yield f"{_A}.ref.*"
    if not setup.stages("critic_train"):
        yield "critic.*"
    if setup.kl_in_loss is None:
        yield f"{_A}.actor.kl_loss_coef"
    if setup.kl_in_reward is None:
        yield "algorithm.kl_ctrl.*"
    if not _has_reward_model(config):
        yield f"{_RM}.*"
    dynamic = {f"{_A}.actor": "use_dynamic_bsz", _R: "log_prob_use_dynamic_bsz", "critic": "use_dynamic_bsz"}
    for prefix, key in dynamic.items():
        unused = "*micro_batch_size*" if config.value(f"{prefix}.{key}") else "*max_token_len_per_gpu"
        yield f"{prefix}.{unused}"
    if config.value(f"{_A}.ref.log_prob_use_dynamic_bsz"):
        yield f"{_A}.ref.*micro_batch_size*"


def _is_megatron(config: TrainerConfig) -> bool:
    """True if Megatron trains: by the engine's name, the configuration's name, or keys that only Megatron has."""
    names = (config.value("model_engine"), config.value(_STRATEGY) if config.has(_STRATEGY) else None)
    named = any(word.startswith("--config-name") and "megatron" in word for word in config.command)
    return "megatron" in names or named or any(".megatron." in key for key in config.values)


def _training_setup(config: TrainerConfig) -> TrainingSetup:
    """The algorithm by verl's own rules (trainer/ppo/utils.py): a KL penalty needs a reference model.

    Raises BadInput for distillation, and for PPO without a critic.
    """
    if config.value("distillation.enabled"):
        raise BadInput(
            "distillation.enabled=True: on-policy distillation of a configuration is not read; write its job by hand, "
            "with algorithm: distill and its teachers."
        )
    estimator = estimator_of(config, _ESTIMATOR, _ESTIMATORS, single=f"{_R}.n")
    if estimator is PPO_ESTIMATOR and config.value("critic.enable") is False:
        raise BadInput(f"critic.enable=False: {_ESTIMATOR}=gae trains a critic; enable it or choose another estimator.")
    in_loss, in_reward = config.value(f"{_A}.actor.use_kl_loss"), config.value("algorithm.use_kl_in_reward")
    return TrainingSetup(
        config=config,
        key=_ESTIMATOR,
        estimator=estimator,
        has_ref=bool(in_loss or in_reward),
        kl_in_loss=f"{_A}.actor.kl_loss_coef" if in_loss else None,
        kl_in_reward="algorithm.kl_ctrl.kl_coef" if in_reward else None,
        reward=None if _has_reward_model(config) else _function_reward(config),
    )


def _function_reward(config: TrainerConfig) -> FunctionReward:
    """The reward of the job: a user's function, or verl's built-in checks of answers."""
    keys = ("reward.custom_reward_function.path", "custom_reward_function.path")
    function_key = next((key for key in keys if config.text(key)), None)
    return (
        FunctionReward(USER_FUNCTION, (function_key,))
        if function_key
        else FunctionReward(MATHS, ("reward.reward_manager.name",))
    )


def _loss_notes(config: TrainerConfig) -> Iterator[str]:
    mode, key = config.value(f"{_A}.actor.policy_loss.loss_mode"), f"{_A}.actor.loss_agg_mode"
    if mode != "vanilla":
        yield f"{_A}.actor.policy_loss.loss_mode={mode}: a job clips each token's ratio as PPO, which costs as much."
    if config.value(key) not in LOSS_MEANS:
        yield f"{key}={config.value(key)} is not a loss aggregation that a job can have; the job keeps its default."


def _workload_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    batch, samples = config.integer("data.train_batch_size"), config.integer(f"{_R}.n")
    yield ParsedField("workload.batch_size", batch * samples, ("data.train_batch_size", f"{_R}.n"))
    yield from setup.group(samples, f"{_R}.n")
    yield ParsedField("workload.prompt", config.integer("data.max_prompt_length"), ("data.max_prompt_length",))
    yield ParsedField("workload.response", config.integer("data.max_response_length"), ("data.max_response_length",))
    key = f"{_A}.actor.ppo_mini_batch_size"
    yield ParsedField("workload.num_minibatches", max(1, batch // config.integer(key)), (key,))
    key = f"{_A}.actor.ppo_epochs"
    yield ParsedField("workload.num_epochs", config.integer(key), (key,))


def _model_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    for role, key in (("actor", f"{_A}.model.path"), ("ref", f"{_A}.model.path"), ("critic", "critic.model.path")):
        if role in setup.graph.roles:
            yield ParsedField(f"models.{role}", str(config.text(key)), (key,))
    if _has_reward_model(config):
        key = f"{_RM}.model_path" if config.value(f"{_RM}.model_path") else "reward_model.model.path"
        yield ParsedField("models.reward", str(config.text(key)), (key,))


def _algorithm_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    fields = {
        "gamma": "algorithm.gamma",
        "gae_lambda": "algorithm.lam",
        "actor_learning_rate": f"{_A}.actor.optim.lr",
        "critic_learning_rate": "critic.optim.lr",
        "clip_ratio": f"{_A}.actor.clip_ratio_low",
        "clip_ratio_high": f"{_A}.actor.clip_ratio_high",
        "value_clip": "critic.cliprange_value",
        "entropy_coefficient": f"{_A}.actor.entropy_coeff",
        "temperature": f"{_R}.temperature",
        "weight_decay": f"{_A}.actor.optim.weight_decay",
        "max_grad_norm": f"{_A}.actor.optim.clip_grad",
    }
    yield from setup.settings(fields)
    yield from setup.sampling(top_p=f"{_R}.top_p", top_k=f"{_R}.top_k")
    for role, optimizer in (("actor", f"{_A}.actor.optim"), ("critic", "critic.optim")):
        yield from setup.warmup(role, f"{optimizer}.lr_warmup_steps")
    yield from _overlong_fields(setup)
    for prefix in (f"{_A}.model.lora.rank", f"{_A}.model.lora_rank"):
        if config.value(prefix):
            yield from setup.adapter(prefix, prefix.removesuffix("rank") + "alpha")
            break
    if config.value(f"{_R}.quantization") == "fp8":
        yield ParsedField("generation_weights", "fp8", (f"{_R}.quantization",))
    key = "algorithm.norm_adv_by_std_in_grpo"
    yield from setup.setting("normalise_by_std", bool(config.value(key)), key)
    key = f"{_A}.actor.loss_agg_mode"
    if loss_mean := LOSS_MEANS.get(config.value(key)):
        yield from setup.setting("loss_mean", loss_mean, key)


def _overlong_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    """DAPO's penalty of overlong responses, under its present or its former key."""
    for manager in ("reward.reward_kwargs", "reward_model.reward_kwargs"):
        prefix = f"{manager}.overlong_buffer_cfg"
        if setup.config.value(f"{prefix}.enable"):
            yield from setup.overlong(f"{prefix}.len", f"{prefix}.penalty_factor")


def _has_reward_model(config: TrainerConfig) -> bool:
    """True if a reward model scores, under its present or its former key."""
    return bool(config.value(f"{_RM}.enable") or config.value("reward_model.enable"))


def _pool_sizes(config: TrainerConfig) -> dict[str, tuple[int, int]]:
    """The pools by name, as (nodes, ranks per node)."""
    shares = {"train": (config.integer("trainer.nnodes"), config.integer("trainer.n_gpus_per_node"))}
    if config.value("trainer.v1.trainer_mode") == "separate_async":
        shares["generate"] = (config.integer(f"{_R}.nnodes"), config.integer(f"{_R}.n_gpus_per_node"))
    if _has_reward_model(config) and config.value(f"{_RM}.enable_resource_pool"):
        shares["score"] = (config.integer(f"{_RM}.nnodes"), config.integer(f"{_RM}.n_gpus_per_node"))
    return shares


def _pool_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    shares = _pool_sizes(config)
    keys = ("trainer.nnodes", "trainer.n_gpus_per_node")
    nodes, per_node = cluster_of(shares)
    yield ParsedField("cluster.nodes", nodes, keys)
    yield ParsedField("cluster.ranks_per_node", per_node, keys)
    pools = dict(consecutive_pools((name, nodes * ranks) for name, (nodes, ranks) in shares.items()))
    pool_names = {"actor_generate": "generate", "reward_score": "score"}
    for stage in setup.graph.by_name:
        pool = pools.get(pool_names.get(stage, "train"), pools["train"])
        yield ParsedField(f"{stage}.pool", pool, keys)


def _generation_fields(config: TrainerConfig) -> Iterator[ParsedField]:
    if config.value(f"{_R}.name") in _ENGINE_NAMES:
        yield ParsedField("engine", config.value(f"{_R}.name"), (f"{_R}.name",))
    shares = _pool_sizes(config)
    nodes, ranks = shares.get("generate", shares["train"])
    tp, key = config.integer(f"{_R}.tensor_model_parallel_size"), f"{_R}.tensor_model_parallel_size"
    layout_of({"tp": tp}, nodes * ranks)
    yield ParsedField("actor_generate.tp", tp, (key,))
    key = f"{_R}.pipeline_model_parallel_size"
    yield ParsedField("actor_generate.pp", config.integer_or(key, 1), (key,))
    yield ParsedField("actor_generate.generation_slots", config.integer(f"{_R}.max_num_seqs"), (f"{_R}.max_num_seqs",))
    yield ParsedField(MEMORY_SHARE, config.number(f"{_R}.gpu_memory_utilization"), (f"{_R}.gpu_memory_utilization",))
    if _has_reward_model(config):
        key = f"{_RM}.rollout.tensor_model_parallel_size"
        yield ParsedField("reward_score.tp", config.integer(key), (key,))
        yield ParsedField("reward_score.pp", 1, (f"{_RM}.rollout.pipeline_model_parallel_size",))


def _degrees(config: TrainerConfig, engine: str) -> dict[str, int]:
    keys = {axis: f"{engine}.megatron.{name}" for axis, name in _DEGREES.items()}
    return {
        axis: int(axis != "etp") if config.value(key) is None else config.integer(key) for axis, key in keys.items()
    }


def _layout(config: TrainerConfig, engine: str) -> Layout:
    nodes, ranks = _pool_sizes(config)["train"]
    return layout_of(
        _degrees(config, engine), nodes * ranks, sp=bool(config.value(f"{engine}.megatron.sequence_parallel"))
    )


def _expert_notes(setup: TrainingSetup) -> Iterator[str]:
    engines = [engine for engine, stages in _ENGINES.items() if setup.stages(*stages)]
    for engine in (*engines, *([f"{_A}.ref"] if setup.stages("ref_logprob") else [])):
        degrees, layout = _degrees(setup.config, engine), _layout(setup.config, engine)
        yield from layout_notes(f"{engine}.megatron.{_DEGREES['ep']}", degrees, layout)


def _training_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    engines = {engine: stages for engine, stages in _ENGINES.items() if setup.stages(*stages)}
    for engine, stages in engines.items():
        layout, prefix = _layout(config, engine), f"{engine}.megatron"
        keys = tuple(f"{prefix}.{name}" for name in _DEGREES.values())
        for stage, key in zip(stages, _micro_batch_keys(config, engine), strict=True):
            stage_layout = layout if stage.endswith("train") else Layout(**{**vars(layout), "vpp": 1})
            yield ParsedField(f"{stage}.layout", str(stage_layout), keys)
            yield from _micro_batch_fields(config, stage, key, layout.cp)
        key = f"{prefix}.override_transformer_config.recompute_granularity"
        yield ParsedField(f"{stages[1]}.recompute", config.value(key) or "none", (key,))
        offloads = (f"{prefix}.optimizer_offload", f"{engine}.optim.override_optimizer_config.optimizer_cpu_offload")
        offloaded = [bool(config.value(key)) for key in offloads]
        yield ParsedField(f"{stages[1]}.offload", "optimizer" if any(offloaded) else "none", offloads)


def _reference_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    if not setup.stages("ref_logprob"):
        return
    layout, prefix = _layout(config, f"{_A}.ref"), f"{_A}.ref.megatron"
    keys = tuple(f"{prefix}.{name}" for name in _DEGREES.values())
    yield ParsedField("ref_logprob.layout", str(Layout(**{**vars(layout), "vpp": 1})), keys)
    key = f"{_A}.ref.log_prob_{_micro_batch_key(config.value(f'{_A}.ref.log_prob_use_dynamic_bsz'))}"
    yield from _micro_batch_fields(config, "ref_logprob", key, layout.cp)
    key = f"{prefix}.param_offload"
    yield ParsedField("ref_logprob.offload", "weights" if config.value(key) else "none", (key,))


def _micro_batch_keys(config: TrainerConfig, engine: str) -> tuple[str, str]:
    """The keys of the micro-batch rows, or tokens, of the forward pass and of training."""
    name = _micro_batch_key(config.value(f"{engine}.use_dynamic_bsz"))
    if engine == "critic":
        forward = "forward_max_token_len_per_gpu" if config.value("critic.use_dynamic_bsz") else f"ppo_{name}"
        return f"critic.{forward}", f"critic.ppo_{name}"
    forward = _micro_batch_key(config.value(f"{_R}.log_prob_use_dynamic_bsz"))
    return f"{_R}.log_prob_{forward}", f"{engine}.ppo_{name}"


def _micro_batch_key(is_dynamic: object) -> str:
    return "max_token_len_per_gpu" if is_dynamic else "micro_batch_size_per_gpu"


def _micro_batch_fields(config: TrainerConfig, stage: str, key: str, cp: int) -> Iterator[ParsedField]:
    """The micro-batch of a stage; nothing where the key has no value, since verl then uses another key, for all ranks
    together."""
    if config.value(key) is None:
        return
    if "token" in key:
        yield ParsedField(f"{stage}.micro_batch_tokens", config.integer(key) * cp, (key,))
    else:
        yield ParsedField(f"{stage}.micro_batch_size", config.integer(key), (key,))


def _free_micro_batch_notes(setup: TrainingSetup, fields: Iterable[ParsedField]) -> Iterator[str]:
    """A sentence for each stage whose micro-batch no key gives."""
    known = {field.what for field in fields}
    for stages in (*_ENGINES.values(), ("ref_logprob",)):
        for stage in setup.stages(*stages):
            if not {f"{stage}.micro_batch_size", f"{stage}.micro_batch_tokens"} & known:
                yield f"{stage}: no key gives the rows or tokens of its micro-batch on a rank, so they stay free."
