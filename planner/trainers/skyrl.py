"""SkyRL: export of plans to its configuration, and import from a script with its overrides.

Megatron-core trains, vLLM generates, and the environments of SkyRL-Gym score. The policy and the reference model have
degrees of their own; log-probabilities are computed with those of the policy's training. There are two placements.
Either all models and the engines share all ranks (`trainer.placement.colocate_all`), and each model is in host memory
while another one computes. Or the engines have their own ranks and generate one batch ahead
(examples/train/async/main_async.py of its repository), and the reference shares the policy's ranks or has its own. Only
the strategy fsdp trains a critic (train/utils/utils.py, validate_megatron_cfg); it is imported without its layouts.

`TABLE` has a row for each key. The functions above it read and write the rows that only SkyRL has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from meshwright.planner.job.algorithm_settings import GRPO, CriticFreeSettings
from meshwright.planner.job.job import DEFAULT_SETTINGS, SETTINGS_KEYS, Facts
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
)
from meshwright.planner.trainers.export_settings import (
    HOOK_MODULE,
    engine_memory_share,
    overrides,
    reward_hook,
    script,
)
from meshwright.planner.trainers.megatron_rows import MEGATRON_SIZES, degree_rows, end_layer_rows
from meshwright.planner.trainers.parsed_config import (
    GRPO_ESTIMATOR,
    MATHS,
    PPO_ESTIMATOR,
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
    nodes_of_ranks,
    single_sample_notes,
)
from meshwright.planner.trainers.table import STEPS_AHEAD, Read, Row, Write, read_table, write_field, write_table
from meshwright.planner.trainers.trainer import ConfigValue, ExportInput, KeyValue, OtherTrainer
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Recompute
from meshwright.profiles.stages import GENERATE, Role

_ALGORITHM, _PLACEMENT = "trainer.algorithm", "trainer.placement"
_POLICY, _REF = "trainer.policy.megatron_config", "trainer.ref.megatron_config"
_ENGINE, _SAMPLING = "generator.inference_engine", "generator.sampling_params"
_TRANSFORMER = f"{_POLICY}.transformer_config_kwargs"
_CPU_ADAM = f"{_POLICY}.optimizer_config_kwargs.optimizer_cpu_offload"
_SAMPLES, _ENVIRONMENT = "generator.n_samples_per_prompt", "environment.env_class"
_STAGES = {_POLICY: ("actor_train", "actor_logprob"), _REF: ("ref_logprob",)}
"""The stages of each model, by the prefix of the keys of its degrees."""
_TRAINED = ("actor_train", "actor_logprob", "ref_logprob")
_FORWARD = ("actor_logprob", "ref_logprob")

_ESTIMATOR = f"{_ALGORITHM}.advantage_estimator"
_ESTIMATOR_NAMES: Mapping[Algorithm, str] = {"grpo": "grpo", "rloo": "rloo", "reinforce++": "reinforce++"}
_ESTIMATORS: Mapping[str, Estimator] = {
    "gae": PPO_ESTIMATOR,
    "grpo": GRPO_ESTIMATOR,
    "rloo": RLOO_ESTIMATOR,
    "reinforce++": REINFORCE_ESTIMATOR,
}
_LOSS_MEANS: Mapping[object, str] = {
    "token_mean": "token",
    "token_mean_legacy": "token",
    "sequence_mean": "sequence",
    "seq_mean_token_sum_norm": "constant",
}
_LOSS_MEAN_NAMES = {"token": "token_mean", "sequence": "sequence_mean", "constant": "seq_mean_token_sum_norm"}
_PLAIN_LOSSES = ("regular", "dual_clip")
_MATHS_ENVIRONMENTS = ("gsm8k", "aime")


def deployment_modes(facts: Facts) -> Iterator[DeploymentMode]:
    """Yield the ways in which SkyRL can place the stages.

    Either all stages are on all ranks, or generation is one batch ahead on its own ranks, and the reference is on the
    policy's ranks or on its own.
    """
    everywhere = on_pool(all_ranks(facts.cluster), (GENERATE, *_TRAINED))
    yield _mode("colocate_all", everywhere, policy_offload="optimizer", ref_offload="weights")
    has_ref = "ref_logprob" in facts.graph.by_name
    for train, generate in pool_divisions(facts.cluster, 2):
        yield _mode(
            f"one step ahead, {generate} generates",
            (*on_pool(train, _TRAINED), *on_pool(generate, (GENERATE,))),
            policy_offload="optimizer" if has_ref else "none",
            ref_offload="weights",
            steps_ahead=ONE_AHEAD,
        )
    for train, score, generate in pool_divisions(facts.cluster, 3) if has_ref else ():
        yield _mode(
            f"one step ahead, {generate} generates, the reference on {score}",
            (
                *on_pool(train, _STAGES[_POLICY]),
                *on_pool(score, ("ref_logprob",)),
                *on_pool(generate, (GENERATE,)),
            ),
            policy_offload="none",
            ref_offload="none",
            steps_ahead=ONE_AHEAD,
        )


def _mode(
    name: str, pool_pins: tuple[str, ...], *, policy_offload: str, ref_offload: str, steps_ahead: int = 0
) -> DeploymentMode:
    return DeploymentMode(
        name=name,
        steps_ahead=steps_ahead,
        with_sp=_TRAINED,
        pins=(
            *pool_pins,
            *no_overlap(),
            f"{GENERATE}.cp=1",
            *pin_value("micro_batch_tokens", 0, _TRAINED),
            "actor_train.vpp=1",
            f"actor_train.offload={policy_offload}",
            f"ref_logprob.offload={ref_offload}",
        ),
        equal_choices=(
            *equal_choices("layout", "actor_train", ("actor_logprob",)),
            *equal_choices("layout", "ref_logprob", ("ref_logprob",)),
            *equal_choices("micro_batch_size", "actor_logprob", ("ref_logprob",)),
        ),
    )


# Functions that read rows which only SkyRL has


def _is_megatron(config: TrainerConfig) -> bool:
    return bool(config.value("trainer.strategy") == "megatron")


def _if_megatron(read: Read) -> Read:
    """Read a key only where Megatron trains."""
    return reads.if_(lambda setup: _is_megatron(setup.config), read)


def _pool_sizes(setup: TrainingSetup) -> dict[str, tuple[int, int]]:
    """The pools by name, as (nodes, ranks per node).

    Raises BadInput for engines that share the policy's ranks and do not take all of them.
    """
    config, colocated = setup.config, f"{_PLACEMENT}.colocate_all"
    sizes = {"policy": _placed(config, "policy")}
    degrees = ("num_engines", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    num_engine_ranks = math.prod(config.integer(f"{_ENGINE}.{name}") for name in degrees)
    if config.value(colocated):
        if num_engine_ranks != (num_ranks := math.prod(sizes["policy"])):
            raise BadInput(
                f"{_ENGINE}.num_engines={config.value(f'{_ENGINE}.num_engines')}: the engines have {num_engine_ranks} "
                f"ranks, and with {colocated}=true they share all {num_ranks} of the policy; make the numbers equal."
            )
        return sizes
    if setup.has_ref and not config.value(f"{_PLACEMENT}.colocate_policy_ref"):
        sizes["ref"] = _placed(config, "ref")
    if Role.CRITIC in setup.graph.roles:
        sizes["critic"] = _placed(config, "critic")
    return {**sizes, "generate": nodes_of_ranks(num_engine_ranks)}


def _placed(config: TrainerConfig, model: str) -> tuple[int, int]:
    return (
        config.integer(f"{_PLACEMENT}.{model}_num_nodes"),
        config.integer(f"{_PLACEMENT}.{model}_num_gpus_per_node"),
    )


def _read_pools(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the cluster and the pool of every stage."""
    sizes = _pool_sizes(setup)
    keys = (row.key, f"{_PLACEMENT}.policy_num_gpus_per_node")
    nodes, per_node = cluster_of(sizes)
    yield ParsedField("cluster.nodes", nodes, keys)
    yield ParsedField("cluster.ranks_per_node", per_node, keys)
    pools = dict(consecutive_pools((name, nodes * ranks) for name, (nodes, ranks) in sizes.items()))
    for stage in setup.graph.stages:
        if stage.role is not None:
            name = "generate" if stage.name == GENERATE else str(stage.role)
            yield ParsedField(f"{stage.name}.pool", pools.get(name, pools["policy"]), keys)


