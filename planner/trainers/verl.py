"""verl: export of plans to its configuration, and import from it.

Megatron-core trains, vLLM generates and scores. Actor, reference and critic share all ranks of the trainer, each with
its own degrees; log-probabilities and values are computed with the degrees of the model's training. Generation shares
these ranks (`sync`) or has its own pool and works one batch ahead (`separate_async`,
trainer/ppo/v1/trainer_separate_async.py). An engine has no pipeline parallelism (workers/config/rollout.py). A reward
model may have its own pool, and must with `separate_async`. A configuration is a YAML file, or hydra overrides in a
script.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.planner.job.algorithm_settings import CriticFreeSettings, Reinforce
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.trainers.config_keys import TrainerConfig, known_keys, read_overrides
from meshwright.planner.trainers.deployment_modes import (
    ONE_AHEAD,
    DeploymentMode,
    all_ranks,
    equal_choices,
    on_pool,
    pool_divisions,
    ppo_stages,
    present_stages,
    tp_only_engines,
)
from meshwright.planner.trainers.export_settings import (
    HOOK_FILE,
    engine_memory_share,
    megatron_degrees,
    overrides,
    pool_nodes,
    prompts_of_mini_batch,
    reward_hook,
    script,
    token_budget,
    token_budget_origin,
    uneven_stage_layers,
)
from meshwright.planner.trainers.parsed_config import (
    GRPO_ESTIMATOR,
    LOSS_MEANS,
    MATHS,
    MEGATRON_SIZES,
    MEMORY_SHARE,
    PPO_ESTIMATOR,
    REINFORCE_BASELINE_ESTIMATOR,
    REINFORCE_ESTIMATOR,
    RLOO_ESTIMATOR,
    USER_FUNCTION,
    Estimator,
    FunctionReward,
    ParsedConfig,
    ParsedField,
    TrainingSetup,
    cluster_of,
    consecutive_pools,
    estimator_of,
    layout_notes,
    layout_of,
    single_sample_notes,
)
from meshwright.planner.trainers.trainer import ExportInput, KeyValue, OtherTrainer
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute
from meshwright.profiles.stages import GENERATE, Role

_A, _R = "actor_rollout_ref", "actor_rollout_ref.rollout"
_RM = "reward.reward_model"
_CORRECTION = "algorithm.rollout_correction"
_MODEL_PREFIXES = {"actor_train": f"{_A}.actor", "critic_train": "critic", "ref_logprob": f"{_A}.ref"}
"""The stage whose layout gives a model's parallel degrees, and verl's prefix for the keys of these degrees."""
_ESTIMATOR_NAMES: Mapping[Algorithm, str] = {
    "ppo": "gae",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce++": "reinforce_plus_plus",
}
_LOSS_MEAN_NAMES = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
_SETTING_KEYS = {
    "gamma": "algorithm.gamma",
    "gae_lambda": "algorithm.lam",
    "actor_learning_rate": f"{_A}.actor.optim.lr",
    "critic_learning_rate": "critic.optim.lr",
    "value_clip": "critic.cliprange_value",
    "entropy_coefficient": f"{_A}.actor.entropy_coeff",
    "temperature": f"{_R}.temperature",
    "normalise_by_std": "algorithm.norm_adv_by_std_in_grpo",
}


def deployment_modes(facts: Facts) -> Iterator[DeploymentMode]:
    """Yield the ways in which verl can place the stages: synchronously on all ranks, with or without a separate reward
    pool; or with generation one batch ahead on its own pool."""
    all_pool, stages = all_ranks(facts.cluster), ppo_stages()
    stages_without_reward = tuple(name for name in stages if name != "reward_score")
    yield _mode("sync", on_pool(all_pool, (GENERATE, *stages)))
    if facts.rewards:
        for train, generate in pool_divisions(facts.cluster, 2):
            pool_pins = (*on_pool(train, stages), *on_pool(generate, (GENERATE,)))
            yield _mode(f"separate_async, {generate} generates", pool_pins, steps_ahead=ONE_AHEAD)
        return
    for train, score in pool_divisions(facts.cluster, 2):
        yield _mode(
            f"sync, rewards on {score}",
            (*on_pool(train, (GENERATE, *stages_without_reward)), *on_pool(score, ("reward_score",))),
        )
    for train, generate, score in pool_divisions(facts.cluster, 3):
        pool_pins = (
            *on_pool(train, stages_without_reward),
            *on_pool(generate, (GENERATE,)),
            *on_pool(score, ("reward_score",)),
        )
        yield _mode(f"separate_async, {generate} generates", pool_pins, steps_ahead=ONE_AHEAD)


def _mode(name: str, pool_pins: tuple[str, ...], *, steps_ahead: int = 0) -> DeploymentMode:
    return DeploymentMode(
        name=name,
        pins=(*pool_pins, *tp_only_engines()),
        equal_choices=(
            *equal_choices("layout", "actor_train", ("actor_logprob",)),
            *equal_choices("layout", "critic_train", ("critic_value",)),
            *equal_choices("micro_batch_size", "critic_train", ("critic_value",)),
            *equal_choices("micro_batch_tokens", "critic_train", ("critic_value",)),
        ),
        steps_ahead=steps_ahead,
    )


def settings(origin: ExportInput) -> Iterator[KeyValue]:
    """The overrides of verl's default configuration that express a plan."""
    plan = origin.plan
    yield KeyValue("model_engine", "megatron", "rule: degrees of pipeline and experts are Megatron's")
    yield from _batch_settings(plan)
    yield from _pool_settings(plan)
    for stage in present_stages(plan, _MODEL_PREFIXES):
        yield from _degree_settings(plan, stage)
    yield from _micro_batch_settings(plan)
    yield from _generation_settings(plan)
    yield from _fp8_settings(origin)
    yield from _reward_settings(origin)
    yield from _algorithm_settings(origin)


