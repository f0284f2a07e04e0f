"""OpenRLHF: export of plans to the flags of `train_ppo_ray`, and import from a script with them.

DeepSpeed trains and scores, vLLM generates. All four models have the same degrees of tensor parallelism and ring
attention, and no pipeline. They share all ranks with the engines (`--train.colocate_all`); or generation works one
batch ahead on its own ranks, and the models share the rest, all together or actor with reference and critic with
reward. There is one micro-batch size for training and one for scoring (cli/train_ppo_ray.py). Recomputation of
activations is full or none.

`TABLE` has a row for each key. The functions above it read and write the rows that only OpenRLHF has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.planner.job.algorithm_settings import GRPO, CriticFreeSettings, Reinforce
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.trainers import reads, writes
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
)
from meshwright.planner.trainers.export_settings import (
    HOOK_FILE,
    engine_memory_share,
    flags,
    mini_batch,
    reward_hook,
    script,
)
from meshwright.planner.trainers.openrlhf_flags import CURRENT_NAMES, with_current_flags
from meshwright.planner.trainers.parsed_config import (
    GRPO_ESTIMATOR,
    LOSS_MEANS,
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
from meshwright.planner.trainers.table import STEPS_AHEAD, Row, Write, read_table, write_field, write_table
from meshwright.planner.trainers.trainer import ConfigValue, ExportInput, KeyValue, OtherTrainer
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute
from meshwright.profiles.stages import GENERATE, Role

_TP_CP_DEGREES = tuple((tp, cp) for cp in (1, 2, 4) for tp in (1, 2, 4, 8))
_FORWARD_STAGES = ppo_stages(trains=False)
_TRAIN_STAGES = ppo_stages(trains=True)
_ESTIMATOR_NAMES: Mapping[Algorithm, str] = {
    "ppo": "gae",
    "grpo": "group_norm",
    "rloo": "rloo",
    "reinforce++": "reinforce",
}
_LOSS_MEAN_NAMES = {"token": "token-mean", "sequence": "seq-mean-token-mean"}
_ESTIMATOR = "algo.advantage.estimator"
_ESTIMATORS: Mapping[str, Estimator] = {
    "gae": PPO_ESTIMATOR,
    "group_norm": GRPO_ESTIMATOR,
    "dr_grpo": Estimator(algorithm="grpo", settings={"normalise_by_std": False}),
    "rloo": RLOO_ESTIMATOR,
    "trl_rloo": RLOO_ESTIMATOR,  # the name of rloo in OpenRLHF 0.5
    "reinforce": REINFORCE_ESTIMATOR,
    "reinforce_baseline": REINFORCE_BASELINE_ESTIMATOR,
}
_STAGES = {
    "actor": ("actor_train", "actor_logprob"),
    "critic": ("critic_train", "critic_value"),
    "ref": ("ref_logprob",),
    "reward": ("reward_score",),
}
"""The stages of each model; an export writes the pool of the first one as the pool of the model."""


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


# Functions that read rows which only OpenRLHF has


def _has_reward_model(config: TrainerConfig) -> bool:
    model, function = config.text("reward.model_name_or_path"), config.text("reward.remote_url")
    return bool(model) and not function


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


def _read_pools(setup: TrainingSetup, _row: Row) -> Iterator[ParsedField]:
    """Read the cluster and the pool of every stage."""
    nodes, per_node = cluster_of(_pool_sizes(setup))
    yield ParsedField("cluster.nodes", nodes, ("actor.num_nodes", "train.colocate_all"))
    yield ParsedField("cluster.ranks_per_node", per_node, ("actor.num_gpus_per_node",))
    pools = _pools(setup)
    for model, stages in _STAGES.items():
        for stage in setup.stages(*stages):
            keys = (f"{model}.num_nodes", f"{model}.num_gpus_per_node", "train.colocate_all")
            yield ParsedField(f"{stage}.pool", pools[model], keys)
    yield ParsedField(f"{GENERATE}.pool", pools["vllm"], ("vllm.num_engines", "train.colocate_all"))


def _read_layouts(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the layouts of all stages, which have the same degrees of tensor parallelism and ring attention."""
    keys = {"tp": row.key, "cp": "ds.ring_attn_size"}
    degrees, pools = {axis: setup.config.integer(key) for axis, key in keys.items()}, _pools(setup)
    for model, stages in _STAGES.items():
        for stage in setup.stages(*stages):
            num_ranks = int(pools[model].partition(":")[2])
            layout = layout_of(degrees, num_ranks, keys=keys)
            yield ParsedField(f"{stage}.layout", str(layout), tuple(keys.values()))


