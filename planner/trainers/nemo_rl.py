"""NeMo-RL: export of plans to its configuration, and import from a YAML file over the base files of its `defaults`.

Megatron-core trains the policy and the value model, vLLM generates, and a PyTorch worker runs the reward model. The
reference and log-probability stages have the parallel degrees of the policy, and the value stage those of the value
model; both models train on the same ranks. Generation runs on these ranks too or on ranks of its own, which are whole
nodes if the cluster has several. If it runs one batch ahead, it needs its own ranks, the asynchronous engine and the
importance sampling correction (examples/configs/ppo_math_1B.yaml). A reward model is an environment on its own ranks,
with tensor parallelism alone; a reward function is an environment that a program registers.

`TABLES` has a row for each key. The functions above it read and write the rows that only NeMo-RL has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from meshwright.planner.job.algorithm_settings import CriticFreeSettings
from meshwright.planner.job.job import Facts
from meshwright.planner.trainers import reads, writes
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
    HOOK_MODULE,
    engine_memory_share,
    mini_batch,
    nested_yaml,
    reward_hook,
    script,
)
from meshwright.planner.trainers.megatron_rows import MEGATRON_SIZES, degree_rows, end_layer_rows
from meshwright.planner.trainers.parsed_config import (
    GRPO_ESTIMATOR,
    MATHS,
    PPO_ESTIMATOR,
    REINFORCE_BASELINE_ESTIMATOR,
    REINFORCE_ESTIMATOR,
    USER_FUNCTION,
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
from meshwright.planner.trainers.table import (
    STEPS_AHEAD,
    Read,
    Row,
    Write,
    read_field,
    read_table,
    write_field,
    write_table,
)
from meshwright.planner.trainers.trainer import ConfigValue, ExportInput, KeyValue, OtherTrainer
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute
from meshwright.profiles.stages import GENERATE, Role

_GENERATION = "policy.generation"
_REWARD_MODEL = "env.reward_model"
_ON_POLICY = "loss_fn.force_on_policy_ratio"
"""The key that takes old log-probabilities from the forward pass of the only update (nemo_rl/algorithms/grpo.py)."""
_FUNCTION_KEY = f"env.{HOOK_MODULE}.function"
"""Records the reward function in an exported configuration, so that an import finds it; NeMo-RL ignores this key."""
_ESTIMATORS: Mapping[str, Estimator] = {
    "gae": PPO_ESTIMATOR,
    "grpo": GRPO_ESTIMATOR,
    "reinforce_plus_plus": REINFORCE_ESTIMATOR,
}
_DEFAULTS = ("grpo_math_1B.yaml", "ppo_math_1B.yaml")
"""Base files whose values are known here, even if the file is absent."""

_OTHER_PREFIXES = ("dpo.", "sft.", "distillation.", "teacher.", "teachers.", "rm.", "eval.")
"""Prefixes of keys that configure training other than reinforcement learning."""

_GRPO_FILES = re.compile(r"grpo|dapo|cispo|gspo|prorl")
"""Names of base files whose loss or sampling is a variant of GRPO; they configure the same program."""
_OTHER_FILES = re.compile(r"^(dpo|sft|distillation|rm|eval)\b|^(dpo|sft|distillation|rm)_")
"""Names of files that configure training other than reinforcement learning."""

_PRECISIONS = {
    "policy.precision": ("bfloat16",),
    "value.precision": ("bfloat16", None),
    f"{_GENERATION}.vllm_cfg.precision": ("bfloat16", "fp8"),
}
"""Precisions that a job can have, by key."""

_STAGES = {"policy": ("actor_train", "actor_logprob", "ref_logprob"), "value": ("critic_train", "critic_value")}


def deployment_modes(facts: Facts) -> Iterator[DeploymentMode]:
    """Yield the ways in which NeMo-RL can place the stages: generation on the ranks that train, or one batch ahead on
    its own ranks; a reward model always has its own ranks."""
    on_train_pool = tuple(name for name in ppo_stages() if name != "reward_score")
    if facts.rewards:
        all_pool = all_ranks(facts.cluster)
        yield _mode("colocated", (*on_pool(all_pool, on_train_pool), *on_pool(all_pool, (GENERATE,))))
        for train, generate in pool_divisions(facts.cluster, 2):
            pool_pins = (*on_pool(train, on_train_pool), *on_pool(generate, (GENERATE,)))
            yield _mode(f"async, {generate} generates", pool_pins, steps_ahead=ONE_AHEAD)
        return
    for train, score in pool_divisions(facts.cluster, 2):
        yield _mode("colocated", (*on_pool(train, (GENERATE, *on_train_pool)), *on_pool(score, ("reward_score",))))
    for train, generate, score in pool_divisions(facts.cluster, 3):
        pool_pins = (
            *on_pool(train, on_train_pool),
            *on_pool(generate, (GENERATE,)),
            *on_pool(score, ("reward_score",)),
        )
        yield _mode(f"async_ppo, {generate} generates", pool_pins, steps_ahead=ONE_AHEAD)


def _mode(name: str, pool_pins: tuple[str, ...], *, steps_ahead: int = 0) -> DeploymentMode:
    return DeploymentMode(
        name=name,
        pins=(
            *pool_pins,
            *no_overlap(has_drafts=True),
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


# Functions that read rows which only NeMo-RL has


def _is_megatron(config: TrainerConfig) -> bool:
    """True if Megatron-core trains.

    Its key decides. Without that key, the names of absent base files decide, then whether any key of Megatron is set;
    if no base file is absent, the default of the key does.
    """
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


def _if_trained(model: str, read: Read) -> Read:
    """Read a key of a model only where Megatron-core trains and the job has the model."""
    stages = _STAGES[model]
    return reads.if_(lambda setup: _is_megatron(setup.config) and bool(setup.stages(*stages)), read)


def _has_reward_model(setup: TrainingSetup) -> bool:
    return setup.config.has(f"{_REWARD_MODEL}.model_name")


def _pools(config: TrainerConfig) -> Iterator[tuple[str, str]]:
    """Yield the name of each pool and its ranks: those that the reward model and generation take from the cluster, and
    the remaining ranks, which train."""
    per_node = config.integer("cluster.gpus_per_node")
    num_ranks = config.integer("cluster.num_nodes") * per_node
    taken = {}
    if not config.value(f"{_GENERATION}.colocated.enabled"):
        taken["generate"] = _pool_size(config, f"{_GENERATION}.colocated.resources", per_node)
    if config.has(f"{_REWARD_MODEL}.model_name"):
        taken["score"] = _pool_size(config, f"{_REWARD_MODEL}.resources", per_node)
    if sum(taken.values()) >= num_ranks:
        raise BadInput(f"cluster.num_nodes={config.value('cluster.num_nodes')} leaves no rank to train; give it more.")
    yield from consecutive_pools([("train", num_ranks - sum(taken.values())), *taken.items()])


def _pool_size(config: TrainerConfig, prefix: str, per_node: int) -> int:
    return config.integer_or(f"{prefix}.num_nodes", 1) * config.integer_or(f"{prefix}.gpus_per_node", per_node)


def _num_train_ranks(config: TrainerConfig) -> int:
    return int(dict(_pools(config))["train"].partition(":")[2])


def _read_pools(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the cluster and the pool of every stage."""
    config, per_node_key = setup.config, "cluster.gpus_per_node"
    pools = dict(_pools(config))
    for what, key in (("nodes", row.key), ("ranks_per_node", per_node_key)):
        yield ParsedField(f"cluster.{what}", config.integer(key), (key,))
    keys = (f"{_GENERATION}.colocated.enabled", f"{_GENERATION}.colocated.resources.num_nodes")
    yield ParsedField(f"{GENERATE}.pool", pools.get("generate", pools["train"]), keys)
    if setup.reward is None:
        yield ParsedField(
            "reward_score.pool", pools.get("score", pools["train"]), (f"{_REWARD_MODEL}.resources.num_nodes",)
        )
    for stage in setup.stages(*_STAGES["policy"], *_STAGES["value"]):
        yield ParsedField(f"{stage}.pool", pools["train"], (row.key, per_node_key))