def _batch_settings(plan: Plan) -> Iterator[KeyValue]:
    workload = plan.facts.workload
    yield KeyValue("data.train_batch_size", workload.num_prompts, "facts.workload: batch_size / group_size")
    yield KeyValue("data.max_prompt_length", workload.prompt.max, "facts.workload.prompt.max")
    yield KeyValue("data.max_response_length", workload.response.max, "facts.workload.response.max")
    for model in present_stages(plan, {f"{_A}.actor": "actor_train", "critic": "critic_train"}):
        yield KeyValue(f"{model}.ppo_mini_batch_size", prompts_of_mini_batch(plan), "facts.workload.num_minibatches")
        yield KeyValue(f"{model}.ppo_epochs", workload.num_epochs, "facts.workload.num_epochs")


def _pool_settings(plan: Plan) -> Iterator[KeyValue]:
    nodes, per_node = pool_nodes(plan, "actor_train")
    yield KeyValue("trainer.nnodes", nodes, "pools: the pool of actor_train")
    yield KeyValue("trainer.n_gpus_per_node", per_node, "pools: the pool of actor_train")
    if not plan.ahead[GENERATE]:
        yield KeyValue("trainer.v1.trainer_mode", "sync", "placements.actor_generate.steps_ahead")
        return
    nodes, per_node = pool_nodes(plan, GENERATE)
    steps = plan.facts.workload.num_minibatches
    yield KeyValue("trainer.v1.trainer_mode", "separate_async", "placements.actor_generate.steps_ahead")
    yield KeyValue(f"{_A}.hybrid_engine", False, "pools: no engine on the ranks that train")
    yield KeyValue(f"{_R}.nnodes", nodes, "pools: the pool of actor_generate")
    yield KeyValue(f"{_R}.n_gpus_per_node", per_node, "pools: the pool of actor_generate")
    yield KeyValue(
        "trainer.v1.separate_async.parameter_sync_step", steps, "rule: batch = parameter_sync_step x mini-batch"
    )
    yield KeyValue("trainer.v1.sampler.max_off_policy_threshold", plan.ahead[GENERATE] + 1, "staleness")
    yield KeyValue(f"{_R}.checkpoint_engine.backend", "nccl", "rule: separate_async excludes naive")


