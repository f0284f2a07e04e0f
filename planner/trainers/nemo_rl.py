"""NeMo-RL: export of plans to its configuration, and import from a YAML file over the base files of its `defaults`.

Megatron-core trains policy and value model, vLLM generates, a PyTorch worker scores. Reference and log-probabilities
have the policy's degrees, values those of the value model; both models share the ranks that train. Generation shares
them too or has its own ranks, whole nodes where there are several. One batch ahead, it must have its own ranks, the
asynchronous engine and the importance correction (examples/configs/ppo_math_1B.yaml). A reward model is an environment
on its own ranks, with tensor parallelism alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.planner.job.algorithm_settings import PPO
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.trainers.config_keys import TrainerConfig, known_keys, read_overrides
from meshwright.planner.trainers.deployment_modes import (
    ONE_AHEAD,
    DeploymentMode,
    all_ranks,
    equal_choices,
    no_overlap,
    on_pool,
    pin_value,
    pool_divisions,
    ppo_stages,
)
from meshwright.planner.trainers.export_settings import (
    engine_memory_share,
    megatron_degrees,
    mini_batch,
    nested_yaml,
    pool_nodes,
    script,
    uneven_stage_layers,
)
from meshwright.planner.trainers.parsed_config import (
    GRPO_ESTIMATOR,
    MATHS,
    MEGATRON_SIZES,
    MEMORY_SHARE,
    PPO_ESTIMATOR,
    REINFORCE_BASELINE_ESTIMATOR,
    REINFORCE_ESTIMATOR,
    Estimator,
    FunctionReward,
    ParsedConfig,
    ParsedField,
    TrainingSetup,
    consecutive_pools,
    estimator_of,
    layout_notes,
    layout_of,
)
from meshwright.planner.trainers.trainer import ExportInput, KeyValue, OtherTrainer
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute
from meshwright.profiles.stages import GENERATE, Role

_G = "policy.generation"
_RM = "env.reward_model"
_MODEL_PREFIXES = {"actor_train": "policy", "critic_train": "value"}


def deployment_modes(facts: Facts) -> Iterator[DeploymentMode]:
    """Yield the ways in which NeMo-RL can place the stages: generation on the ranks that train, or one batch ahead on
    its own ranks; a reward model always has its own ranks."""
    trained = tuple(name for name in ppo_stages() if name != "reward_score")
    if facts.rewards:
        all_pool = all_ranks(facts.cluster)
        yield _mode("colocated", (*on_pool(all_pool, trained), *on_pool(all_pool, (GENERATE,))))
        for train, generate in pool_divisions(facts.cluster, 2):
            pool_pins = (*on_pool(train, trained), *on_pool(generate, (GENERATE,)))
            yield _mode(f"async, {generate} generates", pool_pins, steps_ahead=ONE_AHEAD)
        return
    for train, score in pool_divisions(facts.cluster, 2):
        yield _mode("colocated", (*on_pool(train, (GENERATE, *trained)), *on_pool(score, ("reward_score",))))
    for train, generate, score in pool_divisions(facts.cluster, 3):
        pool_pins = (*on_pool(train, trained), *on_pool(generate, (GENERATE,)), *on_pool(score, ("reward_score",)))
        yield _mode(f"async_ppo, {generate} generates", pool_pins, steps_ahead=ONE_AHEAD)


def _mode(name: str, pool_pins: tuple[str, ...], *, steps_ahead: int = 0) -> DeploymentMode:
    return DeploymentMode(
        name=name,
        pins=(
            *pool_pins,
            *no_overlap(),
            f"{GENERATE}.cp=1",
            *pin_value("micro_batch_tokens", 0, ppo_stages()),
            "reward_score.pp=1",
            "reward_score.cp=1",
            *(f"{stage}.{key}" for stage in ppo_stages(trains=True) for key in ("vpp=1", "recompute!=selective")),
            "reward_score.offload=none",
            "ref_logprob.offload=none",
            "critic_train.offload=none",
        ),
        equal_choices=(
            *equal_choices("layout", "actor_train", ("actor_logprob", "ref_logprob")),
            *equal_choices("layout", "critic_train", ("critic_value",)),
            *equal_choices("micro_batch_size", "actor_logprob", ("ref_logprob",)),
            *equal_choices("micro_batch_size", "critic_train", ("critic_value",)),
        ),
        steps_ahead=steps_ahead,
    )


def settings(origin: ExportInput) -> Iterator[KeyValue]:
    """The keys of NeMo-RL's configuration that express a plan. Raises BadInput for a reward function."""
    plan = origin.plan
    if origin.reward_function is not None:
        raise BadInput(
            f"rewards.function={origin.reward_function}: NeMo-RL takes a function as an environment, which is not "
            "exported here; export to verl, openrlhf or slime, or take pools and layouts over by hand."
        )
    yield from _batch_settings(plan)
    for stage in _MODEL_PREFIXES:
        yield from _degree_settings(plan, stage)
    yield from _micro_batch_settings(plan)
    yield from _generation_settings(plan)
    yield from _async_settings(plan)
    yield from _reward_settings(origin)
    yield from _algorithm_settings(origin)
    cluster = plan.facts.cluster
    yield KeyValue("cluster.num_nodes", cluster.nodes, "facts.cluster.nodes")
    yield KeyValue("cluster.gpus_per_node", cluster.ranks_per_node, "facts.cluster.ranks_per_node")