def _layout(config: TrainerConfig, model: str, num_ranks: int) -> Layout:
    sp = bool(config.value(f"{model}.megatron_cfg.sequence_parallel"))
    return layout_of(_degrees(config, model), num_ranks, keys=_degree_keys(model), sp=sp)


def _degrees(config: TrainerConfig, model: str) -> dict[str, int]:
    return {axis: config.integer(key) for axis, key in _degree_keys(model).items()}


def _degree_keys(model: str) -> dict[str, str]:
    return {axis: f"{model}.megatron_cfg.{name}" for axis, name in MEGATRON_SIZES.items()}


def _expert_notes(setup: TrainingSetup) -> Iterator[str]:
    num_ranks = _num_train_ranks(setup.config)
    for model, stages in _STAGES.items():
        if setup.stages(*stages):
            degrees, layout = _degrees(setup.config, model), _layout(setup.config, model, num_ranks)
            yield from layout_notes(f"{model}.megatron_cfg.{MEGATRON_SIZES['ep']}", degrees, layout)


def _read_layout(model: str) -> Read:
    """Read the layout of a model's stages."""

    def read(setup: TrainingSetup, _row: Row) -> Iterator[ParsedField]:
        layout = _layout(setup.config, model, _num_train_ranks(setup.config))
        keys = tuple(_degree_keys(model).values())
        for stage in setup.stages(*_STAGES[model]):
            yield ParsedField(f"{stage}.layout", str(layout), keys)

    return _if_trained(model, read)