def _degree_settings(plan: Plan, stage: str) -> Iterator[KeyValue]:
    schedule, prefix = plan.placement(stage).schedule, f"{_MODEL_PREFIXES[stage]}.megatron"
    field = f"placements.{stage}.layout"
    yield from megatron_degrees(plan, stage, prefix)
    if ends := uneven_stage_layers(plan, stage):
        for name, number in zip(("first", "last"), ends, strict=True):
            key = f"+{prefix}.override_transformer_config.num_layers_in_{name}_pipeline_stage"
            yield KeyValue(key, number, f"{field}.pp")
    offloads = {Offload.OPTIMIZER: "optimizer_offload", Offload.WEIGHTS: "param_offload"}
    if schedule.offload in offloads:
        yield KeyValue(f"{prefix}.{offloads[schedule.offload]}", True, f"placements.{stage}.schedule.offload")
    if schedule.recompute is not Recompute.NONE:
        yield from _recompute_settings(prefix, stage, schedule.recompute)


def _recompute_settings(prefix: str, stage: str, recompute: Recompute) -> Iterator[KeyValue]:
    override, field = f"{prefix}.override_transformer_config", f"placements.{stage}.schedule.recompute"
    yield KeyValue(f"{override}.recompute_granularity", recompute.value, field)
    if recompute is Recompute.FULL:
        yield KeyValue(f"{override}.recompute_method", "uniform", field)
        yield KeyValue(f"{override}.recompute_num_layers", 1, field)


def _micro_batch_settings(plan: Plan) -> Iterator[KeyValue]:
    """Token budgets of the micro-batches.

    verl does not pass the critic's number of rows on to its worker (trainer_base.py), so the critic gets token budgets
    too, and its forward passes get that of its training.
    """
    budgets = {
        f"{_A}.actor.ppo_max_token_len_per_gpu": "actor_train",
        f"{_R}.log_prob_max_token_len_per_gpu": "actor_logprob",
        f"{_A}.ref.log_prob_max_token_len_per_gpu": "ref_logprob",
        "critic.ppo_max_token_len_per_gpu": "critic_train",
        "critic.forward_max_token_len_per_gpu": "critic_train",
    }
    yield KeyValue(f"{_A}.actor.use_dynamic_bsz", True, "rule: micro-batches are packed")
    if "critic_train" in plan.graph.by_name:
        yield KeyValue("critic.use_dynamic_bsz", True, "rule: verl does not pass the critic's rows to its worker")
    for key, stage in present_stages(plan, budgets).items():
        yield KeyValue(key, token_budget(plan, stage), token_budget_origin(plan, stage))


def _generation_settings(plan: Plan) -> Iterator[KeyValue]:
    placement = plan.placement(GENERATE)
    layout, field = placement.layout, "placements.actor_generate.layout"
    yield KeyValue(f"{_R}.name", plan.facts.engine, "facts.engine")
    yield KeyValue(f"{_R}.n", plan.facts.workload.group_size, "facts.workload.group_size")
    yield KeyValue(f"{_R}.tensor_model_parallel_size", layout.tp, f"{field}.tp")
    if layout.ep > 1:
        replicas = layout.expert_replicas
        yield KeyValue(f"{_R}.data_parallel_size", replicas, f"{field}.ep")
        yield KeyValue(f"{_R}.expert_parallel_size", replicas * layout.tp, "rule: expert = tensor x data of an engine")
    slots = placement.schedule.generation_slots
    yield KeyValue(f"{_R}.max_num_seqs", slots, "placements.actor_generate.schedule.generation_slots")
    share = engine_memory_share(plan)
    yield KeyValue(f"{_R}.gpu_memory_utilization", share, "placements.actor_generate: its weights and cache")
    yield KeyValue(f"{_R}.max_model_len", plan.facts.workload.max_tokens, "facts.workload: prompt.max + response.max")


def _fp8_settings(origin: ExportInput) -> Iterator[KeyValue]:
    """FP8 generation samples from a different policy than the trained one, so each token gets an importance weight."""
    if origin.plan.facts.generation_weights:
        yield KeyValue(f"{_R}.quantization", "fp8", "facts.generation_weights")
        yield KeyValue(f"{_CORRECTION}.rollout_is", "token", "rule: tokens sampled in FP8 get importance weights")
        yield from origin.setting("importance_cap", f"{_CORRECTION}.rollout_is_threshold")