def _batch_settings(plan: Plan) -> Iterator[KeyValue]:
    workload = plan.facts.workload
    yield KeyValue("ppo.num_prompts_per_step", workload.num_prompts, "facts.workload: batch_size / group_size")
    yield KeyValue("ppo.num_generations_per_prompt", workload.group_size, "facts.workload.group_size")
    yield KeyValue("ppo.ppo_epochs", workload.num_epochs, "facts.workload.num_epochs")
    yield KeyValue("policy.train_global_batch_size", mini_batch(plan), "facts.workload.num_minibatches")
    yield KeyValue("policy.max_total_sequence_length", workload.max_tokens, "facts.workload: prompt.max + response.max")
    yield KeyValue("data.max_input_seq_length", workload.prompt.max, "facts.workload.prompt.max")
    yield KeyValue(f"{_G}.max_new_tokens", workload.response.max, "facts.workload.response.max")


def _degree_settings(plan: Plan, stage: str) -> Iterator[KeyValue]:
    placement, prefix, field = (
        plan.placement(stage),
        f"{_MODEL_PREFIXES[stage]}.megatron_cfg",
        f"placements.{stage}.layout",
    )
    layout = placement.layout
    yield KeyValue(f"{prefix}.enabled", True, "rule: degrees of pipeline and experts are Megatron's")
    yield from megatron_degrees(plan, stage, prefix)
    if ends := uneven_stage_layers(plan, stage):
        for name, number in zip(("first", "last"), ends, strict=True):
            yield KeyValue(f"{prefix}.num_layers_in_{name}_pipeline_stage", number, f"{field}.pp")
    recomputes = placement.schedule.recompute is Recompute.FULL
    yield KeyValue(f"{prefix}.activation_checkpointing", recomputes, f"placements.{stage}.schedule.recompute")
    if layout.cp > 1 and stage == "critic_train":
        yield KeyValue("value.sequence_packing.enabled", True, "rule: context parallelism of the value model packs")


def _micro_batch_settings(plan: Plan) -> Iterator[KeyValue]:
    stages = {
        "policy.train_micro_batch_size": "actor_train",
        "policy.logprob_batch_size": "actor_logprob",
        "value.train_micro_batch_size": "critic_train",
    }
    for key, stage in stages.items():
        schedule = plan.placement(stage).schedule
        yield KeyValue(key, schedule.micro_batch_size, f"placements.{stage}.schedule.micro_batch_size")
    offloads = plan.placement("actor_train").schedule.offload is Offload.OPTIMIZER
    yield KeyValue("policy.offload_optimizer_for_logprob", offloads, "placements.actor_train.schedule.offload")


def _generation_settings(plan: Plan) -> Iterator[KeyValue]:
    layout, field = plan.placement(GENERATE).layout, "placements.actor_generate.layout"
    yield KeyValue(f"{_G}.vllm_cfg.tensor_parallel_size", layout.tp, f"{field}.tp")
    yield KeyValue(f"{_G}.vllm_cfg.pipeline_parallel_size", layout.pp, f"{field}.pp")
    if layout.ep > 1:
        number = layout.expert_replicas * layout.tp
        yield KeyValue(f"{_G}.vllm_cfg.expert_parallel_size", number, "rule: a multiple of tensor's")
    share = engine_memory_share(plan)
    yield KeyValue(f"{_G}.vllm_cfg.gpu_memory_utilization", share, "placements.actor_generate: its weights and cache")