def _read_recompute(model: str) -> Read:
    """Read recomputation: full if activation checkpointing is on and no `recompute_granularity` is set."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        keys = (row.key, f"{model}.megatron_cfg.recompute_granularity")
        recompute = setup.config.value(keys[1]) or "full" if setup.config.value(keys[0]) else "none"
        yield ParsedField(f"{_STAGES[model][0]}.recompute", recompute, keys)

    return _if_trained(model, read)


def _read_offload(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    keys = (row.key, "policy.megatron_cfg.optimizer.optimizer_cpu_offload")
    offloaded = [bool(setup.config.value(key)) for key in keys]
    yield ParsedField("actor_train.offload", "optimizer" if any(offloaded) else "none", keys)


_PACKINGS = ("sequence_packing", "dynamic_batching")


def _packing(config: TrainerConfig, model: str) -> str | None:
    """The key of the method by which a model fills micro-batches up to a token cap; None if they have fixed rows."""
    return next((name for name in _PACKINGS if config.value(f"{model}.{name}.enabled")), None)


def _read_rows(model: str, *stages: str) -> Read:
    """Read the rows of a micro-batch, for a model without a token cap."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        if _packing(setup.config, model) is None:
            for stage in setup.stages(*stages):
                yield ParsedField(f"{stage}.micro_batch_size", setup.config.integer(row.key), (row.key,))

    return _if_trained(model, read)


def _read_token_cap(model: str, packing: str, *stages: str) -> Read:
    """Read the token cap of a micro-batch over a whole context-parallel group, for a model that packs in this way."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        if _packing(setup.config, model) == packing:
            keys = (row.key, f"{model}.{packing}.enabled")
            for stage in setup.stages(*stages):
                yield ParsedField(f"{stage}.micro_batch_tokens", setup.config.integer(row.key), keys)

    return _if_trained(model, read)


def _max_lengths(config: TrainerConfig) -> tuple[int, int]:
    """The maximum lengths of a prompt and of a response.

    If prompts may be as long as the whole sequence, their maximum is the sequence less the maximum response, or half
    the sequence if the response may fill it too.
    """
    total, response = (
        config.integer("policy.max_total_sequence_length"),
        config.integer(f"{_GENERATION}.max_new_tokens"),
    )
    prompt = config.integer("data.max_input_seq_length")
    if prompt >= total:
        prompt = max(1, total - response if response < total else total // 2)
    return prompt, min(response, total - prompt)


def _read_prompt(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    yield ParsedField("workload.prompt", _max_lengths(setup.config)[0], (row.key,))


def _read_response(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    keys = (row.key, "policy.max_total_sequence_length")
    yield ParsedField("workload.response", _max_lengths(setup.config)[1], keys)


def _num_sequences(group: str) -> Callable[[TrainingSetup], int]:
    """Return a function that reads the number of sequences of a step."""
    keys = (f"{group}.num_prompts_per_step", f"{group}.num_generations_per_prompt")
    return lambda setup: setup.config.integer(keys[0]) * setup.config.integer(keys[1])


def _read_steps_ahead(group: str) -> Read:
    """Read how many steps generation works ahead: at most one, even where the configuration allows more."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        if setup.config.value(f"{group}.async_{group}.enabled"):
            yield ParsedField(STEPS_AHEAD, min(setup.config.integer(row.key), 1), (row.key,))

    return read


