"""verl: export of plans to its configuration, and import from it.

Megatron-core trains, vLLM generates and scores. Actor, reference and critic share all ranks of the trainer, each with
its own degrees; log-probabilities and values are computed with the degrees of the model's training. Generation shares
these ranks (`sync`) or has its own pool and works one batch ahead (`separate_async`,
trainer/ppo/v1/trainer_separate_async.py). An engine has no pipeline parallelism (workers/config/rollout.py). A reward
model may have its own pool, and must with `separate_async`. A configuration is a YAML file, or hydra overrides in a
script.

`TABLE` has a row for each key. The functions above it read and write the rows that only verl has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.planner.job.algorithm_settings import CriticFreeSettings, Reinforce
from meshwright.planner.job.job import Facts
from meshwright.planner.trainers import reads, writes
from meshwright.planner.trainers.config_keys import TrainerConfig, known_keys, read_overrides
from meshwright.planner.trainers.deployment_modes import (
    ONE_AHEAD,
    DeploymentMode,
    all_ranks,
    equal_choices,
    on_pool,
    pool_divisions,
    ppo_stages,
    tp_only_engines,
)
from meshwright.planner.trainers.export_settings import (
    HOOK_FILE,
    engine_memory_share,
    overrides,
    reward_hook,
    script,
    uneven_stage_layers,
)
from meshwright.planner.trainers.megatron_rows import MEGATRON_SIZES, degree_rows, end_layer_rows
from meshwright.planner.trainers.parsed_config import (
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
from meshwright.planner.trainers.table import STEPS_AHEAD, Read, Row, Write, read_table, write_field, write_table
from meshwright.planner.trainers.trainer import ConfigValue, ExportInput, KeyValue, OtherTrainer
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import SGLANG, VLLM
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload
from meshwright.profiles.stages import GENERATE, Role

_A, _R = "actor_rollout_ref", "actor_rollout_ref.rollout"
_RM, _OLD_RM = "reward.reward_model", "reward_model"
_DEGREES = {**MEGATRON_SIZES, "vpp": "virtual_pipeline_model_parallel_size"}
_MODEL_STAGES = {
    f"{_A}.actor": ("actor_logprob", "actor_train"),
    "critic": ("critic_value", "critic_train"),
    f"{_A}.ref": ("ref_logprob",),
}
"""The stages of a model, by verl's prefix for its keys; they have the degrees of its training."""
_ESTIMATOR_NAMES: Mapping[Algorithm, str] = {
    "ppo": "gae",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce++": "reinforce_plus_plus",
}
_LOSS_MEAN_NAMES = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
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
_ENGINE_NAMES = ("vllm", "sglang")
_STRATEGY = f"{_A}.actor.strategy"


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
        pins=(*pool_pins, *tp_only_engines(has_drafts=True)),
        equal_choices=(
            *equal_choices("layout", "actor_train", ("actor_logprob",)),
            *equal_choices("layout", "critic_train", ("critic_value",)),
            *equal_choices("micro_batch_size", "critic_train", ("critic_value",)),
            *equal_choices("micro_batch_tokens", "critic_train", ("critic_value",)),
        ),
        steps_ahead=steps_ahead,
    )


# Functions that read rows which only verl has


def _is_megatron(config: TrainerConfig) -> bool:
    """True if Megatron trains: by the engine's name, the configuration's name, or keys that only Megatron has."""
    names = (config.value("model_engine"), config.value(_STRATEGY) if config.has(_STRATEGY) else None)
    is_in_name = any(word.startswith("--config-name") and "megatron" in word for word in config.command)
    return "megatron" in names or is_in_name or any(".megatron." in key for key in config.values)


def _if_trained(model: str, read: Read) -> Read:
    """Read a key of a model only where Megatron trains and the job has the model."""
    stages = _MODEL_STAGES[model]
    return reads.if_(lambda setup: _is_megatron(setup.config) and bool(setup.stages(*stages)), read)


def _has_reward_model(config: TrainerConfig) -> bool:
    """True if a reward model scores, under its present or its former key."""
    return bool(config.value(f"{_RM}.enable") or config.value(f"{_OLD_RM}.enable"))


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