def _async_settings(plan: Plan) -> Iterator[KeyValue]:
    ahead = plan.ahead[GENERATE]
    yield KeyValue(f"{_G}.colocated.enabled", not ahead, "pools: the pool of actor_generate")
    yield KeyValue("ppo.async_ppo.enabled", bool(ahead), "placements.actor_generate.steps_ahead")
    if ahead:
        nodes, per_node = pool_nodes(plan, GENERATE)
        yield KeyValue("ppo.async_ppo.max_trajectory_age_steps", ahead, "placements.actor_generate.steps_ahead")
        yield KeyValue(f"{_G}.colocated.resources.num_nodes", nodes, "pools: the pool of actor_generate")
        yield KeyValue(f"{_G}.colocated.resources.gpus_per_node", per_node, "pools: the pool of actor_generate")
        yield KeyValue(f"{_G}.vllm_cfg.async_engine", True, "rule: async_ppo needs it")
        yield KeyValue("loss_fn.use_importance_sampling_correction", True, "rule: async_ppo needs it")


def _reward_settings(origin: ExportInput) -> Iterator[KeyValue]:
    nodes, per_node = pool_nodes(origin.plan, "reward_score")
    layout, schedule = origin.plan.placement("reward_score").layout, origin.plan.placement("reward_score").schedule
    field = "placements.reward_score"
    yield KeyValue("data.default.env_name", "reward_model", field)
    yield KeyValue(f"{_RM}.enabled", True, field)
    yield KeyValue(f"{_RM}.model_name", origin.path(Role.REWARD), "job: models.reward.path")
    yield KeyValue(f"{_RM}.batch_size", schedule.micro_batch_size, f"{field}.schedule.micro_batch_size")
    yield KeyValue(f"{_RM}.max_model_len", origin.plan.facts.workload.max_tokens, "facts.workload")
    yield KeyValue(f"{_RM}.resources.num_nodes", nodes, "pools: the pool of reward_score")
    yield KeyValue(f"{_RM}.resources.gpus_per_node", per_node, "pools: the pool of reward_score")
    yield KeyValue(f"{_RM}.dtensor_cfg.tensor_parallel_size", layout.tp, f"{field}.layout.tp")


def _algorithm_settings(origin: ExportInput) -> Iterator[KeyValue]:
    ppo = origin.settings
    assert isinstance(ppo, PPO)
    yield KeyValue("policy.model_name", origin.path(Role.ACTOR), "job: models.actor.path")
    yield KeyValue("value.model_name", origin.path(Role.CRITIC), "job: models.critic.path")
    yield KeyValue("policy.megatron_cfg.optimizer.lr", ppo.actor_learning_rate, "job: ppo.actor_learning_rate")
    yield KeyValue("value.megatron_cfg.optimizer.lr", ppo.critic_learning_rate, "job: ppo.critic_learning_rate")
    yield KeyValue("ppo.adv_estimator.gae_lambda", ppo.gae_lambda, "job: ppo.gae_lambda")
    yield KeyValue("ppo.adv_estimator.gae_gamma", ppo.gamma, "job: ppo.gamma")
    yield KeyValue("ppo.skip_reference_policy_logprobs_calculation", False, "placements.ref_logprob")
    yield KeyValue("ppo.reward_shaping.enabled", False, "rule: async_ppo excludes it, and no stage of the plan does it")
    yield KeyValue("ppo.reward_scaling.enabled", False, "job: ppo.reward_scale")
    yield KeyValue("loss_fn.reference_policy_kl_penalty", ppo.kl_coefficient, "job: ppo.kl_coefficient")
    yield KeyValue("loss_fn.use_kl_in_reward", True, "placements.ref_logprob")
    yield KeyValue("loss_fn.ratio_clip_min", ppo.clip_ratio, "job: ppo.clip_ratio")
    yield KeyValue("loss_fn.ratio_clip_max", ppo.clip_ratio, "job: ppo.clip_ratio")
    yield KeyValue("value_loss_fn.cliprange", ppo.value_clip, "job: ppo.value_clip")
    yield KeyValue(f"{_G}.temperature", ppo.temperature, "job: ppo.temperature")


