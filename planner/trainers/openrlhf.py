"""OpenRLHF: export of plans to the flags of `train_ppo_ray`, and import from a script with them.

DeepSpeed trains and scores, vLLM generates. All four models have the same degrees of tensor parallelism and ring
attention, and no pipeline. They share all ranks with the engines (`--train.colocate_all`); or generation works one
batch ahead on its own ranks, and the models share the rest, all together or actor with reference and critic with
reward. There is one micro-batch size for training and one for scoring (cli/train_ppo_ray.py). Recomputation of
activations is full or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.planner.job.algorithm_settings import GRPO, CriticFreeSettings, Reinforce
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.trainers.config_keys import TrainerConfig, known_keys, read_flags
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
    present_stages,
)
from meshwright.planner.trainers.export_settings import (
    HOOK_FILE,
    engine_memory_share,
    flags,
    mini_batch,
    pool_nodes,
    reward_hook,
    script,
)
from meshwright.planner.trainers.openrlhf_flags import CURRENT_NAMES, with_current_flags
from meshwright.planner.trainers.parsed_config import (
    GRPO_ESTIMATOR,
    LOSS_MEANS,
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
    layout_of,
    nodes_of_ranks,
)
from meshwright.planner.trainers.trainer import ExportInput, KeyValue, OtherTrainer
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute
from meshwright.profiles.stages import GENERATE, Role

_TP_CP_DEGREES = tuple((tp, cp) for cp in (1, 2, 4) for tp in (1, 2, 4, 8))
_FORWARD_STAGES = ppo_stages(trains=False)
_TRAIN_STAGES = ppo_stages(trains=True)
_SETTING_KEYS = {
    "gamma": "algo.advantage.gamma",
    "gae_lambda": "algo.advantage.lambd",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "value_clip": "critic.value_clip",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
}
_ESTIMATOR_NAMES: Mapping[Algorithm, str] = {
    "ppo": "gae",
    "grpo": "group_norm",
    "rloo": "rloo",
    "reinforce++": "reinforce",
}
_LOSS_MEAN_NAMES = {"token": "token-mean", "sequence": "seq-mean-token-mean"}
_MODEL_STAGES = {"actor": "actor_train", "critic": "critic_train", "ref": "ref_logprob", "reward": "reward_score"}


def deployment_modes(facts: Facts) -> Iterator[DeploymentMode]:
    """Yield the ways in which OpenRLHF can place the stages, for each pair of degrees: all models on all ranks; or
    models in one or two groups, and generation one batch ahead on its own ranks."""
    all_pool = all_ranks(facts.cluster)
    actors = (*ppo_stages(role="actor"), *ppo_stages(role="ref"))
    critics = (*ppo_stages(role="critic"), *ppo_stages(role="reward"))
    for tp, cp in _TP_CP_DEGREES:
        layout = Layout(tp=tp, cp=cp)
        yield from _modes(facts, {all_pool: (*actors, *critics)}, all_pool, layout)
        for train, generate in pool_divisions(facts.cluster, 2):
            yield from _modes(facts, {train: (*actors, *critics)}, generate, layout, ONE_AHEAD)
        for actor_pool, critic_pool, generate in pool_divisions(facts.cluster, 3):
            yield from _modes(facts, {actor_pool: actors, critic_pool: critics}, generate, layout, ONE_AHEAD)


def _modes(
    facts: Facts, groups: Mapping[Ranks, tuple[str, ...]], engines: Ranks, degrees: Layout, steps_ahead: int = 0
) -> Iterator[DeploymentMode]:
    """Yield one mode, or none if the degrees do not divide the ranks of a group or the heads of a model."""
    ranks_per_replica = degrees.num_ranks
    heads = [facts.models.spec(stage.role).num_kv_heads for stage in facts.graph.stages if stage.trains]
    if any(ranks.num_ranks % ranks_per_replica for ranks in groups) or any(number % degrees.tp for number in heads):
        return
    layouts = {
        stage: replace(degrees, dp=ranks.num_ranks // ranks_per_replica)
        for ranks, stages in groups.items()
        for stage in stages
    }
    mode = "colocate_all" if steps_ahead == 0 else "async, in groups" if len(groups) > 1 else "async, models together"
    yield DeploymentMode(
        name=f"{mode}, tp{degrees.tp}, ring{degrees.cp}",
        pins=(
            *(pin for ranks, stages in groups.items() for pin in on_pool(ranks, stages)),
            *on_pool(engines, (GENERATE,)),
            *(f"{stage}.layout={layout}" for stage, layout in layouts.items()),
            *no_overlap(),
            *pin_value("micro_batch_tokens", 0, ppo_stages()),
            *pin_value("pp", 1, (GENERATE,)),
            *pin_value("cp", 1, (GENERATE,)),
            *pin_value("ep", 1, (GENERATE,)),
            *(f"{stage}.recompute!=selective" for stage in _TRAIN_STAGES),
            *(pin_value("offload", "none", _TRAIN_STAGES) if steps_ahead else ()),
        ),
        equal_choices=(
            *equal_choices("recompute", "actor_train", ("critic_train",)),
            *equal_choices("offload", "actor_train", ("critic_train",)),
            *equal_choices("micro_batch_size", "actor_train", ("critic_train",)),
            *equal_choices(
                "micro_batch_size", "actor_logprob", tuple(s for s in _FORWARD_STAGES if s != "actor_logprob")
            ),
        ),
        steps_ahead=steps_ahead,
    )


def settings(origin: ExportInput) -> Iterator[KeyValue]:
    """The flags of `train_ppo_ray` that express a plan."""
    plan = origin.plan
    yield from _degree_settings(plan)
    yield from _pool_settings(plan)
    yield from _batch_settings(plan)
    yield from _generation_settings(plan)
    yield from _algorithm_settings(origin)


def _pool_settings(plan: Plan) -> Iterator[KeyValue]:
    for model, stage in present_stages(plan, _MODEL_STAGES).items():
        nodes, per_node = pool_nodes(plan, stage)
        yield KeyValue(f"{model}.num_nodes", nodes, f"pools: the pool of {stage}")
        yield KeyValue(f"{model}.num_gpus_per_node", per_node, f"pools: the pool of {stage}")
    pools = {stage: plan.choice(stage, "pool") for stage in present_stages(plan, _MODEL_STAGES).values()}
    together = len(set(pools.values())) == 1
    yield KeyValue("train.colocate_all", together, "pools: all models have the same")
    yield KeyValue("train.colocate_actor_ref", not together, "pools: those of actor_train and ref_logprob")
    if "critic_train" in plan.graph.by_name:
        yield KeyValue("train.colocate_critic_reward", not together, "pools: those of critic_train and reward_score")
    ahead = bool(plan.ahead[GENERATE])
    yield KeyValue("train.async_enable", ahead, "placements.actor_generate.steps_ahead")
    yield KeyValue("vllm.enable_sleep", not ahead, "rule: excluded by async_enable")


def _degree_settings(plan: Plan) -> Iterator[KeyValue]:
    placement = plan.placement("actor_train")
    layout, schedule = placement.layout, placement.schedule
    yield KeyValue("ds.tensor_parallel_size", layout.tp, "placements.actor_train.layout.tp")
    yield KeyValue("ds.ring_attn_size", layout.cp, "placements.actor_train.layout.cp")
    yield KeyValue("ds.zero_stage", 1, "rule: replicas divide the optimizer's state and keep all gradients")
    yield KeyValue("ds.packing_samples", True, "rule: micro-batches are packed")
    recomputes = schedule.recompute is Recompute.FULL
    yield KeyValue("actor.gradient_checkpointing_enable", recomputes, "placements.actor_train.schedule.recompute")
    offloads = schedule.offload is Offload.OPTIMIZER
    yield KeyValue("ds.enable_sleep", offloads, "placements.actor_train.schedule.offload")
    for model, stage in present_stages(plan, {"ref": "ref_logprob", "reward": "reward_score"}).items():
        offloads = plan.placement(stage).schedule.offload is Offload.WEIGHTS
        yield KeyValue(f"{model}.offload", offloads, f"placements.{stage}.schedule.offload")


def _batch_settings(plan: Plan) -> Iterator[KeyValue]:
    workload = plan.facts.workload
    yield KeyValue("rollout.batch_size", workload.num_prompts, "facts.workload: batch_size / group_size")
    yield KeyValue("rollout.n_samples_per_prompt", workload.group_size, "facts.workload.group_size")
    yield KeyValue("train.batch_size", mini_batch(plan), "facts.workload.num_minibatches")
    yield KeyValue("train.max_epochs", workload.num_epochs, "facts.workload.num_epochs")
    yield KeyValue("data.max_len", workload.max_tokens, "facts.workload: prompt.max + response.max")
    yield KeyValue("rollout.max_new_tokens", workload.response.max, "facts.workload.response.max")
    for key, stage in (("train", "actor_train"), ("rollout", "actor_logprob")):
        rows = plan.placement(stage).schedule.micro_batch_size
        yield KeyValue(f"{key}.micro_batch_size", rows, f"placements.{stage}.schedule.micro_batch_size")


def _generation_settings(plan: Plan) -> Iterator[KeyValue]:
    layout, ranks = plan.placement(GENERATE).layout, plan.choice(GENERATE, "pool")
    assert isinstance(ranks, Ranks)
    yield KeyValue("vllm.num_engines", ranks.num_ranks // layout.tp, "placements.actor_generate.layout.dp")
    yield KeyValue("vllm.tensor_parallel_size", layout.tp, "placements.actor_generate.layout.tp")
    share = engine_memory_share(plan)
    yield KeyValue("vllm.gpu_memory_utilization", share, "placements.actor_generate: its weights and cache")


def _algorithm_settings(origin: ExportInput) -> Iterator[KeyValue]:
    roles, settings = origin.plan.graph.roles, origin.settings
    for model in ("actor", "critic", "reward"):
        if model in roles:
            yield KeyValue(f"{model}.model_name_or_path", origin.path(Role(model)), f"job: models.{model}.path")
    if origin.reward_function is not None:
        yield KeyValue("reward.remote_url", HOOK_FILE, "job: rewards.function")
    yield KeyValue("algo.advantage.estimator", _estimator_name(origin), "job: algorithm")
    if Role.REF in roles:
        yield from origin.setting("kl_coefficient", "algo.kl.init_coef")
    else:
        yield KeyValue("algo.kl.init_coef", 0.0, "job: no models.ref")
    yield KeyValue(
        "algo.kl.use_loss", Role.REF in roles and isinstance(settings, GRPO), "job: algorithm and models.ref"
    )
    yield from origin.settings_by_key(_SETTING_KEYS)
    low, high = settings.clip_range
    yield KeyValue("actor.eps_clip_low_high", (round(1 - low, 9), round(high - 1, 9)), "job: clip_ratio")
    if isinstance(settings, CriticFreeSettings) and settings.loss_mean in _LOSS_MEAN_NAMES:
        yield KeyValue("actor.loss_agg_mode", _LOSS_MEAN_NAMES[settings.loss_mean], "job: loss_mean")


def _estimator_name(origin: ExportInput) -> str:
    settings = origin.settings
    if isinstance(settings, GRPO) and not settings.normalise_by_std:
        return "dr_grpo"
    if isinstance(settings, Reinforce) and settings.group_baseline:
        return "reinforce_baseline"
    return _ESTIMATOR_NAMES[origin.algorithm]


def _files(origin: ExportInput, settings: Sequence[KeyValue]) -> Mapping[str, str]:
    head = "Runs OpenRLHF with this plan. Give --data.prompt_dataset as an argument of this script."
    command = script(head, "python3 -m openrlhf.cli.train_ppo_ray", flags(settings))
    return {"run.sh": command, **reward_hook("openrlhf", origin)}


OPENRLHF = OtherTrainer(
    name="openrlhf",
    key_file="openrlhf",
    engine="vllm",
    modes=deployment_modes,
    algorithms=tuple(_ESTIMATOR_NAMES),
    settings=settings,
    files=_files,
    remarks=(
        "a plan names no data: set --data.prompt_dataset yourself.",
        "a plan never shards weights over replicas; ZeRO-3 does (--ds.zero_stage 3), and then larger models fit.",
        "there is no flag for the slots of an engine: it admits as many sequences as its cache holds.",
    ),
)


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
    max_tokens = config.integer("data.max_len")
    response = config.integer_or("rollout.max_new_tokens", max_tokens // 2)
    yield ParsedField("workload.batch_size", batch, ("rollout.batch_size", "rollout.n_samples_per_prompt"))
    yield from setup.group(samples, "rollout.n_samples_per_prompt")
    yield ParsedField("workload.prompt", max(1, max_tokens - response), ("data.max_len", "rollout.max_new_tokens"))
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