def _read_pools(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the cluster and the pool of every stage."""
    sizes = _pool_sizes(setup.config)
    keys = (row.key, "trainer.n_gpus_per_node")
    nodes, per_node = cluster_of(sizes)
    yield ParsedField("cluster.nodes", nodes, keys)
    yield ParsedField("cluster.ranks_per_node", per_node, keys)
    pools = dict(consecutive_pools((name, nodes * ranks) for name, (nodes, ranks) in sizes.items()))
    pool_names = {GENERATE: "generate", "reward_score": "score"}
    for stage in setup.graph.by_name:
        pool = pools.get(pool_names.get(stage, "train"), pools["train"])
        yield ParsedField(f"{stage}.pool", pool, keys)


def _read_steps_ahead(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    yield ParsedField(STEPS_AHEAD, int(setup.config.value(row.key) == "separate_async"), (row.key,))


def _degrees(config: TrainerConfig, model: str) -> dict[str, int]:
    """The degrees of a model's training by axis: 1 where no key sets one, except that etp is then 0, which means tp."""
    return {
        axis: int(axis != "etp") if config.value(key) is None else config.integer(key)
        for axis, key in _degree_keys(model).items()
    }


def _degree_keys(model: str) -> dict[str, str]:
    return {axis: f"{model}.megatron.{name}" for axis, name in _DEGREES.items()}


def _layout(config: TrainerConfig, model: str) -> Layout:
    nodes, ranks = _pool_sizes(config)["train"]
    sp = bool(config.value(f"{model}.megatron.sequence_parallel"))
    return layout_of(_degrees(config, model), nodes * ranks, keys=_degree_keys(model), sp=sp)


def _expert_notes(setup: TrainingSetup) -> Iterator[str]:
    for model in (model for model, stages in _MODEL_STAGES.items() if setup.stages(*stages)):
        degrees, layout = _degrees(setup.config, model), _layout(setup.config, model)
        yield from layout_notes(f"{model}.megatron.{_DEGREES['ep']}", degrees, layout)


def _read_layout(model: str) -> Read:
    """Read the layout of a model's stages; the pipeline is interleaved in training only."""

    def read(setup: TrainingSetup, _row: Row) -> Iterator[ParsedField]:
        layout = _layout(setup.config, model)
        keys = tuple(_degree_keys(model).values())
        for stage in _MODEL_STAGES[model]:
            stage_layout = layout if stage.endswith("train") else Layout(**{**vars(layout), "vpp": 1})
            yield ParsedField(f"{stage}.layout", str(stage_layout), keys)

    return _if_trained(model, read)


def _read_recompute(model: str) -> Read:
    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        yield ParsedField(f"{_MODEL_STAGES[model][-1]}.recompute", setup.config.value(row.key) or "none", (row.key,))

    return _if_trained(model, read)


def _cpu_offload(model: str) -> str:
    """The key among the optimizer's own settings that offloads its state to host memory."""
    return f"{model}.optim.override_optimizer_config.optimizer_cpu_offload"


def _read_optimizer_offload(model: str) -> Read:
    """Read whether the optimizer is offloaded, from Megatron's key or the optimizer's own."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        keys = (row.key, _cpu_offload(model))
        offloaded = [bool(setup.config.value(key)) for key in keys]
        yield ParsedField(f"{_MODEL_STAGES[model][-1]}.offload", "optimizer" if any(offloaded) else "none", keys)

    return _if_trained(model, read)


def _read_weight_offload(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    yield ParsedField("ref_logprob.offload", "weights" if setup.config.value(row.key) else "none", (row.key,))


def _read_micro_batch(*stages: str) -> Read:
    """Read the micro-batch of stages of one model: in tokens where the dynamic-batch flag is set, else in rows.

    Nothing is read from a key without a value, since verl then uses another key, whose value is for all ranks together.
    """
    model = next(model for model, model_stages in _MODEL_STAGES.items() if stages[0] in model_stages)

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        prefix, _, name = row.key.rpartition(".")
        flag = f"{prefix}.{'log_prob_' if name.startswith('log_prob_') else ''}use_dynamic_bsz"
        in_tokens = "token" in name
        if bool(setup.config.value(flag)) is not in_tokens or setup.config.value(row.key) is None:
            return
        for stage in stages:
            if in_tokens:
                budget = setup.config.integer(row.key) * _layout(setup.config, model).cp
                yield ParsedField(f"{stage}.micro_batch_tokens", budget, (row.key,))
            else:
                yield ParsedField(f"{stage}.micro_batch_size", setup.config.integer(row.key), (row.key,))

    return _if_trained(model, read)


def _read_engine(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    if (engine := setup.config.value(row.key)) in _ENGINE_NAMES:
        yield ParsedField("engine", engine, (row.key,))


def _read_engine_tp(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the tensor-parallel degree of an engine. Raises BadInput if it does not divide the ranks that generate."""
    sizes = _pool_sizes(setup.config)
    nodes, ranks = sizes.get("generate", sizes["train"])
    tp = setup.config.integer(row.key)
    layout_of({"tp": tp}, nodes * ranks, keys={"tp": row.key})
    yield ParsedField(f"{GENERATE}.tp", tp, (row.key,))


def _read_engine_pp(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    yield ParsedField(f"{GENERATE}.pp", setup.config.integer_or(row.key, 1), (row.key,))


def _read_fp8(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    if setup.config.value(row.key) == "fp8":
        yield ParsedField("generation_weights", "fp8", (row.key,))


def _read_reward_path(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the path of the reward model from its present key or, where that has no value, its former one."""
    if not _has_reward_model(setup.config):
        return
    present, former = f"{_RM}.model_path", f"{_OLD_RM}.model.path"
    if row.key == (present if setup.config.value(present) else former):
        yield ParsedField("models.reward", str(setup.config.text(row.key)), (row.key,))


def _read_reward_degrees(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    if _has_reward_model(setup.config):
        yield ParsedField("reward_score.tp", setup.config.integer(row.key), (row.key,))
        yield ParsedField("reward_score.pp", 1, (f"{_RM}.rollout.pipeline_model_parallel_size",))


def _if_set(key: str, read: Read) -> Read:
    """Read only where another key is set."""
    return reads.if_(lambda setup: bool(setup.config.value(key)), read)


# Functions that write rows which only verl has


def _write_trainer_mode(source: ExportInput, _row: Row) -> ConfigValue:
    return "separate_async" if source.plan.ahead[GENERATE] else "sync"


def _write_offload(stage: str, offload: Offload) -> Write:
    """Write True if the stage offloads this state; write nothing otherwise."""

    def write(source: ExportInput, _row: Row) -> ConfigValue:
        return source.plan.placement(stage).schedule.offload is offload or None

    return writes.with_stage(stage, write)


def _write_reference_layers(source: ExportInput, _row: Row) -> ConfigValue:
    """Write the layers of the first and the last pipeline stage of the reference model, as a whole mapping.

    verl's default for the mapping is the actor's, with the actor's layers. Hydra cannot add a key below it, so the
    whole mapping is replaced: by an empty one where the reference's pipeline is even and the actor's is not.
    """
    if (layers := uneven_stage_layers(source.plan, "ref_logprob")) is None:
        return "{}" if uneven_stage_layers(source.plan, "actor_train") else None
    ends = zip(("first", "last"), layers, strict=True)
    return f"{{{','.join(f'num_layers_in_{end}_pipeline_stage:{number}' for end, number in ends)}}}"


def _if_fp8(write: Write) -> Write:
    """Write only where generation has FP8 weights: it then samples from a different policy than the trained one, so
    each token gets an importance weight."""
    return lambda source, row: write(source, row) if source.plan.facts.generation_weights else None


def _write_reward_model(source: ExportInput, row: Row) -> ConfigValue | KeyValue:
    """Write True if a reward model scores, False if a function does."""
    has_model = source.reward_function is None
    return KeyValue(row.key, True, "placements.reward_score") if has_model else False


def _has_reward_pool(source: ExportInput, _row: Row) -> ConfigValue:
    return source.plan.choice("reward_score", "pool") != source.plan.choice("actor_train", "pool")


def _on_reward_pool(write: Write) -> Write:
    """Write only where the reward model has a pool of its own."""
    return writes.with_reward_model(lambda source, row: write(source, row) if _has_reward_pool(source, row) else None)


def _write_estimator(source: ExportInput, _row: Row) -> ConfigValue:
    has_baseline = isinstance(source.settings, Reinforce) and source.settings.group_baseline
    return "reinforce_plus_plus_baseline" if has_baseline else _ESTIMATOR_NAMES[source.algorithm]


def _has_kl(*, in_loss: bool) -> Write:
    """Write whether the KL penalty is in the loss (`in_loss`), as in GRPO, or in the reward, as in other algorithms."""
    return lambda source, _row: Role.REF in source.plan.graph.roles and (source.algorithm == "grpo") is in_loss


def _write_kl(*, in_loss: bool) -> Write:
    """Write the coefficient of the KL penalty, only for the place (loss or reward) where the algorithm has it."""
    has_kl = _has_kl(in_loss=in_loss)
    return lambda source, row: getattr(source.settings, row.setting, None) if has_kl(source, row) else None


def _write_loss_mean(source: ExportInput, _row: Row) -> ConfigValue:
    settings = source.settings
    return _LOSS_MEAN_NAMES[settings.loss_mean] if isinstance(settings, CriticFreeSettings) else None


# The table


def _read_critic_warmup(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """The steps of the critic alone: verl counts steps from 1 and updates the actor from step critic_warmup on."""
    yield from setup.setting(row.setting, max(0, setup.config.integer(row.key) - 1), row.key)


def _write_critic_warmup(source: ExportInput, row: Row) -> ConfigValue:
    """The first step, counted from 1, that updates the actor; 0 without steps of the critic alone."""
    steps: int | None = getattr(source.settings, row.setting, None)
    return steps + 1 if steps else steps


def _model_rows(model: str) -> tuple[Row, ...]:
    """The rows of a trained model's degrees, offload and recomputation."""
    stage, prefix = _MODEL_STAGES[model][-1], f"{model}.megatron"
    override, schedule = f"{prefix}.override_transformer_config", f"placements.{stage}.schedule"
    optimizer, weights = _write_offload(stage, Offload.OPTIMIZER), _write_offload(stage, Offload.WEIGHTS)
    return (
        *_degree_rows(model),
        *end_layer_rows(stage, f"+{override}"),
        Row(f"{prefix}.optimizer_offload", f"{schedule}.offload", _read_optimizer_offload(model), optimizer),
        Row(_cpu_offload(model), f"{schedule}.offload", None, None, "read with optimizer_offload"),
        Row(f"{prefix}.param_offload", f"{schedule}.offload", None, weights),
        Row(
            f"{override}.recompute_granularity",
            f"{schedule}.recompute",
            _read_recompute(model),
            writes.recomputation(stage),
        ),
        Row(f"{override}.recompute_method", f"{schedule}.recompute", None, writes.if_recomputing_all(stage, "uniform")),
        Row(f"{override}.recompute_num_layers", f"{schedule}.recompute", None, writes.if_recomputing_all(stage, 1)),
    )


def _degree_rows(model: str) -> tuple[Row, ...]:
    stage, prefix = _MODEL_STAGES[model][-1], f"{model}.megatron"
    vpp = Row(f"{prefix}.{_DEGREES['vpp']}", f"placements.{stage}.layout.vpp", None, None, "read with tp")
    return (*degree_rows(stage, prefix, _read_layout(model)), vpp)


def _overlong_rows(prefix: str) -> tuple[Row, ...]:
    """The rows of DAPO's penalty for overlong responses, below its present or its former prefix."""
    length, penalty = f"{prefix}.len", f"{prefix}.penalty_factor"
    read_length = _if_set(f"{prefix}.enable", reads.overlong_tokens)
    read_penalty = _if_set(f"{prefix}.enable", reads.overlong_penalty(length))
    return (
        Row(f"{prefix}.enable", "setting: overlong_tokens", None, None, "whether the two below are read"),
        Row(length, "setting: overlong_tokens", read_length, None),
        Row(penalty, "setting: overlong_penalty", read_penalty, None),
    )


def _adapter_rows(prefix: str, instead_of: str | None = None) -> tuple[Row, ...]:
    """The rows of an adapter's rank and alpha; they are not read where the key `instead_of` gives the rank."""

    def is_read(setup: TrainingSetup) -> bool:
        return instead_of is None or not setup.config.value(instead_of)

    return (
        Row(f"{prefix}rank", "job: models.actor.adapter.rank", reads.if_(is_read, reads.adapter_rank), None),
        Row(
            f"{prefix}alpha",
            "job: models.actor.adapter.alpha",
            reads.if_(is_read, reads.adapter_alpha(f"{prefix}rank")),
            None,
        ),
    )


_BYPASS = "algorithm.rollout_correction.bypass_mode"
"""The key that takes the old log-probabilities from the generator (verl/trainer/ppo/rollout_corr_helper.py)."""
_LOGPROB = "placements.actor_logprob.schedule"
_GENERATION = f"placements.{GENERATE}"
_TRAIN_POOL, _GENERATION_POOL, _SCORE_POOL = (
    f"pools: the pool of {stage}" for stage in ("actor_train", GENERATE, "reward_score")
)

TABLE = (
    Row("model_engine", "rule: degrees of pipeline and experts are Megatron's",
        None, writes.always("megatron"), "an import reads degrees and micro-batches only of Megatron"),
    Row(_STRATEGY, "rule: degrees of pipeline and experts are Megatron's",
        None, None, "another name of model_engine"),
    # batches and lengths
    Row("data.train_batch_size", "facts.workload: batch_size / group_size",
        reads.batch_size("actor_rollout_ref.rollout.n"), writes.num_prompts),
    Row("data.max_prompt_length", "facts.workload.prompt.max"),
    Row("data.max_response_length", "facts.workload.response.max"),
    Row("actor_rollout_ref.actor.ppo_mini_batch_size", "facts.workload.num_minibatches",
        reads.minibatches(lambda setup: setup.config.integer("data.train_batch_size"), "prompts"),
        writes.minibatch_prompts("actor_train")),
    Row("actor_rollout_ref.actor.ppo_epochs", "facts.workload.num_epochs"),
    Row("critic.ppo_mini_batch_size", "facts.workload.num_minibatches",
        None, writes.minibatch_prompts("critic_train"), "a critic has as many minibatches as the actor"),
    Row("critic.ppo_epochs", "facts.workload.num_epochs", None, writes.with_stage("critic_train", write_field)),
    # pools
    Row("trainer.nnodes", _TRAIN_POOL, _read_pools, writes.number_of_nodes("actor_train")),
    Row("trainer.n_gpus_per_node", _TRAIN_POOL,
        None, writes.ranks_of_node("actor_train"), "read with trainer.nnodes"),
    Row("trainer.v1.trainer_mode", f"{_GENERATION}.steps_ahead", _read_steps_ahead, _write_trainer_mode),
    Row("actor_rollout_ref.hybrid_engine", "pools: no engine on the ranks that train",
        None, writes.one_ahead(writes.always(False))),
    Row("actor_rollout_ref.rollout.nnodes", _GENERATION_POOL,
        None, writes.one_ahead(writes.number_of_nodes(GENERATE)), "read with trainer.nnodes"),
    Row("actor_rollout_ref.rollout.n_gpus_per_node", _GENERATION_POOL,
        None, writes.one_ahead(writes.ranks_of_node(GENERATE)), "read with trainer.nnodes"),
    Row("trainer.v1.separate_async.parameter_sync_step", "rule: batch = parameter_sync_step x mini-batch",
        None, writes.one_ahead(writes.of_plan(lambda plan: plan.facts.workload.num_minibatches))),
    Row("trainer.v1.sampler.max_off_policy_threshold", "staleness",
        None, writes.one_ahead(writes.of_plan(lambda plan: plan.ahead[GENERATE] + 1))),
    Row("actor_rollout_ref.rollout.checkpoint_engine.backend", "rule: separate_async excludes naive",
        None, writes.one_ahead(writes.always("nccl"))),
    # degrees, offload and recomputation of each model
    *_model_rows("actor_rollout_ref.actor"),
    *_model_rows("critic"),
    *_degree_rows("actor_rollout_ref.ref"),
    Row("actor_rollout_ref.ref.megatron.override_transformer_config", "placements.ref_logprob.layout.pp",
        None, writes.with_stage("ref_logprob", _write_reference_layers), "verl's default is that of the actor"),
    Row("actor_rollout_ref.ref.megatron.param_offload", "placements.ref_logprob.schedule.offload",
        _if_trained("actor_rollout_ref.ref", _read_weight_offload), _write_offload("ref_logprob", Offload.WEIGHTS)),
    # micro-batches: verl does not pass the critic's number of rows on to its worker (trainer_base.py), so the critic
    # is given a token budget, and its forward passes have the budget of its training
    Row("actor_rollout_ref.actor.use_dynamic_bsz", "rule: micro-batches are packed", None, writes.always(True)),
    Row("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", "rule: micro-batches are packed",
        None, None, "tokens or rows are read"),
    Row("actor_rollout_ref.ref.log_prob_use_dynamic_bsz", "rule: micro-batches are packed",
        None, None, "tokens or rows are read"),
    Row("critic.use_dynamic_bsz", "rule: verl does not pass the critic's rows to its worker",
        None, writes.with_stage("critic_train", writes.always(True))),
    Row("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "placements.actor_train.schedule.micro_batch_tokens",
        _read_micro_batch("actor_train"), writes.budget("actor_train")),
    Row("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "placements.actor_train.schedule.micro_batch_size",
        _read_micro_batch("actor_train"), None),
    Row("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", f"{_LOGPROB}.micro_batch_tokens",
        _read_micro_batch("actor_logprob"), writes.budget("actor_logprob")),
    Row("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", f"{_LOGPROB}.micro_batch_size",
        _read_micro_batch("actor_logprob"), None),
    Row("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "placements.ref_logprob.schedule.micro_batch_tokens",
        _read_micro_batch("ref_logprob"), writes.budget("ref_logprob")),
    Row("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "placements.ref_logprob.schedule.micro_batch_size",
        _read_micro_batch("ref_logprob"), None),
    Row("critic.ppo_max_token_len_per_gpu", "placements.critic_train.schedule.micro_batch_tokens",
        _read_micro_batch("critic_train"), writes.budget("critic_train")),
    Row("critic.forward_max_token_len_per_gpu", "placements.critic_train.schedule.micro_batch_tokens",
        _read_micro_batch("critic_value"), writes.budget("critic_train"), "read as that of critic_value"),
    Row("critic.ppo_micro_batch_size_per_gpu", "placements.critic_train.schedule.micro_batch_size",
        _read_micro_batch("critic_value", "critic_train"), None, "read as that of critic_value too"),
    # generation
    Row("actor_rollout_ref.rollout.name", "facts.engine", _read_engine),
    Row("actor_rollout_ref.rollout.n", "facts.workload.group_size", reads.group_size),
    Row("actor_rollout_ref.rollout.tensor_model_parallel_size", f"{_GENERATION}.layout.tp", _read_engine_tp),
    Row("actor_rollout_ref.rollout.pipeline_model_parallel_size", f"{_GENERATION}.layout.pp", _read_engine_pp, None),
    Row("actor_rollout_ref.rollout.data_parallel_size", f"{_GENERATION}.layout.ep",
        None, writes.engine_experts(times_tp=False)),
    Row("actor_rollout_ref.rollout.expert_parallel_size", "rule: expert = tensor x data of an engine",
        None, writes.engine_experts(times_tp=True)),
    Row("actor_rollout_ref.rollout.max_num_seqs", f"{_GENERATION}.schedule.generation_slots"),
    *writes.ngram_rows("+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config", engine=VLLM),
    Row("+actor_rollout_ref.rollout.engine_kwargs.sglang.speculative_algorithm", writes.DRAFT_TOKENS,
        None, writes.if_drafts(lambda _: "NGRAM", SGLANG)),
    Row("+actor_rollout_ref.rollout.engine_kwargs.sglang.speculative_num_draft_tokens", writes.DRAFT_TOKENS,
        None, writes.if_drafts(lambda draft_tokens: draft_tokens + 1, SGLANG), "the last token and the draft"),
    Row("actor_rollout_ref.rollout.gpu_memory_utilization", f"{_GENERATION}: its weights and cache",
        reads.memory_share, writes.of_plan(engine_memory_share)),
    Row("actor_rollout_ref.rollout.max_model_len", "facts.workload: prompt.max + response.max",
        None, writes.max_tokens),
    Row("actor_rollout_ref.rollout.max_num_batched_tokens", writes.VLLM_RULE, None, writes.vllm_argument),
    Row("actor_rollout_ref.rollout.enable_chunked_prefill", writes.VLLM_RULE, None, writes.vllm_argument),
    Row("actor_rollout_ref.rollout.enable_prefix_caching", writes.VLLM_RULE, None, writes.vllm_argument),
    Row("actor_rollout_ref.rollout.enforce_eager", writes.VLLM_RULE, None, writes.vllm_argument),
    Row("actor_rollout_ref.rollout.quantization", "facts.generation_weights", _read_fp8, _if_fp8(write_field)),
    Row("algorithm.rollout_correction.rollout_is", "rule: tokens sampled in FP8 get importance weights",
        None, writes.old_logprobs_from("recompute", _if_fp8(writes.always("token")))),
    Row("algorithm.rollout_correction.rollout_is_threshold", "setting: importance_cap",
        None, writes.old_logprobs_from("recompute", _if_fp8(write_field))),
    Row(_BYPASS, "facts.old_logprobs",
        reads.old_logprobs, writes.old_logprobs_from("generator", writes.always(True))),
    Row("actor_rollout_ref.rollout.calculate_log_probs", "facts.old_logprobs",
        None, writes.old_logprobs_from("generator", writes.always(True)), "bypass_mode needs it"),
    # rewards
    Row("reward.reward_model.enable", "job: rewards",
        None, _write_reward_model, "whether a reward model or a function scores"),
    Row("reward_model.enable", "job: rewards", None, None, "its former name"),
    Row("reward.custom_reward_function.path", "job: rewards.function",
        reads.function_reward, writes.with_function(writes.always(HOOK_FILE))),
    Row("custom_reward_function.path", "job: rewards.function", reads.function_reward, None, "its former name"),
    Row("reward.reward_manager.name", "job: rewards.function",
        reads.function_reward, None, "verl's own checks of answers, where the user has no function"),
    Row("reward.custom_reward_function.name", f"rule: the function in {HOOK_FILE}",
        None, writes.with_function(writes.always("compute_score"))),
    Row("reward.reward_model.model_path", "job: models.reward.path",
        _read_reward_path, writes.with_reward_model(writes.model_path(Role.REWARD))),
    Row("reward_model.model.path", "job: models.reward.path", _read_reward_path, None, "its former name"),
    Row("reward.reward_model.enable_resource_pool", _SCORE_POOL, None, writes.with_reward_model(_has_reward_pool)),
    Row("reward.reward_model.nnodes", _SCORE_POOL, None, _on_reward_pool(writes.number_of_nodes("reward_score"))),
    Row("reward.reward_model.n_gpus_per_node", _SCORE_POOL,
        None, _on_reward_pool(writes.ranks_of_node("reward_score"))),
    Row("reward.reward_model.rollout.name", "rule: the engine that is assumed",
        None, writes.with_reward_model(writes.always("vllm"))),
    Row("reward.reward_model.rollout.tensor_model_parallel_size", "placements.reward_score.layout.tp",
        _read_reward_degrees, writes.with_reward_model(write_field)),
    Row("reward.reward_model.rollout.pipeline_model_parallel_size", "placements.reward_score.layout.pp",
        None, None, "read as 1"),
    # models and the algorithm
    Row("actor_rollout_ref.model.path", "job: models.actor.path",
        reads.models(Role.ACTOR, Role.REF), writes.model_path(Role.ACTOR)),
    Row("critic.model.path", "job: models.critic.path", reads.models(Role.CRITIC), writes.model_path(Role.CRITIC)),
    Row("critic.enable", "job: algorithm", None, writes.of_plan(lambda plan: Role.CRITIC in plan.graph.roles)),
    Row(_ESTIMATOR, "job: algorithm", reads.estimator, _write_estimator),
    Row("algorithm.use_kl_in_reward", "job: algorithm and models.ref", None, _has_kl(in_loss=False)),
    Row("actor_rollout_ref.actor.use_kl_loss", "job: algorithm and models.ref", None, _has_kl(in_loss=True)),
    Row("actor_rollout_ref.actor.kl_loss_coef", "setting: kl_coefficient", reads.kl_penalty, _write_kl(in_loss=True)),
    Row("algorithm.kl_ctrl.kl_coef", "setting: kl_coefficient", reads.kl_penalty, _write_kl(in_loss=False)),
    Row("algorithm.gamma", "setting: gamma"),
    Row("algorithm.lam", "setting: gae_lambda"),
    Row("actor_rollout_ref.actor.optim.lr", "setting: actor_learning_rate"),
    Row("critic.optim.lr", "setting: critic_learning_rate"),
    Row("critic.cliprange_value", "setting: value_clip"),
    Row("trainer.critic_warmup", "setting: critic_warmup_steps", _read_critic_warmup, _write_critic_warmup),
    Row("actor_rollout_ref.actor.entropy_coeff", "setting: entropy_coefficient"),
    Row("actor_rollout_ref.rollout.temperature", "setting: temperature"),
    Row("algorithm.norm_adv_by_std_in_grpo", "setting: normalise_by_std", reads.flag),
    Row("actor_rollout_ref.actor.clip_ratio_low", "job: clip_ratio", reads.number("clip_ratio"), writes.clip_low),
    Row("actor_rollout_ref.actor.clip_ratio_high", "job: clip_ratio_high, or clip_ratio",
        reads.number("clip_ratio_high"), writes.clip_high),
    Row("actor_rollout_ref.actor.loss_agg_mode", "job: loss_mean", reads.loss_mean(LOSS_MEANS), _write_loss_mean),
    Row("actor_rollout_ref.actor.policy_loss.loss_mode", "job: algorithm",
        None, None, "read as PPO's clip, with a note"),
    Row("distillation.enabled", "job: algorithm", None, None, "an import refuses it"),
    # settings that are read and not written
    Row("actor_rollout_ref.actor.optim.weight_decay", "setting: weight_decay", write=None),
    Row("actor_rollout_ref.actor.optim.clip_grad", "setting: max_grad_norm", write=None),
    Row("actor_rollout_ref.rollout.top_p", "setting: top_p", reads.top_p, None),
    Row("actor_rollout_ref.rollout.top_k", "setting: top_k", reads.top_k, None),
    Row("actor_rollout_ref.actor.optim.lr_warmup_steps", "setting: actor_schedule",
        reads.warmup_steps(Role.ACTOR), None),
    Row("critic.optim.lr_warmup_steps", "setting: critic_schedule", reads.warmup_steps(Role.CRITIC), None),
    *_overlong_rows("reward.reward_kwargs.overlong_buffer_cfg"),
    *_overlong_rows("reward_model.reward_kwargs.overlong_buffer_cfg"),
    *_adapter_rows("actor_rollout_ref.model.lora."),
    *_adapter_rows("actor_rollout_ref.model.lora_", instead_of="actor_rollout_ref.model.lora.rank"),
)  # fmt: skip
"""verl's keys and the fields of a job or plan, in the order of an export."""


def _files(source: ExportInput, settings: Sequence[KeyValue]) -> Mapping[str, str]:
    head = "Runs verl with this plan. Give data.train_files and data.val_files as arguments of this script."
    command = script(head, "python3 -m verl.trainer.main_ppo", overrides(settings))
    return {"run.sh": command, **reward_hook("verl", source)}


VERL = OtherTrainer(
    name="verl",
    key_file="verl",
    algorithms=tuple(_ESTIMATOR_NAMES),
    engine="vllm",
    other_engines=("sglang",),
    supports_fp8=True,
    old_logprobs={"generator": tuple(_ESTIMATOR_NAMES)},
    modes=deployment_modes,
    settings=partial(write_table, TABLE),
    files=_files,
    remarks=(
        "a plan names no data: set data.train_files and data.val_files yourself.",
        "log-probabilities and values are computed with the degrees of their model's training.",
    ),
)


def read_verl(path: Path, changed: Mapping[str, Any] | None = None) -> ParsedConfig:
    """Read the configuration in a file; `changed` are keys with values that override its own.

    Raises BadInput naming a key that a job cannot express.
    """
    setup = _training_setup(read_overrides(path, known_keys("verl"), changed=changed))
    return read_table(TABLE, setup, trainer="verl", notes=_notes, unused=_unused_keys)


def _notes(setup: TrainingSetup, fields: Sequence[ParsedField]) -> Iterator[str]:
    config, is_megatron = setup.config, _is_megatron(setup.config)
    if not is_megatron:
        yield (
            "model_engine is not megatron: FSDP sharding is not modelled, so the search chooses layouts and "
            "micro-batches."
        )
    if config.value("trainer.v1.trainer_mode") == "colocate_async":
        yield "trainer.v1.trainer_mode=colocate_async is read as sync; the overlap of its stages is not modelled."
    yield from setup.notes()
    yield from _loss_notes(config)
    yield from single_sample_notes(config, _ESTIMATOR, _ESTIMATORS, f"{_R}.n")
    if is_megatron:
        yield from _expert_notes(setup)
        yield from _free_micro_batch_notes(setup, fields)


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
    if not setup.stages("actor_logprob"):
        yield f"{_R}.log_prob_*"
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


def _training_setup(config: TrainerConfig) -> TrainingSetup:
    """Return the algorithm, its models and its reward; as in verl (trainer/ppo/utils.py), a KL penalty needs a
    reference model.

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
        old_logprobs="generator" if config.value(_BYPASS) else "recompute",
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
        yield f"{_A}.actor.policy_loss.loss_mode={mode}: a job clips each token's ratio as PPO, at the same cost."
    if config.value(key) not in LOSS_MEANS:
        yield f"{key}={config.value(key)} is not a loss aggregation that a job can have; the job keeps its default."


def _free_micro_batch_notes(setup: TrainingSetup, fields: Sequence[ParsedField]) -> Iterator[str]:
    """Yield a sentence for each stage whose micro-batch size no key sets."""
    known = {field.what for field in fields}
    for stages in _MODEL_STAGES.values():
        for stage in setup.stages(*stages):
            if not {f"{stage}.micro_batch_size", f"{stage}.micro_batch_tokens"} & known:
                yield f"{stage}: no key gives the rows or tokens of its micro-batch on a rank; the search chooses them."