def _micro_batch_stages(setup: TrainingSetup, row: Row) -> tuple[str, ...]:
    """The stages whose micro-batch a flag of `train` or of `rollout` gives."""
    trains = row.key.startswith("train.")
    stages = setup.stages(*(stage for stages in _STAGES.values() for stage in stages))
    return tuple(stage for stage in stages if stage.endswith("train") is trains)


def _read_rows(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    if not setup.config.value("train.dynamic_batch_enable"):
        for stage in _micro_batch_stages(setup, row):
            yield ParsedField(f"{stage}.micro_batch_size", setup.config.integer(row.key), (row.key,))


def _read_budget(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the tokens of a micro-batch; forward passes without a budget of their own have that of training."""
    config = setup.config
    if config.value("train.dynamic_batch_enable"):
        for stage in _micro_batch_stages(setup, row):
            budget = config.integer_or(row.key, config.integer("train.max_tokens_per_gpu"))
            tokens = budget * config.integer("ds.ring_attn_size")
            yield ParsedField(f"{stage}.micro_batch_tokens", tokens, (row.key,))


def _read_recompute(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    recompute = "full" if setup.config.value(row.key) else "none"
    for stage in setup.stages(*_TRAIN_STAGES):
        yield ParsedField(f"{stage}.recompute", recompute, (row.key,))


def _read_optimizer_offload(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    keys = (row.key, "ds.adam_offload")
    offload = "optimizer" if any(setup.config.value(key) for key in keys) else "none"
    for stage in setup.stages(*_TRAIN_STAGES):
        yield ParsedField(f"{stage}.offload", offload, keys)


def _read_weight_offload(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    offload = "weights" if setup.config.value(row.key) else "none"
    for stage in setup.stages(*_STAGES[row.key.partition(".")[0]]):
        yield ParsedField(f"{stage}.offload", offload, (row.key,))


def _read_lengths(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the longest response, by default half of the longest sequence, and the longest prompt, which is the rest."""
    longest = setup.config.integer("data.max_len")
    response = setup.config.integer_or(row.key, longest // 2)
    yield ParsedField("workload.prompt", max(1, longest - response), ("data.max_len", row.key))
    yield ParsedField("workload.response", response, (row.key,))


def _num_sequences(setup: TrainingSetup) -> int:
    """The sequences of a step."""
    return setup.config.integer("rollout.batch_size") * setup.config.integer("rollout.n_samples_per_prompt")


def _read_steps_ahead(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    yield ParsedField(STEPS_AHEAD, int(bool(setup.config.value(row.key))), (row.key,))


def _read_engine_degrees(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    yield ParsedField(f"{GENERATE}.tp", setup.config.integer(row.key), (row.key,))
    yield ParsedField(f"{GENERATE}.pp", 1, (row.key,))


def _read_critic_path(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the critic's path; without a flag of its own, that of the reward model, or else of the actor."""
    config = setup.config
    actor, reward = config.text("actor.model_name_or_path"), config.text("reward.model_name_or_path")
    path = config.text(row.key) or (str(reward).split(",")[0] if reward else actor)
    if Role.CRITIC in setup.graph.roles:
        yield ParsedField("models.critic", str(path), (row.key,))


def _read_reward_path(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the path of the first reward model."""
    if _has_reward_model(setup.config):
        yield ParsedField("models.reward", str(setup.config.text(row.key)).split(",")[0], (row.key,))


def _read_learning_rate(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read a learning rate only if a flag sets it, because its default depends on the optimizer."""
    if setup.config.has(row.key):
        yield from setup.number_setting(row.setting, row.key)


def _read_freezing_steps(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """The first steps, in which the actor is frozen; none by default, which is -1."""
    yield from setup.setting(row.setting, max(0, setup.config.integer(row.key)), row.key)


def _write_freezing_steps(source: ExportInput, row: Row) -> ConfigValue:
    return getattr(source.settings, row.setting, None) or None


def _read_clip(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the low and the high clip of the policy ratio, from two numbers or from one for both."""
    config, both = setup.config, "actor.eps_clip"
    low, high = config.pair(row.key) if config.has(row.key) else (config.number(both),) * 2
    for name, value in (("clip_ratio", low), ("clip_ratio_high", high)):
        yield from setup.setting(name, value, row.key if config.has(row.key) else both)


# Functions that write rows which only OpenRLHF has


def _shares_one_pool(plan: Plan) -> bool:
    """True if all models have one pool."""
    stages = [stages[0] for stages in _STAGES.values() if stages[0] in plan.graph.by_name]
    return len({plan.choice(stage, "pool") for stage in stages}) == 1


def _num_engines(plan: Plan) -> int:
    ranks = plan.choice(GENERATE, "pool")
    assert isinstance(ranks, Ranks)
    return ranks.num_ranks // plan.placement(GENERATE).layout.tp


def _offloads(stage: str, offload: Offload) -> Write:
    """Write whether the stage offloads this state."""
    return writes.with_stage(stage, writes.of_plan(lambda plan: plan.placement(stage).schedule.offload is offload))


def _recomputes_all(plan: Plan) -> bool:
    return plan.placement("actor_train").schedule.recompute is Recompute.FULL


def _write_kl(source: ExportInput, row: Row) -> ConfigValue | KeyValue:
    """Write the coefficient of the KL penalty; 0 without a reference model."""
    return (
        write_field(source, row)
        if Role.REF in source.plan.graph.roles
        else KeyValue(row.key, 0.0, "job: no models.ref")
    )


def _write_kl_in_loss(source: ExportInput, _row: Row) -> ConfigValue:
    return Role.REF in source.plan.graph.roles and isinstance(source.settings, GRPO)


def _write_clip(source: ExportInput, _row: Row) -> ConfigValue:
    low, high = source.settings.clip_range
    return round(1 - low, 9), round(high - 1, 9)


def _write_loss_mean(source: ExportInput, _row: Row) -> ConfigValue:
    settings = source.settings
    return _LOSS_MEAN_NAMES.get(settings.loss_mean) if isinstance(settings, CriticFreeSettings) else None


def _write_estimator(source: ExportInput, _row: Row) -> ConfigValue:
    settings = source.settings
    if isinstance(settings, GRPO) and not settings.normalise_by_std:
        return "dr_grpo"
    if isinstance(settings, Reinforce) and settings.group_baseline:
        return "reinforce_baseline"
    return _ESTIMATOR_NAMES[source.algorithm]


# The table


def _pool_rows(model: str) -> tuple[Row, ...]:
    stage, note = _STAGES[model][0], "read with train.colocate_all"
    field = f"pools: the pool of {stage}"
    return (
        Row(f"{model}.num_nodes", field, None, writes.number_of_nodes(stage), note),
        Row(f"{model}.num_gpus_per_node", field, None, writes.ranks_of_node(stage), note),
    )


_TRAIN = "placements.actor_train"

TABLE = (
    # degrees, recomputation and offload, the same for all models
    Row("ds.tensor_parallel_size", f"{_TRAIN}.layout.tp", _read_layouts),
    Row("ds.ring_attn_size", f"{_TRAIN}.layout.cp", None, note="read with ds.tensor_parallel_size"),
    Row("ds.zero_stage", "rule: replicas divide the optimizer's state and keep all gradients",
        None, writes.always(1), "a note says that ZeRO-2 and ZeRO-3 are costed as ZeRO-1"),
    Row("ds.packing_samples", "rule: micro-batches are packed", None, writes.always(True)),
    Row("actor.gradient_checkpointing_enable", f"{_TRAIN}.schedule.recompute",
        _read_recompute, writes.of_plan(_recomputes_all)),
    Row("ds.enable_sleep", f"{_TRAIN}.schedule.offload",
        _read_optimizer_offload, _offloads("actor_train", Offload.OPTIMIZER)),
    Row("ds.adam_offload", f"{_TRAIN}.schedule.offload", None, None, "read with ds.enable_sleep"),
    *(
        Row(
            f"{model}.offload",
            f"placements.{stage}.schedule.offload",
            _read_weight_offload,
            _offloads(stage, Offload.WEIGHTS),
        )
        for model, stage in (("ref", "ref_logprob"), ("reward", "reward_score"))
    ),
    # pools
    *(row for model in _STAGES for row in _pool_rows(model)),
    Row("train.colocate_all", "pools: all models have the same", _read_pools, writes.of_plan(_shares_one_pool)),
    Row("train.colocate_actor_ref", "pools: those of actor_train and ref_logprob",
        None, writes.of_plan(lambda plan: not _shares_one_pool(plan)), "read with train.colocate_all"),
    Row("train.colocate_critic_reward", "pools: those of critic_train and reward_score",
        None, writes.with_stage("critic_train", writes.of_plan(lambda plan: not _shares_one_pool(plan))),
        "read with train.colocate_all"),
    Row("train.async_enable", "placements.actor_generate.steps_ahead",
        _read_steps_ahead, writes.of_plan(lambda plan: bool(plan.ahead[GENERATE]))),
    Row("vllm.enable_sleep", "rule: excluded by async_enable",
        None, writes.of_plan(lambda plan: not plan.ahead[GENERATE])),
    # batches, lengths and micro-batches
    Row("rollout.batch_size", "facts.workload: batch_size / group_size",
        reads.batch_size("rollout.n_samples_per_prompt"), writes.num_prompts),
    Row("rollout.n_samples_per_prompt", "facts.workload.group_size", reads.group_size),
    Row("train.batch_size", "facts.workload.num_minibatches",
        reads.minibatches(_num_sequences), writes.of_plan(mini_batch)),
    Row("train.max_epochs", "facts.workload.num_epochs"),
    Row("data.max_len", "facts.workload: prompt.max + response.max",
        None, writes.max_tokens, "read with rollout.max_new_tokens"),
    Row("rollout.max_new_tokens", "facts.workload.response.max", _read_lengths),
    Row("train.micro_batch_size", f"{_TRAIN}.schedule.micro_batch_size", _read_rows),
    Row("rollout.micro_batch_size", "placements.actor_logprob.schedule.micro_batch_size", _read_rows),
    Row("train.dynamic_batch_enable", "rule: micro-batches are packed",
        None, None, "whether tokens or rows are read"),
    Row("train.max_tokens_per_gpu", f"{_TRAIN}.schedule.micro_batch_tokens", _read_budget, None),
    Row("rollout.max_tokens_per_gpu", "placements.actor_logprob.schedule.micro_batch_tokens", _read_budget, None),
    # generation
    Row("vllm.num_engines", "placements.actor_generate.layout.dp",
        None, writes.of_plan(_num_engines), "read with train.colocate_all"),
    Row("vllm.tensor_parallel_size", "placements.actor_generate.layout.tp", _read_engine_degrees),
    Row("vllm.gpu_memory_utilization", "placements.actor_generate: its weights and cache",
        reads.memory_share, writes.of_plan(engine_memory_share)),
    Row("vllm.enable_prefix_caching", writes.VLLM_RULE, None, writes.vllm_argument),
    Row("vllm.enforce_eager", writes.VLLM_RULE, None, writes.vllm_argument),
    # models and the algorithm
    Row("actor.model_name_or_path", "job: models.actor.path",
        reads.models(Role.ACTOR, Role.REF), writes.model_path(Role.ACTOR)),
    Row("critic.model_name_or_path", "job: models.critic.path", _read_critic_path, writes.model_path(Role.CRITIC)),
    Row("reward.model_name_or_path", "job: models.reward.path", _read_reward_path, writes.model_path(Role.REWARD)),
    Row("reward.remote_url", "job: rewards.function",
        reads.function_reward, writes.with_function(writes.always(HOOK_FILE))),
    Row(_ESTIMATOR, "job: algorithm", reads.estimator, _write_estimator),
    Row("algo.kl.init_coef", "setting: kl_coefficient", reads.kl_penalty, _write_kl),
    Row("algo.kl.use_loss", "job: algorithm and models.ref", None, _write_kl_in_loss),
    Row("algo.advantage.gamma", "setting: gamma"),
    Row("algo.advantage.lambd", "setting: gae_lambda"),
    Row("actor.adam.lr", "setting: actor_learning_rate", _read_learning_rate),
    Row("critic.adam.lr", "setting: critic_learning_rate", _read_learning_rate),
    Row("critic.value_clip", "setting: value_clip"),
    Row("critic.freezing_steps", "setting: critic_warmup_steps", _read_freezing_steps, _write_freezing_steps),
    Row("rollout.temperature", "setting: temperature"),
    Row("rollout.top_p", "setting: top_p", reads.top_p),
    Row("actor.eps_clip_low_high", "job: clip_ratio", _read_clip, _write_clip),
    Row("actor.eps_clip", "job: clip_ratio", None, None, "read with actor.eps_clip_low_high"),
    Row("actor.loss_agg_mode", "job: loss_mean", reads.loss_mean(LOSS_MEANS), _write_loss_mean),
    Row("actor.policy_loss_type", "job: algorithm", None, None, "read as PPO's clip, with a note"),
    # settings that are read and not written
    Row("actor.adam.weight_decay", "setting: weight_decay", write=None),
    Row("actor.max_norm", "setting: max_grad_norm", write=None),
    Row("actor.entropy_coef", "setting: entropy_coefficient", write=None),
    Row("reward.overlong_buffer_len", "setting: overlong_tokens", reads.overlong_tokens, None),
    Row("reward.overlong_penalty_factor", "setting: overlong_penalty",
        reads.overlong_penalty("reward.overlong_buffer_len"), None),
    Row("ds.lora.rank", "job: models.actor.adapter.rank", reads.adapter_rank, None),
    Row("ds.lora.alpha", "job: models.actor.adapter.alpha", reads.adapter_alpha("ds.lora.rank"), None),
)  # fmt: skip
"""OpenRLHF's flags and the fields of a job or plan, in the order of an export."""


def _files(source: ExportInput, settings: Sequence[KeyValue]) -> Mapping[str, str]:
    head = "Runs OpenRLHF with this plan. Give --data.prompt_dataset as an argument of this script."
    command = script(head, "python3 -m openrlhf.cli.train_ppo_ray", flags(settings))
    return {"run.sh": command, **reward_hook("openrlhf", source)}


OPENRLHF = OtherTrainer(
    name="openrlhf",
    key_file="openrlhf",
    engine="vllm",
    modes=deployment_modes,
    algorithms=tuple(_ESTIMATOR_NAMES),
    settings=partial(write_table, TABLE),
    files=_files,
    remarks=(
        "a plan names no data: set --data.prompt_dataset yourself.",
        "a plan never shards weights over replicas; ZeRO-3 does (--ds.zero_stage 3), and then larger models fit.",
        "there is no flag for the slots of an engine: it admits as many sequences as its cache holds.",
    ),
)


def read_openrlhf(path: Path, changed: Mapping[str, Any] | None = None) -> ParsedConfig:
    """Read the configuration in a script; `changed` are keys with values that override its own.

    Raises BadInput naming a flag that a job cannot express.
    """
    config = with_current_flags(read_flags(path, known_keys("openrlhf"), CURRENT_NAMES, changed=changed))
    return read_table(TABLE, _training_setup(config), trainer="openrlhf", notes=_notes, unused=_unused_keys)


def _notes(setup: TrainingSetup, _fields: Sequence[ParsedField]) -> Iterator[str]:
    config = setup.config
    if config.integer("ds.zero_stage") > 1:
        yield f"--ds.zero_stage {config.value('ds.zero_stage')} is costed as ZeRO-1: optimizer state alone is sharded."
    if (loss := config.value("actor.policy_loss_type")) != "ppo":
        yield f"--actor.policy_loss_type {loss}: a job clips each token's ratio as PPO, at the same cost."
    yield from setup.notes()


def _unused_keys(setup: TrainingSetup) -> Iterator[str]:
    """Patterns of keys that other keys make unused."""
    if not setup.stages("critic_train"):
        yield from ("critic.*", "train.colocate_critic_reward")
    if not setup.has_ref:
        yield from ("ref.*", "train.colocate_actor_ref")
    if setup.reward is not None:
        yield "reward.num_*"
    if setup.config.value("train.dynamic_batch_enable"):
        yield from ("train.micro_batch_size", "rollout.micro_batch_size")
    together = {"all": "*.num_*", "actor_ref": "ref.num_*", "critic_reward": "reward.num_*"}
    for name, pattern in together.items():
        if setup.config.value(f"train.colocate_{name}"):
            yield pattern


def _training_setup(config: TrainerConfig) -> TrainingSetup:
    """Return the algorithm, its models and its reward; as in train_ppo_ray, there is a reference model if the KL
    coefficient is above 0."""
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