def _read_steps_ahead(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    yield ParsedField(STEPS_AHEAD, int(_is_asynchronous(setup.config)), (row.key,))


def _is_asynchronous(config: TrainerConfig) -> bool:
    """True if the engines generate ahead: by the program that is run, or by the key of a fully asynchronous run."""
    programs = (word for word in config.command if word.startswith("examples.") or word.endswith(".py"))
    is_program = any("async" in re.split(r"[./]", program.removesuffix(".py"))[-1].lower() for program in programs)
    return bool(config.value("trainer.fully_async.enabled")) or is_program


def _degrees(config: TrainerConfig, prefix: str) -> dict[str, int]:
    """The degrees of a model by axis; etp is 0, which means tp, where no key sets it."""
    return {axis: config.integer_or(key, int(axis != "etp")) for axis, key in _degree_keys(prefix).items()}


def _degree_keys(prefix: str) -> dict[str, str]:
    return {axis: f"{prefix}.{name}" for axis, name in MEGATRON_SIZES.items()}


def _layout(setup: TrainingSetup, prefix: str) -> Layout:
    """The layout of a model; SkyRL has sequence parallelism wherever it has tensor parallelism."""
    sizes = _pool_sizes(setup)
    nodes, ranks = sizes.get("ref", sizes["policy"]) if prefix == _REF else sizes["policy"]
    return layout_of(_degrees(setup.config, prefix), nodes * ranks, keys=_degree_keys(prefix), sp=True)


def _read_layout(prefix: str) -> Read:
    def read(setup: TrainingSetup, _row: Row) -> Iterator[ParsedField]:
        keys = tuple(_degree_keys(prefix).values())
        for stage in setup.stages(*_STAGES[prefix]):
            yield ParsedField(f"{stage}.layout", str(_layout(setup, prefix)), keys)

    return _if_megatron(read)


def _read_rows(*stages: str) -> Read:
    """Read the rows of a micro-batch, where no token budget replaces them."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        if not _has_budget(setup.config):
            for stage in setup.stages(*stages):
                yield ParsedField(f"{stage}.micro_batch_size", setup.config.integer(row.key), (row.key,))

    return _if_megatron(read)


def _has_budget(config: TrainerConfig) -> bool:
    return config.integer("trainer.max_tokens_per_microbatch") > 0


def _read_budget(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the tokens of a micro-batch, which are those of a whole replica."""
    if _has_budget(setup.config):
        for stage in setup.stages(*_TRAINED):
            yield ParsedField(f"{stage}.micro_batch_tokens", setup.config.integer(row.key), (row.key,))


def _read_recompute(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    keys = ("trainer.gradient_checkpointing", row.key)
    recompute = setup.config.value(row.key) if setup.config.value(keys[0]) else None
    yield ParsedField("actor_train.recompute", recompute or "none", keys)


def _read_policy_offload(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read whether the optimizer is in host memory while other models compute, or all the time."""
    config, keys = setup.config, (f"{_PLACEMENT}.colocate_all", f"{_PLACEMENT}.colocate_policy_ref", row.key)
    shares_ranks = config.value(keys[0]) or (setup.has_ref and config.value(keys[1]))
    yield ParsedField("actor_train.offload", "optimizer" if shares_ranks or config.value(row.key) else "none", keys)


def _read_ref_offload(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    keys = (f"{_PLACEMENT}.colocate_all", row.key)
    if setup.has_ref:
        shares_ranks = any(setup.config.value(key) for key in keys)
        yield ParsedField("ref_logprob.offload", "weights" if shares_ranks else "none", keys)


def _read_engine(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    yield ParsedField("engine", str(setup.config.value(row.key)), (row.key,))


def _read_engine_tp(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the tensor-parallel degree of an engine. Raises BadInput if it does not divide the ranks that generate."""
    sizes = _pool_sizes(setup)
    nodes, ranks = sizes.get("generate", sizes["policy"])
    tp = setup.config.integer(row.key)
    layout_of({"tp": tp}, nodes * ranks, keys={"tp": row.key})
    yield ParsedField(f"{GENERATE}.tp", tp, (row.key,))


def _read_warmup(role: Role) -> Read:
    """Read the steps of a warm-up, which SkyRL counts in updates."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        settings, updates = SETTINGS_KEYS[setup.algorithm], setup.config.integer(row.key)
        if updates > 0 and f"{role}_schedule" in type(DEFAULT_SETTINGS[settings]).model_fields:
            keys = (row.key, "trainer.train_batch_size", "trainer.policy_mini_batch_size")
            prompts_per_step, prompts_per_update = (setup.config.integer(key) for key in keys[1:])
            epochs = setup.config.integer("trainer.update_epochs_per_batch")
            steps = math.ceil(updates / max(1, prompts_per_step // max(1, prompts_per_update) * epochs))
            yield ParsedField(f"{settings}.{role}_schedule.warmup_steps", steps, keys)

    return read


def _read_entropy(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    if setup.config.value(f"{_ALGORITHM}.use_entropy_loss"):
        yield from setup.number_setting("entropy_coefficient", row.key)


# Functions that write rows which only SkyRL has


def _is_colocated(source: ExportInput, _row: Row) -> ConfigValue:
    return source.plan.choice(GENERATE, "pool") == source.plan.choice("actor_train", "pool")


def _has_policy_ranks(source: ExportInput, _row: Row) -> ConfigValue:
    return source.plan.choice("ref_logprob", "pool") == source.plan.choice("actor_train", "pool")


def _write_num_engines(source: ExportInput, _row: Row) -> ConfigValue:
    layout = source.plan.placement(GENERATE).layout
    return layout.dp // (layout.expert_replicas if layout.ep > 1 else 1)


def _write_estimator(source: ExportInput, _row: Row) -> ConfigValue:
    return _ESTIMATOR_NAMES[source.algorithm]


def _has_kl(*, in_loss: bool) -> Write:
    """Write whether the KL penalty is in the loss (`in_loss`), as in GRPO, or in the reward, as in other algorithms."""
    return lambda source, _row: Role.REF in source.plan.graph.roles and (source.algorithm == "grpo") is in_loss


def _write_entropy(source: ExportInput, row: Row) -> ConfigValue:
    return write_field(source, row) or None


def _write_loss_mean(source: ExportInput, _row: Row) -> ConfigValue:
    settings = source.settings
    return _LOSS_MEAN_NAMES[settings.loss_mean] if isinstance(settings, CriticFreeSettings) else None


def _write_loss_constant(source: ExportInput, _row: Row) -> ConfigValue:
    settings = source.settings
    is_constant = isinstance(settings, CriticFreeSettings) and settings.loss_mean == "constant"
    return source.plan.facts.workload.max_response if is_constant else None


def _write_warmup(source: ExportInput, _row: Row) -> ConfigValue:
    workload = source.plan.facts.workload
    return source.settings.actor_schedule.warmup_steps * workload.num_minibatches * workload.num_epochs


def _write_top_k(source: ExportInput, _row: Row) -> ConfigValue:
    return source.settings.top_k or -1


def _write_std(source: ExportInput, _row: Row) -> ConfigValue:
    return source.settings.normalise_by_std if isinstance(source.settings, GRPO) else None


# The table


def _schedule(stage: str) -> str:
    return f"placements.{stage}.schedule"


_GENERATION = f"placements.{GENERATE}"
_POLICY_POOL, _REF_POOL = ("pools: the pool of actor_train", "pools: the pool of ref_logprob")

TABLE = (
    Row("trainer.strategy", "rule: degrees of pipeline and experts are Megatron's",
        None, writes.always("megatron"), "an import reads degrees and micro-batches only of Megatron"),
    # batches and lengths
    Row("trainer.train_batch_size", "facts.workload: batch_size / group_size",
        reads.batch_size(_SAMPLES), writes.num_prompts),
    Row("trainer.max_prompt_length", "facts.workload.prompt.max"),
    Row(f"{_SAMPLING}.max_generate_length", "facts.workload.response.max"),
    Row("trainer.policy_mini_batch_size", "facts.workload.num_minibatches",
        reads.minibatches(lambda setup: setup.config.integer("trainer.train_batch_size"), "prompts"),
        writes.minibatch_prompts("actor_train")),
    Row("trainer.update_epochs_per_batch", "facts.workload.num_epochs"),
    # pools
    Row(f"{_PLACEMENT}.policy_num_nodes", _POLICY_POOL, _read_pools, writes.number_of_nodes("actor_train")),
    Row(f"{_PLACEMENT}.policy_num_gpus_per_node", _POLICY_POOL,
        None, writes.ranks_of_node("actor_train"), "read with policy_num_nodes"),
    Row(f"{_PLACEMENT}.ref_num_nodes", _REF_POOL,
        None, writes.number_of_nodes("ref_logprob"), "read with policy_num_nodes"),
    Row(f"{_PLACEMENT}.ref_num_gpus_per_node", _REF_POOL,
        None, writes.ranks_of_node("ref_logprob"), "read with policy_num_nodes"),
    Row(f"{_PLACEMENT}.critic_num_nodes", "pools: the pool of critic_train", None, None, "read with policy_num_nodes"),
    Row(f"{_PLACEMENT}.critic_num_gpus_per_node", "pools: the pool of critic_train",
        None, None, "read with policy_num_nodes"),
    Row(f"{_PLACEMENT}.colocate_all", f"pools: the pool of {GENERATE}",
        None, _is_colocated, "read with policy_num_nodes"),
    Row(f"{_PLACEMENT}.colocate_policy_ref", f"{_schedule('ref_logprob')}.offload",
        _if_megatron(_read_ref_offload), writes.with_stage("ref_logprob", _has_policy_ranks)),
    Row("trainer.fully_async.enabled", f"{_GENERATION}.steps_ahead",
        _read_steps_ahead, None, "an export runs the program that is one step ahead"),
    # degrees, recomputation and offload
    *degree_rows("actor_train", _POLICY, _read_layout(_POLICY), has_sp=False),
    *end_layer_rows("actor_train", _TRANSFORMER),
    *degree_rows("ref_logprob", _REF, _read_layout(_REF), has_sp=False),
    *end_layer_rows("ref_logprob", f"{_REF}.transformer_config_kwargs"),
    Row("trainer.gradient_checkpointing", f"{_schedule('actor_train')}.recompute",
        None, writes.of_plan(
            lambda plan: plan.placement("actor_train").schedule.recompute is not Recompute.NONE
        ), "read with recompute_granularity"),
    Row(f"{_TRANSFORMER}.recompute_granularity", f"{_schedule('actor_train')}.recompute",
        _if_megatron(_read_recompute), writes.recomputation("actor_train")),
    Row(f"{_TRANSFORMER}.recompute_method", f"{_schedule('actor_train')}.recompute",
        None, writes.null_if_selective("actor_train")),
    Row(f"{_TRANSFORMER}.recompute_num_layers", f"{_schedule('actor_train')}.recompute",
        None, writes.null_if_selective("actor_train")),
    Row(_CPU_ADAM, f"{_schedule('actor_train')}.offload", _if_megatron(_read_policy_offload), None),
    # micro-batches
    Row("trainer.micro_train_batch_size_per_gpu", f"{_schedule('actor_train')}.micro_batch_size",
        _read_rows("actor_train"), write_field),
    Row("trainer.micro_forward_batch_size_per_gpu", f"{_schedule('actor_logprob')}.micro_batch_size",
        _read_rows(*_FORWARD), write_field),
    Row("trainer.max_tokens_per_microbatch", f"{_schedule('actor_train')}.micro_batch_tokens",
        _if_megatron(_read_budget), None),
    # generation
    Row(f"{_ENGINE}.backend", "facts.engine", _read_engine),
    Row(_SAMPLES, "facts.workload.group_size", reads.group_size),
    Row(f"{_ENGINE}.num_engines", f"{_GENERATION}.layout.dp", None, _write_num_engines, "read with policy_num_nodes"),
    Row(f"{_ENGINE}.tensor_parallel_size", f"{_GENERATION}.layout.tp", _read_engine_tp),
    Row(f"{_ENGINE}.pipeline_parallel_size", f"{_GENERATION}.layout.pp"),
    Row(f"{_ENGINE}.data_parallel_size", f"{_GENERATION}.layout.ep",
        None, writes.engine_experts(times_tp=False), "read with policy_num_nodes"),
    Row(f"{_ENGINE}.expert_parallel_size", "rule: expert = tensor x data of an engine",
        None, writes.engine_experts(times_tp=True)),
    Row(f"{_ENGINE}.max_num_seqs", f"{_GENERATION}.schedule.generation_slots"),
    Row(f"{_ENGINE}.gpu_memory_utilization", f"{_GENERATION}: its weights and cache",
        reads.memory_share, writes.of_plan(engine_memory_share)),
    Row(f"{_ENGINE}.max_num_batched_tokens", writes.VLLM_RULE, None, writes.vllm_argument),
    Row(f"{_ENGINE}.enable_chunked_prefill", writes.VLLM_RULE, None, writes.vllm_argument),
    Row(f"{_ENGINE}.enable_prefix_caching", writes.VLLM_RULE, None, writes.vllm_argument),
    Row(f"{_ENGINE}.enforce_eager", writes.VLLM_RULE, None, writes.vllm_argument),
    # rewards, models and the algorithm
    Row(_ENVIRONMENT, "job: rewards.function", reads.function_reward, writes.always(HOOK_MODULE)),
    Row("trainer.policy.model.path", "job: models.actor.path",
        reads.models(Role.ACTOR), writes.model_path(Role.ACTOR)),
    Row("trainer.ref.model.path", "job: models.ref.path",
        reads.ref_path("trainer.policy.model.path"), writes.model_path(Role.REF)),
    Row("trainer.critic.model.path", "job: models.critic.path", reads.if_given(reads.models(Role.CRITIC)), None),
    Row(_ESTIMATOR, "job: algorithm", reads.estimator, _write_estimator),
    Row(f"{_ALGORITHM}.use_kl_in_reward", "job: algorithm and models.ref", None, _has_kl(in_loss=False)),
    Row(f"{_ALGORITHM}.use_kl_loss", "job: algorithm and models.ref", None, _has_kl(in_loss=True)),
    Row(f"{_ALGORITHM}.kl_loss_coef", "setting: kl_coefficient", reads.kl_penalty),
    Row(f"{_ALGORITHM}.gamma", "setting: gamma"),
    Row(f"{_ALGORITHM}.lambd", "setting: gae_lambda"),
    Row("trainer.policy.optimizer_config.lr", "setting: actor_learning_rate"),
    Row("trainer.policy.optimizer_config.weight_decay", "setting: weight_decay"),
    Row("trainer.policy.optimizer_config.max_grad_norm", "setting: max_grad_norm"),
    Row("trainer.policy.optimizer_config.num_warmup_steps", "setting: actor_schedule",
        _read_warmup(Role.ACTOR), _write_warmup),
    Row("trainer.critic.optimizer_config.lr", "setting: critic_learning_rate", write=None),
    Row("trainer.critic.optimizer_config.num_warmup_steps", "setting: critic_schedule",
        _read_warmup(Role.CRITIC), None),
    Row(f"{_ALGORITHM}.value_clip", "setting: value_clip", write=None),
    Row(f"{_ALGORITHM}.use_entropy_loss", "setting: entropy_coefficient",
        None, lambda source, _row: source.settings.entropy_coefficient > 0, "read with entropy_loss_coef"),
    Row(f"{_ALGORITHM}.entropy_loss_coef", "setting: entropy_coefficient", _read_entropy, _write_entropy),
    Row(f"{_SAMPLING}.temperature", "setting: temperature"),
    Row(f"{_SAMPLING}.top_p", "setting: top_p", reads.top_p),
    Row(f"{_SAMPLING}.top_k", "setting: top_k", reads.top_k, _write_top_k),
    Row(f"{_ALGORITHM}.grpo_norm_by_std", "setting: normalise_by_std", reads.flag, _write_std),
    Row(f"{_ALGORITHM}.eps_clip_low", "job: clip_ratio", reads.number("clip_ratio"), writes.clip_low),
    Row(f"{_ALGORITHM}.eps_clip_high", "job: clip_ratio_high, or clip_ratio",
        reads.number("clip_ratio_high"), writes.clip_high),
    Row(f"{_ALGORITHM}.loss_reduction", "job: loss_mean", reads.loss_mean(_LOSS_MEANS), _write_loss_mean),
    Row(f"{_ALGORITHM}.max_seq_len", "facts.workload.response.max", None, _write_loss_constant),
    Row(f"{_ALGORITHM}.policy_loss_type", "job: algorithm", None, None, "read as PPO's clip, with a note"),
    # settings that are read and not written
    Row(f"{_ALGORITHM}.overlong_buffer_len", "setting: overlong_tokens", reads.overlong_tokens, None),
    Row(f"{_ALGORITHM}.overlong_buffer_penalty_factor", "setting: overlong_penalty",
        reads.overlong_penalty(f"{_ALGORITHM}.overlong_buffer_len"), None),
    Row("trainer.policy.model.lora.rank", "job: models.actor.adapter.rank", reads.adapter_rank, None),
    Row("trainer.policy.model.lora.alpha", "job: models.actor.adapter.alpha",
        reads.adapter_alpha("trainer.policy.model.lora.rank"), None),
)  # fmt: skip
"""SkyRL's keys and the fields of a job or plan, in the order of an export."""

_LAUNCHER_TEXT = Template('''\
"""Registers the environment of $hook.py with SkyRL-Gym, and runs SkyRL with it."""

import importlib
import sys
from pathlib import Path

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.utils import initialize_ray, validate_cfg

here = str(Path(__file__).resolve().parent)


@ray.remote(num_cpus=1)
def train(config):
    sys.path.insert(0, here)
    from skyrl_gym.envs import register

    register(id="$hook", entry_point="$hook:RewardEnvironment")
    getattr(importlib.import_module("$module"), "$experiment")(config).run()


if __name__ == "__main__":
    config = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(config)
    initialize_ray(config)
    ray.get(train.remote(config))
''')
"""The launcher, which registers the user's function as an environment and runs SkyRL with it (documentation of SkyRL,
tutorials/new_env)."""

_LAUNCHERS = {
    0: ("run_with_reward.py", "skyrl.train.entrypoints.main_base", "BasePPOExp"),
    ONE_AHEAD: ("run_async_with_reward.py", "examples.train.async.main_async", "AsyncPPOExp"),
}
"""The name of the launcher, and the module and class of SkyRL that it runs, by the steps that generation is ahead."""


def _files(source: ExportInput, settings: Sequence[KeyValue]) -> Mapping[str, str]:
    head = (
        "Runs SkyRL with this plan, from the root of its repository. Give data.train_data and data.val_data as\n"
        "arguments of this script."
    )
    launcher, module, experiment = _LAUNCHERS[source.plan.ahead[GENERATE]]
    command = f'uv run --isolated --extra megatron "$(dirname "$0")/{launcher}"'
    return {
        "run.sh": script(head, command, overrides(settings)),
        launcher: _LAUNCHER_TEXT.substitute(hook=HOOK_MODULE, module=module, experiment=experiment),
        **reward_hook("skyrl", source),
    }


SKYRL = OtherTrainer(
    name="skyrl",
    key_file="skyrl",
    algorithms=tuple(_ESTIMATOR_NAMES),
    engine="vllm",
    modes=deployment_modes,
    settings=partial(write_table, TABLE),
    files=_files,
    remarks=(
        "a plan names no data: set data.train_data and data.val_data yourself.",
        "models that share ranks are in host memory while another one computes.",
    ),
    unsupported_roles={
        Role.CRITIC: "with Megatron it trains no critic",
        Role.REWARD: "it scores with environments and has no reward model",
    },
)


def read_skyrl(path: Path, changed: Mapping[str, Any] | None = None) -> ParsedConfig:
    """Read the configuration in a file; `changed` are keys with values that override its own.

    Raises BadInput naming a key that a job cannot express.
    """
    setup = _training_setup(read_overrides(path, known_keys("skyrl"), changed=changed))
    return read_table(TABLE, setup, trainer="skyrl", notes=_notes, unused=_unused_keys)


def _notes(setup: TrainingSetup, _fields: Sequence[ParsedField]) -> Iterator[str]:
    config = setup.config
    if not _is_megatron(config):
        yield (
            "trainer.strategy is not megatron: FSDP sharding is not modelled, so the search chooses layouts and "
            "micro-batches."
        )
    yield from setup.notes()
    yield from _algorithm_notes(config)
    yield from single_sample_notes(config, _ESTIMATOR, _ESTIMATORS, _SAMPLES)
    key = "trainer.fully_async.max_staleness_steps"
    if _is_asynchronous(config) and config.has(key) and (steps := config.integer(key)) > 1:
        yield f"{key}={steps} is read as 1: generation is one step ahead."
    if _is_megatron(config):
        for prefix, stages in _STAGES.items():
            if setup.stages(*stages):
                expert_key = f"{prefix}.{MEGATRON_SIZES['ep']}"
                yield from layout_notes(expert_key, _degrees(config, prefix), _layout(setup, prefix))


def _algorithm_notes(config: TrainerConfig) -> Iterator[str]:
    loss_key, mean_key = f"{_ALGORITHM}.policy_loss_type", f"{_ALGORITHM}.loss_reduction"
    if (loss := config.value(loss_key)) not in _PLAIN_LOSSES:
        yield f"{loss_key}={loss}: a job clips each token's ratio as PPO, at the same cost."
    if (mean := config.value(mean_key)) not in _LOSS_MEANS:
        yield f"{mean_key}={mean} is not a loss aggregation that a job can have; the job keeps its default."


def _unused_keys(setup: TrainingSetup) -> Iterator[str]:
    """Patterns of keys that other keys make unused."""
    config = setup.config
    if not setup.has_ref:
        yield from ("trainer.ref.*", f"{_PLACEMENT}.ref_*", f"{_PLACEMENT}.colocate_policy_ref", f"{_ALGORITHM}.kl_*")
    if Role.CRITIC not in setup.graph.roles:
        yield from ("trainer.critic*", f"{_PLACEMENT}.critic_*", f"{_ALGORITHM}.value_clip")
    if config.value(f"{_PLACEMENT}.colocate_all"):
        yield f"{_PLACEMENT}.*"
    if _is_megatron(config):
        yield "*.fsdp_config.*"
        if _has_budget(config):
            yield "trainer.micro_*_batch_size_per_gpu"
    else:
        yield from (f"{_POLICY}.*", f"{_REF}.*")
    if not config.value(f"{_ALGORITHM}.use_entropy_loss"):
        yield f"{_ALGORITHM}.entropy_loss_coef"
    if not _is_asynchronous(config):
        yield "trainer.fully_async.*"
    if not config.value("trainer.policy.model.lora.rank"):
        yield "*.lora*"


def _training_setup(config: TrainerConfig) -> TrainingSetup:
    """The algorithm, its models and its reward; a KL penalty in the loss or the reward needs a reference model."""
    estimator = estimator_of(config, _ESTIMATOR, _ESTIMATORS, single=_SAMPLES)
    if estimator.algorithm == "ppo" and _is_megatron(config):
        raise BadInput(
            f"{_ESTIMATOR}={config.value(_ESTIMATOR)} needs a critic, and with trainer.strategy=megatron SkyRL trains "
            "none; give --set trainer.strategy=fsdp, or an estimator without a critic, such as grpo."
        )
    in_loss, in_reward = (bool(config.value(f"{_ALGORITHM}.{key}")) for key in ("use_kl_loss", "use_kl_in_reward"))
    coefficient = f"{_ALGORITHM}.kl_loss_coef"
    return TrainingSetup(
        config=config,
        key=_ESTIMATOR,
        estimator=estimator,
        has_ref=in_loss or in_reward,
        kl_in_loss=coefficient if in_loss else None,
        kl_in_reward=coefficient if in_reward else None,
        reward=_function_reward(config),
    )


def _function_reward(config: TrainerConfig) -> FunctionReward:
    """The reward of the job: for SkyRL-Gym's maths environments our own check of answers, otherwise a function that the
    user writes."""
    is_maths = config.value(_ENVIRONMENT) in _MATHS_ENVIRONMENTS
    return FunctionReward(MATHS if is_maths else USER_FUNCTION, (_ENVIRONMENT,))