def _files(_origin: ExportInput, settings: Sequence[KeyValue]) -> Mapping[str, str]:
    head = (
        "Runs NeMo-RL with this plan, from the root of its repository. Copy config.yaml into examples/configs first:\n"
        "the configuration that it builds on is there."
    )
    command = "uv run examples/run_ppo.py --config examples/configs/config.yaml"
    return {
        "run.sh": script(head, command, ()),
        "config.yaml": "defaults: ppo_math_1B_megatron.yaml\n" + nested_yaml(settings),
    }


NEMO_RL = OtherTrainer(
    name="nemo-rl",
    key_file="nemo_rl",
    engine="vllm",
    modes=deployment_modes,
    settings=settings,
    files=_files,
    remarks=(
        "the data set is that of ppo_math_1B_megatron.yaml; set data.train and data.validation for another.",
        "dual clipping (loss_fn.ratio_clip_c) stays as in ppo_math_1B_megatron.yaml.",
    ),
)


_ESTIMATORS: Mapping[str, Estimator] = {
    "gae": PPO_ESTIMATOR,
    "grpo": GRPO_ESTIMATOR,
    "reinforce_plus_plus": REINFORCE_ESTIMATOR,
}
_DEFAULTS = ("grpo_math_1B.yaml", "ppo_math_1B.yaml")
"""Base files whose values are known here, even if the file is absent."""

_OTHER_PREFIXES = ("dpo.", "sft.", "distillation.", "teacher.", "teachers.", "rm.", "eval.")
"""Prefixes of keys that configure training other than reinforcement learning."""

_OTHER_FILES = re.compile(r"^(dpo|sft|distillation|rm|eval)\b|^(dpo|sft|distillation|rm)_")
"""Names of files that configure training other than reinforcement learning."""

_PRECISIONS = {
    "policy.precision": ("bfloat16",),
    "value.precision": ("bfloat16", None),
    f"{_G}.vllm_cfg.precision": ("bfloat16", "fp8"),
}
"""Precisions that a job can have, by key."""

_STAGES = {"policy": ("actor_train", "actor_logprob", "ref_logprob"), "value": ("critic_train", "critic_value")}


def read_nemo_rl(path: Path, changed: Mapping[str, Any] | None = None) -> ParsedConfig:
    """Read the configuration in a file; `changed` are keys with values that override its own.

    Raises BadInput naming a key that a job cannot express.
    """
    config = read_overrides(path, known_keys("nemo_rl"), changed=changed)
    if other_key := _other_training(config):
        raise BadInput(
            f"{other_key}: configuration {path} does not configure reinforcement learning; give one with ppo or grpo."
        )
    try:
        return _read_rl(config)
    except BadInput as error:
        missing = [name for name in config.missing if Path(name).name not in _DEFAULTS]
        if not missing:
            raise
        hint = f"{', '.join(missing)} is not beside the configuration, which builds on it: put it there."
        raise BadInput(f"{error} {hint}") from error


def _read_rl(config: TrainerConfig) -> ParsedConfig:
    """Read a configuration of ppo or grpo. Raises BadInput naming a key that a job cannot express."""
    is_grpo = any(key.startswith("grpo.") for key in config.values) or any("grpo" in name for name in config.missing)
    if is_grpo:
        config = replace(config, known=known_keys("nemo_rl_grpo"))
    group = "grpo" if is_grpo else "ppo"
    setup = _training_setup(config, group)
    is_megatron = _is_megatron(config)
    notes = (
        []
        if is_megatron
        else [
            "policy.megatron_cfg is not enabled: FSDP sharding is not modelled, so the search chooses layouts and rows."
        ]
    )
    notes += [*setup.notes(), *_notes(config)]
    pools = dict(_pools(config))
    fields = [*_workload_fields(setup, group), *_model_fields(setup), *_algorithm_fields(setup, group)]
    fields += [*_pool_fields(setup, pools), *_generation_fields(config)]
    if is_megatron:
        notes += _expert_notes(setup, int(pools["train"].partition(":")[2]))
        fields += [*_training_fields(setup, pools)]
    steps_key = f"{group}.async_{group}.max_trajectory_age_steps"
    steps_ahead = config.integer(steps_key) if config.value(f"{group}.async_{group}.enabled") else 0
    if steps_ahead > 1:
        notes.append(f"{steps_key}={steps_ahead} is read as 1: generation is one step ahead.")
    return setup.parsed(
        "nemo-rl",
        fields,
        steps_ahead=min(steps_ahead, 1),
        notes=notes,
        unused=_unused_keys(setup, is_megatron=is_megatron),
    )