def _reward_settings(origin: ExportInput) -> Iterator[KeyValue]:
    plan = origin.plan
    if origin.reward_function is not None:
        yield KeyValue(f"{_RM}.enable", False, "job: rewards")
        yield KeyValue("reward.custom_reward_function.path", HOOK_FILE, "job: rewards.function")
        yield KeyValue("reward.custom_reward_function.name", "compute_score", f"rule: the function in {HOOK_FILE}")
        return
    score, train = plan.choice("reward_score", "pool"), plan.choice("actor_train", "pool")
    yield KeyValue(f"{_RM}.enable", True, "placements.reward_score")
    yield KeyValue(f"{_RM}.model_path", origin.path(Role.REWARD), "job: models.reward.path")
    yield KeyValue(f"{_RM}.enable_resource_pool", score != train, "pools: the pool of reward_score")
    if score != train:
        nodes, per_node = pool_nodes(plan, "reward_score")
        yield KeyValue(f"{_RM}.nnodes", nodes, "pools: the pool of reward_score")
        yield KeyValue(f"{_RM}.n_gpus_per_node", per_node, "pools: the pool of reward_score")
    yield KeyValue(f"{_RM}.rollout.name", "vllm", "rule: the engine that is assumed")
    layout = plan.placement("reward_score").layout
    yield KeyValue(f"{_RM}.rollout.tensor_model_parallel_size", layout.tp, "placements.reward_score.layout.tp")


def _algorithm_settings(origin: ExportInput) -> Iterator[KeyValue]:
    algorithm, roles = origin.algorithm, origin.plan.graph.roles
    yield KeyValue(f"{_A}.model.path", origin.path(Role.ACTOR), "job: models.actor.path")
    if Role.CRITIC in roles:
        yield KeyValue("critic.model.path", origin.path(Role.CRITIC), "job: models.critic.path")
    yield KeyValue("critic.enable", Role.CRITIC in roles, "job: algorithm")
    estimator = "reinforce_plus_plus_baseline" if _has_group_baseline(origin) else _ESTIMATOR_NAMES[algorithm]
    yield KeyValue("algorithm.adv_estimator", estimator, "job: algorithm")
    in_loss = algorithm == "grpo"
    yield KeyValue("algorithm.use_kl_in_reward", Role.REF in roles and not in_loss, "job: algorithm and models.ref")
    yield KeyValue(f"{_A}.actor.use_kl_loss", Role.REF in roles and in_loss, "job: algorithm and models.ref")
    if Role.REF in roles:
        key = f"{_A}.actor.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"
        yield from origin.setting("kl_coefficient", key)
    yield from origin.settings_by_key(_SETTING_KEYS)
    low, high = origin.settings.clip_range
    yield KeyValue(f"{_A}.actor.clip_ratio_low", round(1 - low, 9), "job: clip_ratio")
    yield KeyValue(f"{_A}.actor.clip_ratio_high", round(high - 1, 9), "job: clip_ratio_high, or clip_ratio")
    if isinstance(origin.settings, CriticFreeSettings):
        aggregation = _LOSS_MEAN_NAMES[origin.settings.loss_mean]
        yield KeyValue(f"{_A}.actor.loss_agg_mode", aggregation, "job: loss_mean")


def _has_group_baseline(origin: ExportInput) -> bool:
    return isinstance(origin.settings, Reinforce) and origin.settings.group_baseline


def _files(origin: ExportInput, settings: Sequence[KeyValue]) -> Mapping[str, str]:
    head = "Runs verl with this plan. Give data.train_files and data.val_files as arguments of this script."
    command = script(head, "python3 -m verl.trainer.main_ppo", overrides(settings))
    return {"run.sh": command, **reward_hook("verl", origin)}


VERL = OtherTrainer(
    name="verl",
    key_file="verl",
    algorithms=tuple(_ESTIMATOR_NAMES),
    engine="vllm",
    other_engines=("sglang",),
    supports_fp8=True,
    modes=deployment_modes,
    settings=settings,
    files=_files,
    remarks=(
        "a plan names no data: set data.train_files and data.val_files yourself.",
        "log-probabilities and values are computed with the degrees of their model's training.",
    ),
)