def _read_reward_degrees(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    if _has_reward_model(setup):
        yield ParsedField("reward_score.tp", setup.config.integer(row.key), (row.key,))
        yield ParsedField("reward_score.pp", 1, (row.key,))


def _read_fp8(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    if setup.config.value(row.key) == "fp8":
        yield ParsedField("generation_weights", "fp8", (row.key,))


def _read_loss_mean(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    yield from setup.setting("loss_mean", "token" if setup.config.value(row.key) else "sequence", row.key)


def _read_normalise_by_std(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read whether advantages are divided by the standard deviation: from the newer of its two keys if that is set."""
    newer, older = "grpo.adv_estimator.normalize_rewards", "grpo.normalize_rewards"
    if row.key == (newer if setup.config.has(newer) else older):
        yield from setup.setting("normalise_by_std", bool(setup.config.value(row.key)), row.key)


# Functions that write rows which only NeMo-RL has


def _recomputes_all(stage: str) -> Write:
    return writes.with_stage(
        stage, writes.of_plan(lambda plan: plan.placement(stage).schedule.recompute is Recompute.FULL)
    )


def _write_packing(source: ExportInput, _row: Row) -> ConfigValue:
    return True if source.plan.placement("critic_train").layout.cp > 1 else None


def _write_offload(source: ExportInput, _row: Row) -> ConfigValue:
    return source.plan.placement("actor_train").schedule.offload is Offload.OPTIMIZER


def _write_environment(source: ExportInput, row: Row) -> ConfigValue | KeyValue:
    """Write the environment that scores: a reward model, or the one that calls the job's function."""
    if source.reward_function is None:
        return "reward_model"
    return KeyValue(row.key, HOOK_MODULE, "job: rewards.function")


def _write_logprob_rows(source: ExportInput, _row: Row) -> ConfigValue:
    """The rows of a micro-batch, equal in all stages that compute log-probabilities."""
    stages = [stage for stage in ("actor_logprob", "ref_logprob") if stage in source.plan.graph.by_name]
    return source.plan.placement(stages[0]).schedule.micro_batch_size if stages else None


def _write_kl(source: ExportInput, row: Row) -> ConfigValue | KeyValue:
    """Write the coefficient of the KL penalty, which is in the reward with PPO and in the loss with GRPO."""
    return (
        write_field(source, row)
        if Role.REF in source.plan.graph.roles
        else KeyValue(row.key, 0.0, "job: no models.ref")
    )


def _write_token_mean(source: ExportInput, _row: Row) -> ConfigValue:
    """Write whether the loss is averaged over tokens; write nothing for a mean that NeMo-RL does not have."""
    mean = source.settings.loss_mean if isinstance(source.settings, CriticFreeSettings) else None
    return {"token": True, "sequence": False}.get(mean or "")


def _write_engine_experts(source: ExportInput, _row: Row) -> ConfigValue:
    """Write the expert-parallel size of vLLM: the ranks of all replicas that together hold one copy of the experts."""
    layout = source.plan.placement(GENERATE).layout
    return layout.expert_replicas * layout.tp if layout.ep > 1 else None


# The table


def _model_rows(model: str) -> tuple[Row, ...]:
    """The rows of a model's degrees and recomputation."""
    stage, prefix = _STAGES[model][0], f"{model}.megatron_cfg"
    return (
        Row(
            f"{prefix}.enabled",
            "rule: degrees of pipeline and experts are Megatron's",
            None,
            writes.with_stage(stage, writes.always(True)),
        ),
        *degree_rows(stage, prefix, _read_layout(model)),
        *end_layer_rows(stage, prefix),
        Row(
            f"{prefix}.activation_checkpointing",
            f"placements.{stage}.schedule.recompute",
            _read_recompute(model),
            _recomputes_all(stage),
        ),
        Row(
            f"{prefix}.recompute_granularity",
            f"placements.{stage}.schedule.recompute",
            None,
            None,
            "read with activation_checkpointing",
        ),
    )


def _packing_rows(packing: str) -> tuple[Row, ...]:
    """The rows of token caps, with the key that enables them for the policy."""

    def tokens(model: str, kind: str, *stages: str) -> Row:
        field = f"placements.{stages[0]}.schedule.micro_batch_tokens"
        return Row(f"{model}.{packing}.{kind}_mb_tokens", field, _read_token_cap(model, packing, *stages), None)

    enabled = "rule: micro-batches are packed"
    return (
        Row(f"policy.{packing}.enabled", enabled, None, None, "whether tokens or rows are read"),
        tokens("policy", "train", "actor_train"),
        tokens("policy", "logprob", "actor_logprob", "ref_logprob"),
        tokens("value", "train", "critic_train"),
        tokens("value", "logprob", "critic_value"),
    )


def _adapter_rows(prefix: str, is_read: Callable[[TrainerConfig], bool]) -> tuple[Row, ...]:
    """The rows of an adapter's rank and alpha below a prefix."""
    return (
        Row(f"{prefix}.enabled", "job: models.actor.adapter", None, None, "whether the two below are read"),
        Row(
            f"{prefix}.dim",
            "job: models.actor.adapter.rank",
            reads.if_(lambda setup: is_read(setup.config), reads.adapter_rank),
            None,
        ),
        Row(
            f"{prefix}.alpha",
            "job: models.actor.adapter.alpha",
            reads.if_(lambda setup: is_read(setup.config), reads.adapter_alpha(f"{prefix}.dim")),
            None,
        ),
    )


def _has_peft(config: TrainerConfig) -> bool:
    return bool(config.value("policy.megatron_cfg.peft.enabled"))


def _has_lora(config: TrainerConfig) -> bool:
    return not _has_peft(config) and bool(config.value("policy.dtensor_cfg.lora_cfg.enabled"))


def _megatron_trains(setup: TrainingSetup) -> bool:
    return _is_megatron(setup.config)


def _dtensor_trains(setup: TrainingSetup) -> bool:
    return not _is_megatron(setup.config)


def _table(group: str) -> tuple[Row, ...]:
    """The rows of a configuration of one algorithm; `group` is the key prefix of the algorithm, `ppo` or `grpo`."""
    ahead, scored = f"placements.{GENERATE}.steps_ahead", "placements.reward_score"
    generation, generation_pool = f"placements.{GENERATE}", f"pools: the pool of {GENERATE}"
    is_grpo, shaping = group == "grpo", f"{group}.reward_shaping"
    if_shaped = partial(reads.if_, lambda setup: bool(setup.config.value(f"{shaping}.enabled")))
    return (
        # batches and lengths
        Row(f"{group}.num_prompts_per_step", "facts.workload: batch_size / group_size",
            reads.batch_size(f"{group}.num_generations_per_prompt"), writes.num_prompts),
        Row(f"{group}.num_generations_per_prompt", "facts.workload.group_size", reads.group_size),
        Row("ppo.ppo_epochs", "facts.workload.num_epochs",
            reads.if_(lambda setup: setup.algorithm == "ppo", read_field), None if is_grpo else write_field),
        Row("policy.train_global_batch_size", "facts.workload.num_minibatches",
            reads.minibatches(_num_sequences(group)), writes.of_plan(mini_batch)),
        Row("policy.max_total_sequence_length", "facts.workload: prompt.max + response.max",
            None, writes.max_tokens, "read with the lengths of prompt and response"),
        Row("data.max_input_seq_length", "facts.workload.prompt.max", _read_prompt),
        Row("policy.generation.max_new_tokens", "facts.workload.response.max", _read_response),
        # degrees and recomputation of each model
        *_model_rows("policy"),
        *_model_rows("value"),
        Row("value.sequence_packing.enabled", "rule: context parallelism of the value model packs",
            None, writes.with_stage("critic_train", _write_packing), "whether tokens or rows are read"),
        Row("value.dynamic_batching.enabled", "rule: micro-batches are packed",
            None, None, "whether tokens or rows are read"),
        # micro-batches and offload
        Row("policy.train_micro_batch_size", "placements.actor_train.schedule.micro_batch_size",
            _read_rows("policy", "actor_train")),
        Row("policy.logprob_batch_size", "placements.actor_logprob.schedule.micro_batch_size",
            _read_rows("policy", "actor_logprob", "ref_logprob"), _write_logprob_rows),
        Row("value.train_micro_batch_size", "placements.critic_train.schedule.micro_batch_size",
            _read_rows("value", "critic_train", "critic_value")),
        *(row for packing in _PACKINGS for row in _packing_rows(packing)),
        Row("policy.offload_optimizer_for_logprob", "placements.actor_train.schedule.offload",
            _if_trained("policy", _read_offload), _write_offload),
        Row("policy.megatron_cfg.optimizer.optimizer_cpu_offload", "placements.actor_train.schedule.offload",
            None, None, "read with policy.offload_optimizer_for_logprob"),
        # generation
        Row("policy.generation.vllm_cfg.tensor_parallel_size", f"{generation}.layout.tp"),
        Row("policy.generation.vllm_cfg.pipeline_parallel_size", f"{generation}.layout.pp"),
        Row("policy.generation.vllm_cfg.expert_parallel_size", "rule: a multiple of tensor's",
            None, _write_engine_experts),
        Row("policy.generation.vllm_cfg.gpu_memory_utilization", f"{generation}: its weights and cache",
            reads.memory_share, writes.of_plan(engine_memory_share)),
        Row("policy.generation.vllm_kwargs.max_num_seqs", f"{generation}.schedule.generation_slots",
            reads.if_given(read_field)),
        Row("policy.generation.vllm_kwargs.max_num_batched_tokens", writes.VLLM_RULE, None, writes.vllm_argument),
        Row("policy.generation.vllm_kwargs.enable_chunked_prefill", writes.VLLM_RULE, None, writes.vllm_argument),
        # Not enable_prefix_caching: NeMo-RL gives it to vLLM itself, and fails if vllm_kwargs has it a second time
        # (models/generation/vllm/vllm_worker.py)
        Row("policy.generation.vllm_cfg.enforce_eager", writes.VLLM_RULE, None, writes.vllm_argument),
        *writes.ngram_rows("policy.generation.vllm_kwargs.speculative_config"),
        Row("policy.generation.colocated.enabled", generation_pool,
            None, writes.of_plan(lambda plan: not plan.ahead[GENERATE]), "read with cluster.num_nodes"),
        Row(f"{group}.async_{group}.enabled", ahead,
            None, writes.of_plan(lambda plan: bool(plan.ahead[GENERATE])), "read with the next key"),
        Row(f"{group}.async_{group}.max_trajectory_age_steps", ahead,
            _read_steps_ahead(group), writes.one_ahead(writes.of_plan(lambda plan: plan.ahead[GENERATE]))),
        Row("policy.generation.colocated.resources.num_nodes", generation_pool,
            None, writes.one_ahead(writes.number_of_nodes(GENERATE)), "read with cluster.num_nodes"),
        Row("policy.generation.colocated.resources.gpus_per_node", generation_pool,
            None, writes.one_ahead(writes.ranks_of_node(GENERATE)), "read with cluster.num_nodes"),
        Row("policy.generation.vllm_cfg.async_engine", f"rule: async_{group} needs it",
            None, writes.one_ahead(writes.always(True))),
        Row("loss_fn.use_importance_sampling_correction", f"rule: async_{group} needs it",
            None, writes.one_ahead(writes.always(True))),
        Row("policy.generation.vllm_cfg.precision", "facts.generation_weights", _read_fp8, None),
        # rewards; NeMo-RL takes a function as an environment that the exported program registers
        Row("env.math.num_workers", "job: rewards.function", reads.function_reward, None),
        Row(_FUNCTION_KEY, "job: rewards.function", None, None, "read with data.default.env_name"),
        Row("data.default.env_name", scored, reads.function_reward, _write_environment),
        Row("env.reward_model.enabled", scored, None, writes.with_reward_model(writes.always(True))),
        Row("env.reward_model.model_name", "job: models.reward.path",
            reads.if_(_has_reward_model, reads.models(Role.REWARD)), writes.model_path(Role.REWARD)),
        Row("env.reward_model.batch_size", f"{scored}.schedule.micro_batch_size", None),
        Row("env.reward_model.max_model_len", "facts.workload", None, writes.with_reward_model(writes.max_tokens)),
        Row("env.reward_model.resources.num_nodes", "pools: the pool of reward_score",
            None, writes.number_of_nodes("reward_score"), "read with cluster.num_nodes"),
        Row("env.reward_model.resources.gpus_per_node", "pools: the pool of reward_score",
            None, writes.ranks_of_node("reward_score"), "read with cluster.num_nodes"),
        Row("env.reward_model.dtensor_cfg.tensor_parallel_size", f"{scored}.layout.tp", _read_reward_degrees),
        # models and the algorithm
        Row("policy.model_name", "job: models.actor.path",
            reads.models(Role.ACTOR, Role.REF), writes.model_path(Role.ACTOR)),
        Row("value.model_name", "job: models.critic.path", reads.models(Role.CRITIC), writes.model_path(Role.CRITIC)),
        Row(f"{group}.adv_estimator.name", "job: algorithm", reads.estimator, None),
        Row("policy.megatron_cfg.optimizer.lr", "setting: actor_learning_rate",
            reads.if_(_megatron_trains, read_field)),
        Row("policy.optimizer.kwargs.lr", "setting: actor_learning_rate", reads.if_(_dtensor_trains, read_field), None),
        Row("value.megatron_cfg.optimizer.lr", "setting: critic_learning_rate"),
        Row("ppo.adv_estimator.gae_lambda", "setting: gae_lambda"),
        Row("ppo.adv_estimator.gae_gamma", "setting: gamma"),
        Row(f"{group}.skip_reference_policy_logprobs_calculation", "placements.ref_logprob",
            None, writes.of_plan(lambda plan: Role.REF not in plan.graph.roles)),
        Row(f"{shaping}.enabled", f"rule: async_{group} excludes it, and no stage of the plan does it",
            None, writes.always(False)),
        Row(f"{group}.reward_scaling.enabled", f"job: {group}.reward_scale", None, writes.always(False)),
        Row("loss_fn.reference_policy_kl_penalty", "setting: kl_coefficient", reads.kl_penalty, _write_kl),
        Row("loss_fn.use_kl_in_reward", "placements.ref_logprob", None, writes.always(not is_grpo)),
        Row(_ON_POLICY, "facts.old_logprobs",
            reads.old_logprobs, writes.old_logprobs_from("training", writes.always(True))),
        Row(f"{group}.seq_logprob_error_threshold", "facts.old_logprobs", None,
            None, "null, its default, with force_on_policy_ratio"),
        Row("loss_fn.ratio_clip_min", "setting: clip_ratio"),
        Row("loss_fn.ratio_clip_max", "setting: clip_ratio", reads.number("clip_ratio_high"), writes.clip_high),
        Row("value_loss_fn.cliprange", "setting: value_clip"),
        Row("policy.generation.temperature", "setting: temperature"),
        Row("cluster.num_nodes", "facts.cluster.nodes", _read_pools),
        Row("cluster.gpus_per_node", "facts.cluster.ranks_per_node", None, note="read with cluster.num_nodes"),
        Row("grpo.adv_estimator.minus_baseline", "job: reinforce.group_baseline",
            None, None, "read with adv_estimator.name"),
        Row("grpo.use_leave_one_out_baseline", "rule: the baseline is the mean of the whole group",
            None, writes.always(False) if is_grpo else None, "read as the mean of the group, with a note"),
        Row("loss_fn.sequence_level_importance_ratios", "job: algorithm",
            None, None, "read as PPO's clip, with a note"),
        Row("policy.precision", "facts.precision", None, None, "read as bf16, with a note where it is another"),
        Row("value.precision", "facts.precision", None, None, "read as bf16, with a note where it is another"),
        # settings that are read and not written
        Row("policy.megatron_cfg.optimizer.weight_decay", "setting: weight_decay",
            reads.if_(_megatron_trains, read_field), None),
        Row("policy.optimizer.kwargs.weight_decay", "setting: weight_decay",
            reads.if_(_dtensor_trains, read_field), None),
        Row("policy.max_grad_norm", "setting: max_grad_norm", write=None),
        Row("policy.generation.top_p", "setting: top_p", reads.top_p, None),
        Row("policy.generation.top_k", "setting: top_k", reads.top_k, None),
        Row("policy.megatron_cfg.scheduler.lr_warmup_iters", "setting: actor_schedule",
            reads.if_(_megatron_trains, reads.warmup_steps(Role.ACTOR)), None),
        Row("value.megatron_cfg.scheduler.lr_warmup_iters", "setting: critic_schedule",
            reads.if_(_megatron_trains, reads.warmup_steps(Role.CRITIC)), None),
        Row(f"{shaping}.overlong_buffer_length", "setting: overlong_tokens", if_shaped(reads.overlong_tokens), None),
        Row(f"{shaping}.overlong_buffer_penalty", "setting: overlong_penalty",
            if_shaped(reads.overlong_penalty(f"{shaping}.overlong_buffer_length")), None),
        *_adapter_rows("policy.megatron_cfg.peft", _has_peft),
        *_adapter_rows("policy.dtensor_cfg.lora_cfg", _has_lora),
        Row("loss_fn.token_level_loss", "job: loss_mean", _read_loss_mean, _write_token_mean),
        Row("grpo.adv_estimator.normalize_rewards", "setting: normalise_by_std",
            _read_normalise_by_std, None, "instead of the next key"),
        Row("grpo.normalize_rewards", "setting: normalise_by_std",
            _read_normalise_by_std, write_field if is_grpo else None, "for a configuration of grpo"),
    )  # fmt: skip


TABLES = {group: _table(group) for group in ("ppo", "grpo")}
"""NeMo-RL's keys and the fields of a job or plan, in the order of an export, by the algorithm's key prefix."""


def settings(source: ExportInput) -> Iterator[KeyValue]:
    """The keys of NeMo-RL's configuration that express a plan. Raises BadInput for GRPO with several epochs."""
    group, epochs = _group(source), source.plan.facts.workload.num_epochs
    if group == "grpo" and epochs > 1:
        raise BadInput(f"workload.num_epochs={epochs}: NeMo-RL trains GRPO for one epoch in a step; use 1.")
    yield from write_table(TABLES[group], source)


def _group(source: ExportInput) -> str:
    return "grpo" if source.algorithm == "grpo" else "ppo"


def _files(source: ExportInput, settings: Sequence[KeyValue]) -> Mapping[str, str]:
    group, function = _group(source), source.reward_function
    base, example, config = f"{group}_math_1B_megatron.yaml", f"examples/run_{group}.py", "examples/configs/config.yaml"
    head = (
        "Runs NeMo-RL with this plan, from the root of its repository. Copy config.yaml into examples/configs first:\n"
        "the configuration that it builds on is there."
    )
    if function is None:
        return {
            "run.sh": script(head, f"uv run {example} --config {config}", ()),
            "config.yaml": f"defaults: {base}\n{nested_yaml(settings)}",
        }
    environment = KeyValue(_FUNCTION_KEY, function, "job: rewards.function")
    return {
        "run.sh": script(head, f'uv run "$(dirname "$0")/{_LAUNCHER}" --config {config}', ()),
        "config.yaml": f"defaults: {base}\n{nested_yaml([*settings, environment])}",
        _LAUNCHER: _LAUNCHER_TEXT.substitute(hook=HOOK_MODULE, example=example),
        **reward_hook("nemo-rl", source),
    }


_LAUNCHER = "run_with_reward.py"
_LAUNCHER_TEXT = Template('''\
"""Registers the environment of $hook.py with NeMo-RL, and runs $example with it."""

import os
import runpy
import sys
from pathlib import Path

from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.utils import register_env

ACTOR = "$hook.RewardEnvironment"
here = str(Path(__file__).resolve().parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))  # of the actor
ACTOR_ENVIRONMENT_REGISTRY[ACTOR] = PY_EXECUTABLES.SYSTEM
register_env("$hook", ACTOR)
sys.argv[0] = "$example"
runpy.run_path("$example", run_name="__main__")
''')
"""The program that runs NeMo-RL with the user's function, which NeMo-RL takes as a registered environment
(docs/guides/environments.md of its repository)."""


NEMO_RL = OtherTrainer(
    name="nemo-rl",
    key_file="nemo_rl",
    other_key_files=("nemo_rl_grpo",),
    algorithms=("ppo", "grpo"),
    old_logprobs={"training": ("grpo",)},
    engine="vllm",
    modes=deployment_modes,
    settings=settings,
    files=_files,
    remarks=(
        "the data set is that of the base file in config.yaml; set data.train and data.validation for another.",
        "dual clipping (loss_fn.ratio_clip_c) stays as in the base file in config.yaml.",
    ),
)


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
    is_grpo = any(key.startswith("grpo.") for key in config.values) or any(map(_GRPO_FILES.search, config.missing))
    if is_grpo:
        config = replace(config, known=known_keys("nemo_rl_grpo"))
    group = "grpo" if is_grpo else "ppo"
    setup = _training_setup(config, group)

    def notes(setup: TrainingSetup, _fields: Sequence[ParsedField]) -> Iterator[str]:
        return _notes(setup, group)

    return read_table(TABLES[group], setup, trainer="nemo-rl", notes=notes, unused=_unused_keys)


def _notes(setup: TrainingSetup, group: str) -> Iterator[str]:
    config = setup.config
    if not _is_megatron(config):
        yield (
            "policy.megatron_cfg is not enabled: FSDP sharding is not modelled, so the search chooses layouts and rows."
        )
    yield from setup.notes()
    yield from _config_notes(config)
    if _is_megatron(config):
        yield from _expert_notes(setup)
    key = f"{group}.async_{group}"
    if config.value(f"{key}.enabled") and (steps := config.integer(f"{key}.max_trajectory_age_steps")) > 1:
        yield f"{key}.max_trajectory_age_steps={steps} is read as 1: generation is one step ahead."


def _unused_keys(setup: TrainingSetup) -> Iterator[str]:
    """Patterns of keys that other keys make unused."""
    if _is_megatron(setup.config):
        yield from ("*.dtensor_cfg.*", "*.automodel_cfg.*", "policy.optimizer*", "value.optimizer*")
    else:
        yield "*.megatron_cfg.*"
    if not setup.has_ref:
        yield "loss_fn.reference_policy_kl_*"
    if not setup.stages("critic_train"):
        yield from ("value.*", "value_loss_fn.*")


def _other_training(config: TrainerConfig) -> str | None:
    """A key or base file that shows that a configuration is not for reinforcement learning; None if there is none."""
    for name in config.missing:
        if _OTHER_FILES.match(Path(name).name):
            return f"defaults: {name}"
    return next((key for key in config.values if key.startswith(_OTHER_PREFIXES)), None)


def _training_setup(config: TrainerConfig, group: str) -> TrainingSetup:
    """The algorithm of a configuration: its advantage estimator, whether there is a reference model, whether the KL
    penalty is in the loss or in the reward, and the reward function."""
    key, kl = f"{group}.adv_estimator.name", "loss_fn.reference_policy_kl_penalty"
    estimator = estimator_of(config, key, _ESTIMATORS)
    if estimator is REINFORCE_ESTIMATOR and config.value("grpo.adv_estimator.minus_baseline"):
        estimator = REINFORCE_BASELINE_ESTIMATOR
    has_ref = not config.value(f"{group}.skip_reference_policy_logprobs_calculation")
    in_reward = bool(config.value("loss_fn.use_kl_in_reward")) or estimator is PPO_ESTIMATOR
    is_on_policy = config.value(_ON_POLICY) and config.value(f"{group}.seq_logprob_error_threshold") is None
    return TrainingSetup(
        config=config,
        key=key,
        estimator=estimator,
        has_ref=has_ref,
        kl_in_loss=kl if has_ref and not in_reward else None,
        kl_in_reward=kl if in_reward and has_ref else None,
        reward=None if config.has(f"{_REWARD_MODEL}.model_name") else _function_reward(config),
        old_logprobs="training" if is_on_policy and not in_reward else "recompute",
    )


def _function_reward(config: TrainerConfig) -> FunctionReward:
    """The reward function of the job: the one that an export recorded, or else Meshwright's built-in check of answers
    in place of NeMo-RL's."""
    if config.value("data.default.env_name") == HOOK_MODULE:
        function = config.text(_FUNCTION_KEY) or USER_FUNCTION
        return FunctionReward(function, ("data.default.env_name", _FUNCTION_KEY))
    return FunctionReward(MATHS, ("env.math.num_workers",))


def _config_notes(config: TrainerConfig) -> Iterator[str]:
    for name in config.missing:
        if Path(name).name not in _DEFAULTS:
            yield f"defaults: {name} is not beside the configuration; its values are read from {config.known.source}."
    for key, known in _PRECISIONS.items():
        if (precision := config.value(key)) not in known:
            yield f"{key}={precision}: training and generation are costed in bf16, except generation with fp8."
    if config.value("loss_fn.sequence_level_importance_ratios"):
        yield "loss_fn.sequence_level_importance_ratios: a job clips each token's ratio as PPO, at the same cost."
    if config.value("grpo.use_leave_one_out_baseline"):
        yield "grpo.use_leave_one_out_baseline: the baseline of a job is the mean reward of the whole group."
    if config.integer("data.max_input_seq_length") >= config.integer("policy.max_total_sequence_length"):
        yield (
            "data.max_input_seq_length is not below policy.max_total_sequence_length: the longest prompt is read as "
            "the rest that the longest response leaves of the total, or as half of the total if that leaves nothing."
        )