def _unused_keys(setup: TrainingSetup, *, is_megatron: bool) -> Iterator[str]:
    """Patterns of keys that other keys make unused."""
    if is_megatron:
        yield from ("*.dtensor_cfg.*", "*.automodel_cfg.*", "policy.optimizer*", "value.optimizer*")
    else:
        yield "*.megatron_cfg.*"
    if not setup.stages("critic_train"):
        yield from ("value.*", "value_loss_fn.*")


def _other_training(config: TrainerConfig) -> str | None:
    """The key or base file by which a configuration is not one of reinforcement learning; None if it is one."""
    for name in config.missing:
        if _OTHER_FILES.match(Path(name).name):
            return f"defaults: {name}"
    return next((key for key in config.values if key.startswith(_OTHER_PREFIXES)), None)


def _is_megatron(config: TrainerConfig) -> bool:
    """True if Megatron-core trains: by its key, by the name of a base file that is absent, by keys that only Megatron
    has, or by default."""
    key = "policy.megatron_cfg.enabled"
    if not config.has(key):
        names = [Path(name).name for name in config.missing]
        if any("megatron" in name for name in names):
            return True
        if any(name in _DEFAULTS for name in names):
            return False
        if names:
            return any(name.startswith("policy.megatron_cfg.") for name in config.values)
    return bool(config.value(key))


def _training_setup(config: TrainerConfig, group: str) -> TrainingSetup:
    """The algorithm: a reference model runs unless it is skipped; the KL penalty is in the loss or inside the
    reward."""
    key, kl = f"{group}.adv_estimator.name", "loss_fn.reference_policy_kl_penalty"
    estimator = estimator_of(config, key, _ESTIMATORS)
    if estimator is REINFORCE_ESTIMATOR and config.value("grpo.adv_estimator.minus_baseline"):
        estimator = REINFORCE_BASELINE_ESTIMATOR
    has_ref = not config.value(f"{group}.skip_reference_policy_logprobs_calculation")
    in_reward = bool(config.value("loss_fn.use_kl_in_reward")) or estimator is PPO_ESTIMATOR
    return TrainingSetup(
        config=config,
        key=key,
        estimator=estimator,
        has_ref=has_ref,
        kl_in_loss=kl if has_ref and not in_reward else None,
        kl_in_reward=kl if in_reward and has_ref else None,
        reward=None if config.has(f"{_RM}.model_name") else FunctionReward(MATHS, ("env.math.num_workers",)),
    )


def _notes(config: TrainerConfig) -> Iterator[str]:
    for name in config.missing:
        if Path(name).name not in _DEFAULTS:
            yield f"defaults: {name} is not beside the configuration; its values are read from {config.known.source}."
    for key, known in _PRECISIONS.items():
        if (precision := config.value(key)) not in known:
            yield f"{key}={precision}: training and generation are costed in bf16, except generation with fp8."
    if config.value("loss_fn.sequence_level_importance_ratios"):
        yield "loss_fn.sequence_level_importance_ratios: a job clips each token's ratio as PPO, which costs as much."
    if config.value("grpo.use_leave_one_out_baseline"):
        yield "grpo.use_leave_one_out_baseline: the baseline of a job is the mean reward of the whole group."
    if config.integer("data.max_input_seq_length") >= config.integer("policy.max_total_sequence_length"):
        yield (
            "data.max_input_seq_length is not below policy.max_total_sequence_length: the longest prompt is read as "
            "the rest that the longest response leaves of the total, or as half of the total if that leaves nothing."
        )