_MODEL_STAGES = {f"{_A}.actor": ("actor_logprob", "actor_train"), "critic": ("critic_value", "critic_train")}
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
            "model_engine is not megatron: FSDP sharding is not modelled, so the search chooses layouts and "
            "micro-batches."
        )
    if config.value("trainer.v1.trainer_mode") == "colocate_async":
        notes.append("trainer.v1.trainer_mode=colocate_async is read as sync: what it overlaps is not modelled.")
    notes += [
        *setup.notes(),
        *_loss_notes(config),
        *single_sample_notes(config, _ESTIMATOR, _ESTIMATORS, f"{_R}.n"),
    ]
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
    dynamic = {
        f"{_A}.actor": "use_dynamic_bsz",
        _R: "log_prob_use_dynamic_bsz",
        "critic": "use_dynamic_bsz",
    }
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
    for role, key in (
        ("actor", f"{_A}.model.path"),
        ("ref", f"{_A}.model.path"),
        ("critic", "critic.model.path"),
    ):
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
    """DAPO's penalty for overlong responses, under its present or its former key."""
    for manager in ("reward.reward_kwargs", "reward_model.reward_kwargs"):
        prefix = f"{manager}.overlong_buffer_cfg"
        if setup.config.value(f"{prefix}.enable"):
            yield from setup.overlong(f"{prefix}.len", f"{prefix}.penalty_factor")


def _has_reward_model(config: TrainerConfig) -> bool:
    """True if a reward model scores, under its present or its former key."""
    return bool(config.value(f"{_RM}.enable") or config.value("reward_model.enable"))


def _pool_sizes(config: TrainerConfig) -> dict[str, tuple[int, int]]:
    """The pools by name, as (nodes, ranks per node)."""
    sizes = {"train": (config.integer("trainer.nnodes"), config.integer("trainer.n_gpus_per_node"))}
    if config.value("trainer.v1.trainer_mode") == "separate_async":
        sizes["generate"] = (
            config.integer(f"{_R}.nnodes"),
            config.integer(f"{_R}.n_gpus_per_node"),
        )
    if _has_reward_model(config) and config.value(f"{_RM}.enable_resource_pool"):
        sizes["score"] = (
            config.integer(f"{_RM}.nnodes"),
            config.integer(f"{_RM}.n_gpus_per_node"),
        )
    return sizes


def _pool_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    sizes = _pool_sizes(config)
    keys = ("trainer.nnodes", "trainer.n_gpus_per_node")
    nodes, per_node = cluster_of(sizes)
    yield ParsedField("cluster.nodes", nodes, keys)
    yield ParsedField("cluster.ranks_per_node", per_node, keys)
    pools = dict(consecutive_pools((name, nodes * ranks) for name, (nodes, ranks) in sizes.items()))
    pool_names = {"actor_generate": "generate", "reward_score": "score"}
    for stage in setup.graph.by_name:
        pool = pools.get(pool_names.get(stage, "train"), pools["train"])
        yield ParsedField(f"{stage}.pool", pool, keys)


def _generation_fields(config: TrainerConfig) -> Iterator[ParsedField]:
    if config.value(f"{_R}.name") in _ENGINE_NAMES:
        yield ParsedField("engine", config.value(f"{_R}.name"), (f"{_R}.name",))
    sizes = _pool_sizes(config)
    nodes, ranks = sizes.get("generate", sizes["train"])
    tp, key = config.integer(f"{_R}.tensor_model_parallel_size"), f"{_R}.tensor_model_parallel_size"
    layout_of({"tp": tp}, nodes * ranks)
    yield ParsedField("actor_generate.tp", tp, (key,))
    key = f"{_R}.pipeline_model_parallel_size"
    yield ParsedField("actor_generate.pp", config.integer_or(key, 1), (key,))
    yield ParsedField(
        "actor_generate.generation_slots",
        config.integer(f"{_R}.max_num_seqs"),
        (f"{_R}.max_num_seqs",),
    )
    yield ParsedField(
        MEMORY_SHARE,
        config.number(f"{_R}.gpu_memory_utilization"),
        (f"{_R}.gpu_memory_utilization",),
    )
    if _has_reward_model(config):
        key = f"{_RM}.rollout.tensor_model_parallel_size"
        yield ParsedField("reward_score.tp", config.integer(key), (key,))
        yield ParsedField("reward_score.pp", 1, (f"{_RM}.rollout.pipeline_model_parallel_size",))


def _degrees(config: TrainerConfig, model: str) -> dict[str, int]:
    keys = {axis: f"{model}.megatron.{name}" for axis, name in _DEGREES.items()}
    return {
        axis: int(axis != "etp") if config.value(key) is None else config.integer(key) for axis, key in keys.items()
    }


def _layout(config: TrainerConfig, model: str) -> Layout:
    nodes, ranks = _pool_sizes(config)["train"]
    return layout_of(
        _degrees(config, model), nodes * ranks, sp=bool(config.value(f"{model}.megatron.sequence_parallel"))
    )


def _expert_notes(setup: TrainingSetup) -> Iterator[str]:
    models = [model for model, stages in _MODEL_STAGES.items() if setup.stages(*stages)]
    for model in (*models, *([f"{_A}.ref"] if setup.stages("ref_logprob") else [])):
        degrees, layout = _degrees(setup.config, model), _layout(setup.config, model)
        yield from layout_notes(f"{model}.megatron.{_DEGREES['ep']}", degrees, layout)


def _training_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    models = {model: stages for model, stages in _MODEL_STAGES.items() if setup.stages(*stages)}
    for model, stages in models.items():
        layout, prefix = _layout(config, model), f"{model}.megatron"
        keys = tuple(f"{prefix}.{name}" for name in _DEGREES.values())
        for stage, key in zip(stages, _micro_batch_keys(config, model), strict=True):
            stage_layout = layout if stage.endswith("train") else Layout(**{**vars(layout), "vpp": 1})
            yield ParsedField(f"{stage}.layout", str(stage_layout), keys)
            yield from _micro_batch_fields(config, stage, key, layout.cp)
        key = f"{prefix}.override_transformer_config.recompute_granularity"
        yield ParsedField(f"{stages[1]}.recompute", config.value(key) or "none", (key,))
        offloads = (f"{prefix}.optimizer_offload", f"{model}.optim.override_optimizer_config.optimizer_cpu_offload")
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


def _micro_batch_keys(config: TrainerConfig, model: str) -> tuple[str, str]:
    """The keys of the micro-batch rows, or tokens, of the forward pass and of training."""
    name = _micro_batch_key(config.value(f"{model}.use_dynamic_bsz"))
    if model == "critic":
        forward = "forward_max_token_len_per_gpu" if config.value("critic.use_dynamic_bsz") else f"ppo_{name}"
        return f"critic.{forward}", f"critic.ppo_{name}"
    forward = _micro_batch_key(config.value(f"{_R}.log_prob_use_dynamic_bsz"))
    return f"{_R}.log_prob_{forward}", f"{model}.ppo_{name}"


def _micro_batch_key(is_dynamic: object) -> str:
    return "max_token_len_per_gpu" if is_dynamic else "micro_batch_size_per_gpu"


def _micro_batch_fields(config: TrainerConfig, stage: str, key: str, cp: int) -> Iterator[ParsedField]:
    """Yield the micro-batch size of a stage; nothing if the key has no value, since verl then uses another key, whose
    value is for all ranks together."""
    if config.value(key) is None:
        return
    if "token" in key:
        yield ParsedField(f"{stage}.micro_batch_tokens", config.integer(key) * cp, (key,))
    else:
        yield ParsedField(f"{stage}.micro_batch_size", config.integer(key), (key,))


def _free_micro_batch_notes(setup: TrainingSetup, fields: Iterable[ParsedField]) -> Iterator[str]:
    """Yield a sentence for each stage whose micro-batch size no key sets."""
    known = {field.what for field in fields}
    for stages in (*_MODEL_STAGES.values(), ("ref_logprob",)):
        for stage in setup.stages(*stages):
            if not {f"{stage}.micro_batch_size", f"{stage}.micro_batch_tokens"} & known:
                yield f"{stage}: no key gives the rows or tokens of its micro-batch on a rank; the search chooses them."