def _workload_fields(setup: TrainingSetup, group: str) -> Iterator[ParsedField]:
    config = setup.config
    keys = (f"{group}.num_prompts_per_step", f"{group}.num_generations_per_prompt")
    batch, samples = map(config.integer, keys)
    yield ParsedField("workload.batch_size", batch * samples, keys)
    yield from setup.group(samples, keys[1])
    total, key = config.integer("policy.max_total_sequence_length"), f"{_G}.max_new_tokens"
    prompt, response = config.integer("data.max_input_seq_length"), config.integer(key)
    if prompt >= total:
        prompt = max(1, total - response if response < total else total // 2)
    yield ParsedField("workload.prompt", prompt, ("data.max_input_seq_length",))
    yield ParsedField("workload.response", min(response, total - prompt), (key, "policy.max_total_sequence_length"))
    key = "policy.train_global_batch_size"
    if (size := config.integer(key)) < 1:
        raise BadInput(f"{key}={size} sequences are not a minibatch; use 1 or more.")
    yield ParsedField("workload.num_minibatches", max(1, batch * samples // size), (key,))
    if setup.algorithm == "ppo":
        yield ParsedField("workload.num_epochs", config.integer("ppo.ppo_epochs"), ("ppo.ppo_epochs",))


def _model_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    keys = {"actor": "policy.model_name", "ref": "policy.model_name", "critic": "value.model_name"}
    if config.has(f"{_RM}.model_name"):
        keys["reward"] = f"{_RM}.model_name"
    for role, key in keys.items():
        if role in setup.graph.roles:
            yield ParsedField(f"models.{role}", str(config.text(key)), (key,))


def _algorithm_fields(setup: TrainingSetup, group: str) -> Iterator[ParsedField]:
    config = setup.config
    is_megatron = _is_megatron(config)
    fields = {
        "gamma": "ppo.adv_estimator.gae_gamma",
        "gae_lambda": "ppo.adv_estimator.gae_lambda",
        "actor_learning_rate": f"policy.{'megatron_cfg.optimizer' if is_megatron else 'optimizer.kwargs'}.lr",
        "critic_learning_rate": "value.megatron_cfg.optimizer.lr",
        "clip_ratio": "loss_fn.ratio_clip_min",
        "clip_ratio_high": "loss_fn.ratio_clip_max",
        "value_clip": "value_loss_fn.cliprange",
        "temperature": f"{_G}.temperature",
        "weight_decay": f"policy.{'megatron_cfg.optimizer' if is_megatron else 'optimizer.kwargs'}.weight_decay",
        "max_grad_norm": "policy.max_grad_norm",
    }
    yield from setup.settings(fields)
    yield from setup.sampling(top_p=f"{_G}.top_p", top_k=f"{_G}.top_k")
    if is_megatron:
        yield from setup.warmup("actor", "policy.megatron_cfg.scheduler.lr_warmup_iters")
        yield from setup.warmup("critic", "value.megatron_cfg.scheduler.lr_warmup_iters")
    if config.value(f"{group}.reward_shaping.enabled"):
        shaping = f"{group}.reward_shaping.overlong_buffer"
        yield from setup.overlong(f"{shaping}_length", f"{shaping}_penalty")
    if config.value("policy.megatron_cfg.peft.enabled"):
        yield from setup.adapter("policy.megatron_cfg.peft.dim", "policy.megatron_cfg.peft.alpha")
    elif config.value("policy.dtensor_cfg.lora_cfg.enabled"):
        yield from setup.adapter("policy.dtensor_cfg.lora_cfg.dim", "policy.dtensor_cfg.lora_cfg.alpha")
    if config.value(f"{_G}.vllm_cfg.precision") == "fp8":
        yield ParsedField("generation_weights", "fp8", (f"{_G}.vllm_cfg.precision",))
    key = "loss_fn.token_level_loss"
    yield from setup.setting("loss_mean", "token" if config.value(key) else "sequence", key)
    keys = ("grpo.adv_estimator.normalize_rewards", "grpo.normalize_rewards")
    key = next((key for key in keys if config.has(key)), keys[1])
    yield from setup.setting("normalise_by_std", bool(config.value(key)), key)


def _pools(config: TrainerConfig) -> Iterator[tuple[str, str]]:
    """The pools: the reward model and generation take theirs from the cluster, and the remaining ranks train."""
    per_node = config.integer("cluster.gpus_per_node")
    num_ranks = config.integer("cluster.num_nodes") * per_node
    taken = {}
    if not config.value(f"{_G}.colocated.enabled"):
        taken["generate"] = _pool_size(config, f"{_G}.colocated.resources", per_node)
    if config.has(f"{_RM}.model_name"):
        taken["score"] = _pool_size(config, f"{_RM}.resources", per_node)
    if sum(taken.values()) >= num_ranks:
        raise BadInput(f"cluster.num_nodes={config.value('cluster.num_nodes')} leaves no rank to train; give it more.")
    yield from consecutive_pools([("train", num_ranks - sum(taken.values())), *taken.items()])


def _pool_size(config: TrainerConfig, prefix: str, per_node: int) -> int:
    return config.integer_or(f"{prefix}.num_nodes", 1) * config.integer_or(f"{prefix}.gpus_per_node", per_node)


def _pool_fields(setup: TrainingSetup, pools: dict[str, str]) -> Iterator[ParsedField]:
    config = setup.config
    for what, key in (("nodes", "cluster.num_nodes"), ("ranks_per_node", "cluster.gpus_per_node")):
        yield ParsedField(f"cluster.{what}", config.integer(key), (key,))
    keys = (f"{_G}.colocated.enabled", f"{_G}.colocated.resources.num_nodes")
    yield ParsedField("actor_generate.pool", pools.get("generate", pools["train"]), keys)
    if setup.reward is None:
        yield ParsedField("reward_score.pool", pools.get("score", pools["train"]), (f"{_RM}.resources.num_nodes",))
    for stage in setup.stages(*_STAGES["policy"], *_STAGES["value"]):
        yield ParsedField(f"{stage}.pool", pools["train"], ("cluster.num_nodes", "cluster.gpus_per_node"))


def _generation_fields(config: TrainerConfig) -> Iterator[ParsedField]:
    for axis, name in (("tp", "tensor_parallel_size"), ("pp", "pipeline_parallel_size")):
        key = f"{_G}.vllm_cfg.{name}"
        yield ParsedField(f"actor_generate.{axis}", config.integer(key), (key,))
    key = f"{_G}.vllm_cfg.gpu_memory_utilization"
    yield ParsedField(MEMORY_SHARE, config.number(key), (key,))
    if config.has(f"{_RM}.model_name"):
        key = f"{_RM}.dtensor_cfg.tensor_parallel_size"
        yield ParsedField("reward_score.tp", config.integer(key), (key,))
        yield ParsedField("reward_score.pp", 1, (key,))


def _layout(config: TrainerConfig, model: str, num_ranks: int) -> Layout:
    sp = bool(config.value(f"{model}.megatron_cfg.sequence_parallel"))
    return layout_of(_degrees(config, model), num_ranks, sp=sp)


def _degrees(config: TrainerConfig, model: str) -> dict[str, int]:
    return {axis: config.integer(f"{model}.megatron_cfg.{name}") for axis, name in MEGATRON_SIZES.items()}


def _expert_notes(setup: TrainingSetup, num_ranks: int) -> Iterator[str]:
    for model, stages in _STAGES.items():
        if setup.stages(*stages):
            degrees, layout = _degrees(setup.config, model), _layout(setup.config, model, num_ranks)
            yield from layout_notes(f"{model}.megatron_cfg.{MEGATRON_SIZES['ep']}", degrees, layout)


def _training_fields(setup: TrainingSetup, pools: dict[str, str]) -> Iterator[ParsedField]:
    config, num_ranks = setup.config, int(pools["train"].partition(":")[2])
    present = {model: setup.stages(*stages) for model, stages in _STAGES.items()}
    for model, stages in present.items():
        if not stages:
            continue
        prefix = f"{model}.megatron_cfg"
        layout = _layout(config, model, num_ranks)
        keys = tuple(f"{prefix}.{name}" for name in MEGATRON_SIZES.values())
        for stage in stages:
            yield ParsedField(f"{stage}.layout", str(layout), keys)
            yield _micro_batch_field(config, model, stage)
        keys = (f"{prefix}.activation_checkpointing", f"{prefix}.recompute_granularity")
        recompute = config.value(keys[1]) or "full" if config.value(keys[0]) else "none"
        yield ParsedField(f"{stages[0]}.recompute", recompute, keys)
    keys = ("policy.offload_optimizer_for_logprob", "policy.megatron_cfg.optimizer.optimizer_cpu_offload")
    offloads = [bool(config.value(key)) for key in keys]
    yield ParsedField("actor_train.offload", "optimizer" if any(offloads) else "none", keys)


def _micro_batch_field(config: TrainerConfig, model: str, stage: str) -> ParsedField:
    """The micro-batch size of a stage: rows, or with packing the tokens of a context-parallel group."""
    trains = stage.endswith("train")
    for packing in ("sequence_packing", "dynamic_batching"):
        if config.value(f"{model}.{packing}.enabled"):
            key = f"{model}.{packing}.{'train' if trains else 'logprob'}_mb_tokens"
            return ParsedField(f"{stage}.micro_batch_tokens", config.integer(key), (key, f"{model}.{packing}.enabled"))
    key = f"{model}.train_micro_batch_size" if trains or model == "value" else "policy.logprob_batch_size"
    return ParsedField(f"{stage}.micro_batch_size", config.integer(key), (key,))
