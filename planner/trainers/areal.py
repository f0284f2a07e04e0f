"""AReaL: export of plans to its YAML configuration, and import from it.

Megatron-core trains, SGLang or vLLM generates, and a Python function scores. Each model has a backend with its degrees,
such as `megatron:(attn:d4p1t2|ffn:d1p1t1e8)`, and shares the actor's ranks (`scheduling_strategy`) or has its own. The
engines share the actor's ranks, with offload, or have their own and generate one batch ahead
(`rollout.max_head_offpolicyness`). Log-probabilities and values have the degrees of their model's training. FSDP and
Archon are imported without their layouts.

`TABLE` has a row for each key. The functions above it read and write the rows that only AReaL has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from meshwright.planner.job.algorithm_settings import GRPO, Reinforce
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.plan import Plan
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
    nested_yaml,
    reward_hook,
    script,
    token_budget,
)
from meshwright.planner.trainers.parsed_config import (
    GRPO_ESTIMATOR,
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
    layout_notes,
    layout_of,
    nodes_of_ranks,
)
from meshwright.planner.trainers.table import STEPS_AHEAD, Read, Row, Write, read_table, write_field, write_table
from meshwright.planner.trainers.trainer import ConfigValue, ExportInput, KeyValue, OtherTrainer
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute
from meshwright.profiles.stages import GENERATE, Role
from meshwright.profiles.untrusted_text import limited

_STAGES = {
    "actor": ("actor_train", "actor_logprob"),
    "critic": ("critic_train", "critic_value"),
    "ref": ("ref_logprob",),
}
"""The stages of each model, by AReaL's name for it. The layout in an export is that of the first stage."""
_ON_TRAINER = tuple(name for name in ppo_stages() if name != "reward_score")
_SLOT_KEYS = {"sglang": "sglang.max_running_requests", "vllm": "vllm.max_num_seqs"}
"""The key of the sequences that an engine generates at once, by the engine's name."""
_ENGINES = tuple(_SLOT_KEYS)
_BACKEND_NAMES = ("fsdp", "megatron", "archon", *_ENGINES)
_SAMPLES, _PROMPTS, _PATH = "gconfig.n_samples", "train_dataset.batch_size", "train_dataset.path"
_REWARD_NORM, _ADVANTAGE_NORM, _STALENESS = "actor.reward_norm", "actor.adv_norm", "rollout.max_head_offpolicyness"
_FORMER_BACKENDS = "allocation_mode"
_RECOMPUTES = ("actor.recompute_logprob", "actor.use_decoupled_loss")
"""Keys each of which makes the actor compute the old log-probabilities again (areal/trainer/ppo/actor.py)."""
_ALL_TOKENS = 10**8
"""The value of AReaL's `top_k` that keeps all tokens."""
_ASSUMED_PROMPT = 1024
"""Tokens of the longest prompt where no key gives it; a note says so."""
_MATHS_DATA = re.compile(r"gsm8k|math|aime|dapo|boba", re.IGNORECASE)
_NAMED_GROUPS = ("rollout", "actor", "critic", "ref", "saver", "recover", "evaluator", "stats_logger")
"""Groups of keys that repeat the names of the experiment and the trial."""
_ENGINE_PINS = tuple(f"{GENERATE}.{axis}=1" for axis in ("cp", "ep"))
"""Pins for engines that have only tensor and pipeline parallelism."""


def deployment_modes(facts: Facts) -> Iterator[DeploymentMode]:
    """Yield the ways in which AReaL can place the stages.

    Either all stages are on all ranks, or generation is one batch ahead on its own ranks. Reference and critic are then
    on the actor's ranks, or one of them is on its own.
    """
    everywhere = on_pool(all_ranks(facts.cluster), (GENERATE, *_ON_TRAINER))
    yield _mode("colocated", (*everywhere, "actor_train.offload=optimizer"))
    for train, generate in pool_divisions(facts.cluster, 2):
        pool_pins = (*on_pool(train, _ON_TRAINER), *on_pool(generate, (GENERATE,)))
        yield _mode(f"asynchronous, {generate} generates", pool_pins, steps_ahead=ONE_AHEAD)
    for model in ("ref", "critic"):
        own = _STAGES[model]
        others = tuple(stage for stage in _ON_TRAINER if stage not in own)
        for train, other, generate in pool_divisions(facts.cluster, 3) if own[0] in facts.graph.by_name else ():
            pool_pins = (*on_pool(train, others), *on_pool(other, own), *on_pool(generate, (GENERATE,)))
            name = f"asynchronous, {generate} generates, {model} on {other}"
            yield _mode(name, pool_pins, steps_ahead=ONE_AHEAD)


def _mode(name: str, pool_pins: tuple[str, ...], *, steps_ahead: int = 0) -> DeploymentMode:
    pairs = tuple(stages for stages in _STAGES.values() if len(stages) > 1)
    return DeploymentMode(
        name=name,
        pins=(*pool_pins, *no_overlap(), *pin_value("vpp", 1, ppo_stages(trains=True)), *_ENGINE_PINS),
        equal_choices=tuple(
            choice
            for train, forward in pairs
            for key in ("layout", "micro_batch_size", "micro_batch_tokens")
            for choice in equal_choices(key, train, (forward,))
        )
        + equal_choices("layout", "ref_logprob", ("ref_logprob",)),
        steps_ahead=steps_ahead,
        with_sp=_ON_TRAINER,
        has_end_layers=False,
    )


# Functions that read rows which only AReaL has


@dataclass(frozen=True)
class _Backend:
    """A backend of AReaL and the degrees that it has, by our axes; etp=0 means etp=tp."""

    name: str
    degrees: Mapping[str, int]

    @property
    def num_ranks(self) -> int:
        return math.prod(self.degrees[axis] for axis in ("tp", "pp", "cp", "dp"))


_AXES = {"d": "dp", "t": "tp", "p": "pp", "c": "cp", "e": "ep"}
_DEGREES = r"(?:[dtpce][1-9]\d*)+"
_BACKEND = re.compile(rf"(?:(\w+)(?:\[\w+\])?[:.])?\(?(?:attn:)?({_DEGREES})(?:\|ffn:({_DEGREES}))?\)?")


def _parse_backend(key: str, text: object) -> _Backend:
    """Raises BadInput for a text that is not a backend with its degrees."""
    match = _BACKEND.fullmatch(str(text).replace(" ", ""))
    if match is None:
        raise BadInput(
            f"{key}={limited(repr(text))} is not a backend with its degrees; write it like megatron:d4p2t2 or "
            "sglang:d4."
        )
    name, dense, experts = match.groups()
    degrees = dict.fromkeys(_AXES.values(), 1) | _parse_degrees(dense)
    if experts:
        degrees |= {"ep": _parse_degrees(experts).get("ep", 1), "etp": _parse_degrees(experts).get("tp", 1)}
    needs_megatron = degrees["pp"] > 1 or degrees["ep"] > 1
    return _Backend(name or ("megatron" if needs_megatron else "fsdp"), {"etp": int(degrees["ep"] > 1), **degrees})


def _parse_degrees(text: str) -> dict[str, int]:
    return {_AXES[axis]: int(degree) for axis, degree in re.findall(r"([dtpce])(\d+)", text)}


def _backend(config: TrainerConfig, model: str) -> _Backend:
    """The backend of a model or of the engines, from its own key or from `allocation_mode`, the former key for all.

    A reference without keys of its own has the actor's backend, since a job of PPO always has a reference. Raises
    BadInput if neither key has a value.
    """
    model = "actor" if model == "ref" and not _has_group(config, "ref") else model
    key = f"{model}.backend"
    if (own := _own_backend(config, model)) is not None:
        return _parse_backend(key, own)
    backends, name = _former_backends(config), config.value(key)
    is_engine = model == "rollout"
    former = next((backend for backend in backends if (backend.name in _ENGINES) is is_engine), None)
    if former is None:
        raise BadInput(f"{key} has no value, and the plan depends on it; give it as --set {key}=BACKEND:DEGREES.")
    return former if name is None else replace(former, name=name)


def _own_backend(config: TrainerConfig, model: str) -> object:
    """The value of a model's own key; None if it has none, or a name alone whose degrees `allocation_mode` has."""
    text = config.value(f"{model}.backend")
    return None if text in _BACKEND_NAMES and config.value(_FORMER_BACKENDS) else text


def _former_backends(config: TrainerConfig) -> list[_Backend]:
    text = config.value(_FORMER_BACKENDS) or ""
    parts = re.split(r"\+|\|(?!ffn)", str(text))
    return [_parse_backend(_FORMER_BACKENDS, part) for part in parts if part]


def _shares_ranks(config: TrainerConfig, model: str) -> bool:
    """True if a model is on the ranks of the actor."""
    if _own_backend(config, model) is None or not _has_group(config, model):
        return True
    strategy, target = _strategy(config, model)
    return strategy == "colocation" and target != "rollout"


def _is_colocated(config: TrainerConfig) -> bool:
    """True if the engines are on the ranks of the actor, by the strategy of either or by `allocation_mode`."""
    if _own_backend(config, "rollout") is None:
        return bool(re.search(r"\|(?!ffn)", str(config.value(_FORMER_BACKENDS))))
    placed = {model: _strategy(config, model) for model in ("rollout", "actor")}
    return placed["rollout"] == ("colocation", "actor") or placed["actor"] == ("colocation", "rollout")


def _strategy(config: TrainerConfig, model: str) -> tuple[object, object]:
    """The type and the target of a model's scheduling strategy."""
    return config.value(f"{model}.scheduling_strategy.type"), config.value(f"{model}.scheduling_strategy.target")


def _is_megatron(config: TrainerConfig) -> bool:
    return _backend(config, "actor").name == "megatron"


def _models(setup: TrainingSetup) -> Iterator[str]:
    """AReaL's names of the job's models."""
    return (model for model, stages in _STAGES.items() if setup.stages(*stages))


def _pool_sizes(setup: TrainingSetup) -> dict[str, int]:
    """The number of ranks of each pool, by the name of its model, or `rollout`."""
    config = setup.config
    sizes = {model: _backend(config, model).num_ranks for model in _models(setup) if model == "actor"}
    sizes |= {
        model: _backend(config, model).num_ranks
        for model in _models(setup)
        if model != "actor" and not _shares_ranks(config, model)
    }
    return sizes if _is_colocated(config) else {**sizes, "rollout": _backend(config, "rollout").num_ranks}


def _read_pools(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the cluster and the pool of every stage; a cluster that the pools do not fill has the size of the pools."""
    config, per_node_key = setup.config, "cluster.n_gpus_per_node"
    sizes = _pool_sizes(setup)
    nodes, per_node = config.integer(row.key), config.integer(per_node_key)
    if nodes * per_node != sum(sizes.values()):
        nodes, per_node = cluster_of({name: nodes_of_ranks(size) for name, size in sizes.items()})
    yield ParsedField("cluster.nodes", nodes, (row.key,))
    yield ParsedField("cluster.ranks_per_node", per_node, (per_node_key,))
    pools = dict(consecutive_pools(sizes.items()))
    keys = ("actor.backend", "rollout.backend")
    yield ParsedField(f"{GENERATE}.pool", pools.get("rollout", pools["actor"]), keys)
    for model in _models(setup):
        for stage in setup.stages(*_STAGES[model]):
            yield ParsedField(f"{stage}.pool", pools.get(model, pools["actor"]), keys)


def _read_steps_ahead(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    yield ParsedField(STEPS_AHEAD, int(setup.config.integer(row.key) > 0), (row.key,))


def _layout(config: TrainerConfig, model: str) -> Layout:
    """The layout of a model; AReaL has sequence parallelism wherever it has tensor parallelism."""
    backend = _backend(config, model)
    degrees = {axis: degree for axis, degree in backend.degrees.items() if axis != "dp"}
    vpp = config.integer_or(_resolved_key(config, f"{model}.megatron.virtual_pipeline_parallel_size"), 1)
    layout = layout_of(degrees, backend.num_ranks, sp=True)
    return replace(layout, vpp=vpp) if layout.pp > 1 else layout


def _resolved_key(config: TrainerConfig, key: str) -> str:
    """The key that has the value of `key`: itself, or its counterpart in the group that its own group refers to."""
    group, _, name = key.rpartition(".")
    while group:
        reference = re.fullmatch(r"\$\{([\w.]+)\}", str(config.values.get(group, "")))
        if reference and config.has(group):
            return f"{reference[1]}.{name}"
        group, _, last = group.rpartition(".")
        name = f"{last}.{name}"
    return key


def _read_layout(model: str) -> Read:
    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        if setup.stages(*_STAGES[model]) and _is_megatron(setup.config):
            layout = _layout(setup.config, model)
            for stage in setup.stages(*_STAGES[model]):
                stage_layout = layout if stage.endswith("train") else replace(layout, vpp=1)
                yield ParsedField(f"{stage}.layout", str(stage_layout), (row.key,))

    return read


def _read_budget(model: str) -> Read:
    """Read the tokens of a model's micro-batch, which are those of a whole replica, in training and scoring alike."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        key = _resolved_key(setup.config, row.key)
        if _is_megatron(setup.config) and setup.config.value(key) is not None:
            for stage in setup.stages(*_STAGES[model]):
                yield ParsedField(f"{stage}.micro_batch_tokens", setup.config.integer(key), (row.key,))

    return read


def _read_recompute(model: str) -> Read:
    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        stage, keys = _STAGES[model][0], (f"{model}.gradient_checkpointing", row.key)
        if setup.stages(stage) and _is_megatron(setup.config):
            checkpointing, granularity = (setup.config.value(_resolved_key(setup.config, key)) for key in keys)
            yield ParsedField(f"{stage}.recompute", (granularity if checkpointing else None) or "none", keys)

    return read


def _read_offload(model: str) -> Read:
    """Read whether a model's optimizer, or the weights of the reference, are in host memory while others compute."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        stage = _STAGES[model][0]
        if setup.stages(stage) and _is_megatron(setup.config):
            shares_ranks = model == "actor" and _is_colocated(setup.config)
            is_offloaded = setup.config.value("enable_offload") and (setup.config.value(row.key) or shares_ranks)
            state = "weights" if model == "ref" else "optimizer"
            yield ParsedField(f"{stage}.offload", state if is_offloaded else "none", (row.key,))

    return read


def _read_engine(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the engine and its degrees."""
    backend = _backend(setup.config, "rollout")
    if backend.name in _ENGINES:
        yield ParsedField("engine", backend.name, (row.key,))
    for axis in ("tp", "pp"):
        yield ParsedField(f"{GENERATE}.{axis}", backend.degrees[axis], (row.key,))


def _of_engine(name: str, read: Read) -> Read:
    """Read a key of an engine only where that engine generates."""
    return reads.if_(lambda setup: _backend(setup.config, "rollout").name == name, reads.if_given(read))


def _read_slots(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the number of sequences that an engine generates at once: the smaller of its own limit and its share of the
    prompts in flight."""
    config, backend = setup.config, _backend(setup.config, "rollout")
    own_key = _SLOT_KEYS.get(backend.name, _SLOT_KEYS["sglang"])
    limits = [config.integer(own_key)] if config.value(own_key) is not None else []
    if config.value(row.key) is not None:
        samples = config.integer(row.key) * config.integer(_SAMPLES)
        limits.append(max(1, math.ceil(samples / backend.degrees["dp"])))
    if limits:
        yield ParsedField(f"{GENERATE}.generation_slots", min(limits), (own_key, row.key))


def _read_prompt(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    yield ParsedField("workload.prompt", setup.config.integer_or(row.key, _ASSUMED_PROMPT), (row.key,))


def _read_top_k(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    top_k = setup.config.integer(row.key)
    yield from setup.setting("top_k", 0 if top_k >= _ALL_TOKENS else top_k, row.key)


def _read_resolved(setting: str) -> Read:
    """Read a numeric setting from a key, or from its counterpart in the group that its group refers to."""
    return lambda setup, row: (
        replace(field, keys=(row.key,)) for field in setup.number_setting(setting, _resolved_key(setup.config, row.key))
    )


def _if_lora(read: Read) -> Read:
    return reads.if_(lambda setup: bool(setup.config.value("actor.use_lora")), read)


def _if_overlong(read: Read) -> Read:
    return reads.if_(lambda setup: bool(setup.config.value("actor.overlong_reward_penalty")), reads.if_given(read))


# Functions that write rows which only AReaL has


def _write_backend(model: str) -> Write:
    """Write Megatron and the degrees of a model, with separate degrees for its experts."""
    stage = _STAGES[model][0]

    def write(source: ExportInput, _row: Row) -> ConfigValue:
        layout = source.plan.placement(stage).layout
        dense = f"d{layout.dp}p{layout.pp}t{layout.tp}" + (f"c{layout.cp}" if layout.cp > 1 else "")
        if layout.ep == 1 and layout.etp == layout.tp:
            return f"megatron:{dense}"
        replicas = layout.num_ranks // (layout.pp * layout.etp * layout.ep)
        return f"megatron:(attn:{dense}|ffn:d{replicas}p{layout.pp}t{layout.etp}e{layout.ep})"

    return writes.with_stage(stage, write)


def _write_engine(source: ExportInput, _row: Row) -> ConfigValue:
    layout = source.plan.placement(GENERATE).layout
    return f"{source.plan.facts.engine}:d{layout.dp}p{layout.pp}t{layout.tp}"


def _if_engine(name: str, write: Write) -> Write:
    return lambda source, row: write(source, row) if source.plan.facts.engine == name else None


def _has_own_pool(plan: Plan, stage: str) -> bool:
    return plan.choice(stage, "pool") != plan.choice("actor_train", "pool")


def _if_sharing(stage: str, value: ConfigValue) -> Write:
    """Write a value if a stage is on the actor's ranks."""
    return writes.with_stage(stage, lambda source, _row: None if _has_own_pool(source.plan, stage) else value)


def _write_budget(stage: str) -> Write:
    """Write the tokens of a stage's micro-batch on a whole replica."""

    def write(source: ExportInput, _row: Row) -> ConfigValue:
        return token_budget(source.plan, stage) * source.plan.placement(stage).layout.cp

    return writes.with_stage(stage, write)


def _write_offload(stage: str) -> Write:
    def write(source: ExportInput, _row: Row) -> ConfigValue:
        return source.plan.placement(stage).schedule.offload is not Offload.NONE

    return writes.with_stage(stage, write)


def _needs_offload(source: ExportInput, _row: Row) -> ConfigValue:
    return any(placement.schedule.offload is not Offload.NONE for placement in source.plan.placements)


def _write_checkpointing(stage: str) -> Write:
    def write(source: ExportInput, _row: Row) -> ConfigValue:
        return source.plan.placement(stage).schedule.recompute is not Recompute.NONE

    return writes.with_stage(stage, write)


def _with_group_mean(write: Write) -> Write:
    """Write only where the mean of a group is the baseline of its samples."""

    def write_norm(source: ExportInput, row: Row) -> ConfigValue | KeyValue:
        settings = source.settings
        has_mean = settings.group_baseline if isinstance(settings, Reinforce) else source.algorithm in ("grpo", "rloo")
        return write(source, row) if has_mean else None

    return write_norm


def _write_std_level(source: ExportInput, row: Row) -> KeyValue:
    has_std = isinstance(source.settings, GRPO) and source.settings.normalise_by_std
    return KeyValue(row.key, "group" if has_std else None, row.field)


def _with_whitening(write: Write) -> Write:
    """Write only where advantages are normalised over the batch: in PPO and REINFORCE++."""
    return lambda source, row: write(source, row) if source.algorithm in ("ppo", "reinforce++") else None


def _write_kl(source: ExportInput, row: Row) -> ConfigValue:
    value = getattr(source.settings, row.setting, None)
    return value if Role.REF in source.plan.graph.roles and isinstance(value, float) else 0.0


def _write_concurrency(source: ExportInput, _row: Row) -> ConfigValue:
    """The number of prompts of all steps that are in flight at once."""
    return source.plan.facts.workload.num_prompts * (1 + source.plan.ahead[GENERATE])


def _write_update_mode(source: ExportInput, _row: Row) -> ConfigValue:
    return "xccl" if _has_own_pool(source.plan, GENERATE) else "disk"


def _write_top_k(source: ExportInput, _row: Row) -> ConfigValue:
    return source.settings.top_k or _ALL_TOKENS


# The table


def _model_rows(model: str) -> tuple[Row, ...]:
    """The rows of a model's backend, micro-batch and offload."""
    stage = _STAGES[model][0]
    schedule = f"placements.{stage}.schedule"
    return (
        Row(f"{model}.backend", f"placements.{stage}.layout", _read_layout(model), _write_backend(model)),
        Row(
            f"{model}.mb_spec.max_tokens_per_mb",
            f"{schedule}.micro_batch_tokens",
            _read_budget(model),
            _write_budget(stage),
        ),
        Row(f"{model}.offload", f"{schedule}.offload", _read_offload(model), _write_offload(stage)),
    )


def _training_rows(model: str) -> tuple[Row, ...]:
    """The rows of a trained model's recomputation and interleaved pipeline."""
    stage, prefix = _STAGES[model][0], f"{model}.megatron"
    schedule = f"placements.{stage}.schedule"
    null_if_selective = writes.null_if_selective(stage)
    return (
        Row(
            f"{model}.gradient_checkpointing",
            f"{schedule}.recompute",
            None,
            _write_checkpointing(stage),
            "read with recompute_granularity",
        ),
        Row(
            f"{prefix}.recompute_granularity",
            f"{schedule}.recompute",
            _read_recompute(model),
            writes.recomputation(stage),
        ),
        Row(f"{prefix}.recompute_method", f"{schedule}.recompute", None, null_if_selective),
        Row(f"{prefix}.recompute_num_layers", f"{schedule}.recompute", None, null_if_selective),
        Row(
            f"{prefix}.virtual_pipeline_parallel_size",
            f"placements.{stage}.layout.vpp",
            None,
            None,
            f"read with {model}.backend",
        ),
    )


def _sharing_rows(model: str) -> tuple[Row, ...]:
    """The rows that put a model on the actor's ranks."""
    stage, pool = _STAGES[model][0], f"pools: the pool of {_STAGES[model][0]}"
    prefix, with_nodes = f"{model}.scheduling_strategy", "read with cluster.n_nodes"
    return (
        Row(f"{prefix}.type", pool, None, _if_sharing(stage, "colocation"), with_nodes),
        Row(f"{prefix}.target", pool, None, _if_sharing(stage, "actor"), with_nodes),
    )


def _name_rows(group: str) -> tuple[Row, ...]:
    rule = "rule: every group repeats the names of the run"
    stage = _STAGES.get(group, ("actor_train",))[0]
    named = tuple(
        Row(f"{group}.{name}", rule, None, writes.with_stage(stage, writes.always(f"${{{name}}}")))
        for name in ("experiment_name", "trial_name")
    )
    if group in _STAGES:
        return named
    return (*named, Row(f"{group}.fileroot", rule, None, writes.always("${cluster.fileroot}")))


_GENERATION = f"placements.{GENERATE}"

TABLE = (
    Row("experiment_name", "rule: a name that AReaL requires", None, writes.always("meshwright")),
    Row("trial_name", "rule: a name that AReaL requires", None, writes.always("trial0")),
    *(row for group in _NAMED_GROUPS for row in _name_rows(group)),
    # batches and lengths
    Row(_PROMPTS, "facts.workload: batch_size / group_size", reads.batch_size(_SAMPLES), writes.num_prompts),
    Row("train_dataset.type", "rule: the data of reinforcement learning", None, writes.always("rl")),
    Row("train_dataset.max_length", "facts.workload.prompt.max", _read_prompt),
    Row("gconfig.max_new_tokens", "facts.workload.response.max"),
    Row("gconfig.max_tokens", "facts.workload: prompt.max + response.max", None, writes.max_tokens),
    Row(_SAMPLES, "facts.workload.group_size", reads.group_size),
    Row("actor.ppo_n_minibatches", "facts.workload.num_minibatches"),
    Row("critic.ppo_n_minibatches", "facts.workload.num_minibatches",
        None, writes.with_stage("critic_train", write_field), "a critic has as many minibatches as the actor"),
    # pools
    Row("cluster.n_nodes", "facts.cluster.nodes", _read_pools),
    Row("cluster.n_gpus_per_node", "facts.cluster.ranks_per_node", None, note="read with cluster.n_nodes"),
    Row("rollout.backend", f"{_GENERATION}.layout", _read_engine, _write_engine),
    Row(_FORMER_BACKENDS, "pools", None, None, "the former key of all backends, read where they have none"),
    Row("rollout.scheduling_strategy.type", f"pools: the pool of {GENERATE}",
        None, _if_sharing(GENERATE, "colocation"), "read with cluster.n_nodes"),
    Row("rollout.scheduling_strategy.target", f"pools: the pool of {GENERATE}",
        None, _if_sharing(GENERATE, "actor"), "read with cluster.n_nodes"),
    *_sharing_rows("ref"),
    *_sharing_rows("critic"),
    Row("actor.scheduling_strategy.type", f"pools: the pool of {GENERATE}", None, None, "read with cluster.n_nodes"),
    Row("actor.scheduling_strategy.target", f"pools: the pool of {GENERATE}", None, None, "read with cluster.n_nodes"),
    Row(_STALENESS, f"{_GENERATION}.steps_ahead", _read_steps_ahead, writes.of_plan(lambda plan: plan.ahead[GENERATE])),
    Row("rollout.consumer_batch_size", "facts.workload: batch_size / group_size", None, writes.num_prompts),
    Row("rollout.max_concurrent_rollouts", "facts.workload: the prompts of this step and of the steps ahead",
        _read_slots, _write_concurrency),
    Row("enable_offload", "placements: what is offloaded", None, _needs_offload, "read with the offload of each model"),
    Row("actor.weight_update_mode", "rule: engines on the actor's ranks take weights from a disk",
        None, _write_update_mode),
    # degrees, micro-batches, recomputation and offload of each model
    *_model_rows("actor"),
    *_training_rows("actor"),
    *_model_rows("ref"),
    *_model_rows("critic"),
    *_training_rows("critic"),
    Row("critic.is_critic", "rule: a critic has a head for values",
        None, writes.with_stage("critic_train", writes.always(True))),
    Row("actor.recompute_logprob", "facts.old_logprobs",
        reads.old_logprobs, writes.of_plan(lambda plan: plan.facts.old_logprobs == "recompute")),
    Row("actor.use_decoupled_loss", "facts.old_logprobs",
        None, writes.old_logprobs_from("generator", writes.always(False)), "read with actor.recompute_logprob"),
    # engines
    *(Row(key, f"{_GENERATION}.schedule.generation_slots",
        None, _if_engine(name, write_field), "read with rollout.max_concurrent_rollouts")
      for name, key in _SLOT_KEYS.items()),
    Row("sglang.mem_fraction_static", f"{_GENERATION}: its weights and cache",
        _of_engine("sglang", reads.memory_share), _if_engine("sglang", writes.of_plan(engine_memory_share))),
    Row("vllm.gpu_memory_utilization", f"{_GENERATION}: its weights and cache",
        _of_engine("vllm", reads.memory_share), _if_engine("vllm", writes.of_plan(engine_memory_share))),
    Row("sglang.context_length", "facts.workload: prompt.max + response.max",
        None, _if_engine("sglang", writes.max_tokens)),
    Row("vllm.max_model_len", "facts.workload: prompt.max + response.max", None, _if_engine("vllm", writes.max_tokens)),
    Row("sglang.enable_memory_saver", "rule: engines on the actor's ranks release their memory",
        None, _if_engine("sglang", _if_sharing(GENERATE, True))),
    Row("vllm.enable_sleep_mode", "rule: engines on the actor's ranks release their memory",
        None, _if_engine("vllm", _if_sharing(GENERATE, True))),
    Row("sglang.model_path", "job: models.actor.path",
        None, _if_engine("sglang", writes.model_path(Role.ACTOR))),
    Row("vllm.model", "job: models.actor.path", None, _if_engine("vllm", writes.model_path(Role.ACTOR))),
    # models, rewards and the algorithm
    Row(_PATH, "job: rewards.function", reads.function_reward, None, "AReaL's program names the function"),
    Row("actor.path", "job: models.actor.path", reads.models(Role.ACTOR), writes.model_path(Role.ACTOR)),
    Row("ref.path", "job: models.ref.path", reads.ref_path("actor.path"), writes.model_path(Role.REF)),
    Row("critic.path", "job: models.critic.path", reads.models(Role.CRITIC), writes.model_path(Role.CRITIC)),
    Row("tokenizer_path", "job: models.actor.path", None, writes.model_path(Role.ACTOR)),
    Row(f"{_REWARD_NORM}.mean_level", "job: algorithm",
        reads.estimator, _with_group_mean(writes.always("group")), "with the critic it says which algorithm it is"),
    Row(f"{_REWARD_NORM}.mean_leave1out", "job: algorithm",
        None, _with_group_mean(lambda source, _row: source.algorithm == "rloo"), "read with mean_level"),
    Row(f"{_REWARD_NORM}.std_level", "setting: normalise_by_std",
        None, _with_group_mean(_write_std_level), "read with mean_level"),
    Row(f"{_REWARD_NORM}.group_size", "facts.workload.group_size", None, _with_group_mean(write_field)),
    Row(f"{_ADVANTAGE_NORM}.mean_level", "job: algorithm",
        None, _with_whitening(writes.always("batch")), "read with reward_norm"),
    Row(f"{_ADVANTAGE_NORM}.std_level", "job: algorithm",
        None, _with_whitening(writes.always("batch")), "read with reward_norm"),
    Row("actor.kl_ctl", "setting: kl_coefficient", reads.kl_penalty, _write_kl),
    Row("actor.discount", "setting: gamma"),
    Row("actor.gae_lambda", "setting: gae_lambda"),
    Row("actor.optimizer.lr", "setting: actor_learning_rate", _read_resolved("actor_learning_rate")),
    Row("actor.optimizer.weight_decay", "setting: weight_decay", _read_resolved("weight_decay")),
    Row("actor.optimizer.gradient_clipping", "setting: max_grad_norm", _read_resolved("max_grad_norm")),
    Row("critic.optimizer.lr", "setting: critic_learning_rate",
        _read_resolved("critic_learning_rate"), writes.with_stage("critic_train", write_field)),
    Row("critic.eps_clip", "setting: value_clip",
        reads.number("value_clip"), writes.with_stage("critic_train", write_field)),
    Row("actor.eps_clip", "job: clip_ratio", reads.number("clip_ratio"), writes.clip_low),
    Row("actor.eps_clip_higher", "job: clip_ratio_high, or clip_ratio",
        reads.number("clip_ratio_high"), writes.clip_high),
    Row("gconfig.temperature", "setting: temperature"),
    Row("actor.temperature", "setting: temperature", None),
    Row("gconfig.top_p", "setting: top_p", reads.top_p),
    Row("gconfig.top_k", "setting: top_k", _read_top_k, _write_top_k),
    # settings that are read and not written
    Row("actor.overlong_reward_penalty", "setting: overlong_tokens", None, None, "whether the two below are read"),
    Row("actor.overlong_tokens", "setting: overlong_tokens", _if_overlong(reads.overlong_tokens), None),
    Row("actor.overlong_penalty_factor", "setting: overlong_penalty",
        _if_overlong(reads.overlong_penalty("actor.overlong_tokens")), None),
    Row("actor.use_lora", "job: models.actor.adapter", None, None, "whether the two below are read"),
    Row("actor.lora_rank", "job: models.actor.adapter.rank", _if_lora(reads.adapter_rank), None),
    Row("actor.lora_alpha", "job: models.actor.adapter.alpha", _if_lora(reads.adapter_alpha("actor.lora_rank")), None),
)  # fmt: skip
"""AReaL's keys and the fields of a job or plan, in the order of an export."""


def settings(source: ExportInput) -> Iterator[KeyValue]:
    """The keys of AReaL's configuration that express a plan.

    Raises BadInput for several epochs and for an entropy bonus, which AReaL does not have.
    """
    if (epochs := source.plan.facts.workload.num_epochs) > 1:
        raise BadInput(f"workload.num_epochs={epochs}: AReaL trains for one epoch in a step; use 1.")
    if (entropy := source.settings.entropy_coefficient) > 0:
        raise BadInput(f"entropy_coefficient={entropy}: AReaL has no entropy bonus; use 0.")
    yield from write_table(TABLE, source)


_LAUNCHER = "run_with_reward.py"
_LAUNCHER_TEXT = Template('''\
"""Runs AReaL with the reward function of $hook.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from areal import PPOTrainer
from areal.api.cli_args import PPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.utils.hf_utils import load_hf_tokenizer

if __name__ == "__main__":
    config, _ = load_expr_config(sys.argv[1:], PPOConfig)
    data = get_custom_dataset(
        split="train", dataset_config=config.train_dataset, tokenizer=load_hf_tokenizer(config.tokenizer_path)
    )
    workflow = {
        "reward_fn": "$hook.reward_fn",
        "gconfig": config.gconfig,
        "tokenizer": config.tokenizer_path,
    }
    with PPOTrainer(config, train_dataset=data) as trainer:
        trainer.train(workflow="areal.workflow.rlvr.RLVRWorkflow", workflow_kwargs=workflow)
''')
"""The launcher, which runs AReaL with the user's function; a workflow of AReaL takes the function's name
(areal/workflow/rlvr.py of its package)."""


def _files(source: ExportInput, settings: Sequence[KeyValue]) -> Mapping[str, str]:
    head = "Runs AReaL with this plan. Give train_dataset.path=PATH as an argument of this script."
    here = '"$(dirname "$0")'
    command = f'PYTHONPATH={here}:${{PYTHONPATH:-}}" python3 {here}/{_LAUNCHER}" --config {here}/config.yaml"'
    return {
        "run.sh": script(head, f"env {command}", ()),
        "config.yaml": nested_yaml(settings),
        _LAUNCHER: _LAUNCHER_TEXT.substitute(hook=HOOK_MODULE),
        **reward_hook("areal", source),
    }


AREAL = OtherTrainer(
    name="areal",
    key_file="areal",
    algorithms=("ppo", "grpo", "rloo", "reinforce++"),
    engine="sglang",
    other_engines=("vllm",),
    modes=deployment_modes,
    settings=settings,
    files=_files,
    remarks=(
        "a plan names no data: set train_dataset.path yourself.",
        "AReaL adds the KL penalty to the reward of each token, for grpo too, and averages the loss over tokens.",
        "AReaL offloads a model as a whole, its weights and its optimizer.",
    ),
    old_logprobs={"generator": ("ppo", "grpo", "rloo", "reinforce++")},
    unsupported_roles={Role.REWARD: "it scores with a function and has no reward model"},
)


def read_areal(path: Path, changed: Mapping[str, Any] | None = None) -> ParsedConfig:
    """Read the configuration in a file; `changed` are keys with values that override its own.

    Raises BadInput naming a key that a job cannot express.
    """
    setup = _training_setup(read_overrides(path, known_keys("areal"), changed=changed))
    return read_table(TABLE, setup, trainer="areal", notes=_notes, unused=_unused_keys)


def _notes(setup: TrainingSetup, _fields: Sequence[ParsedField]) -> Iterator[str]:
    config = setup.config
    if not _is_megatron(config):
        yield (
            f"actor.backend is {_backend(config, 'actor').name}: its sharding is not modelled, so the search chooses "
            "layouts and micro-batches."
        )
    for name in config.missing:
        yield f"defaults: {name} is not beside the configuration, and its values are not read; put it there."
    if not config.value("train_dataset.max_length"):
        yield (
            f"no key gives the longest prompt: {_ASSUMED_PROMPT} tokens are ASSUMED; give it as "
            "--set train_dataset.max_length=TOKENS."
        )
    yield from setup.notes()
    is_batch_wide = _has_group(config, _ADVANTAGE_NORM) and not _is_over_group(config, _ADVANTAGE_NORM)
    if setup.algorithm in ("grpo", "rloo") and is_batch_wide:
        yield (
            f"{_ADVANTAGE_NORM}: advantages are normalised over the batch too, which {setup.algorithm} of a job does "
            "not do, at the same cost."
        )
    yield from _cost_notes(config)
    if _is_megatron(config):
        for model in _models(setup):
            yield from layout_notes(f"{model}.backend: e", _backend(config, model).degrees, _layout(config, model))


def _cost_notes(config: TrainerConfig) -> Iterator[str]:
    """One sentence for each setting that is costed differently from what the configuration says."""
    if (steps := config.integer(_STALENESS)) > 1:
        yield f"{_STALENESS}={steps} is read as 1: generation is one step ahead."
    for key, other in (("actor.importance_sampling_level", "sequence"), ("actor.use_sapo_loss", True)):
        if config.value(key) == other:
            yield f"{key}={other}: a job clips each token's ratio as PPO, at the same cost."
    if config.value("actor.weight_update_mode") == "disk":
        yield "actor.weight_update_mode=disk: new weights are costed over the links between the GPUs, not by a disk."


def _unused_keys(setup: TrainingSetup) -> Iterator[str]:
    """Patterns of keys that other keys make unused."""
    config = setup.config
    for model in _STAGES:
        if model not in _models(setup):
            yield from (model, f"{model}.*")
        yield from (f"{model}.{name}.*" for name in ("fsdp", "archon") if _is_megatron(config))
    if not _is_megatron(config):
        yield "*.megatron.*"
    yield from (f"{engine}.*" for engine in _ENGINES if engine != _backend(config, "rollout").name)
    if not config.value("actor.use_lora"):
        yield "*lora*"


def _has_group(config: TrainerConfig, group: str) -> bool:
    """True if the configuration gives a key below a group that is absent by default."""
    return any(key.startswith(f"{group}.") for key in config.values)


def _training_setup(config: TrainerConfig) -> TrainingSetup:
    """The algorithm, its models and its reward; a reference needs a KL coefficient above 0.

    Raises BadInput for a teacher.
    """
    if _has_group(config, "teacher"):
        raise BadInput(
            "teacher: on-policy distillation of a configuration is not read; write its job by hand, with "
            "algorithm: distill and its teachers."
        )
    has_critic = _has_group(config, "critic")
    has_ref = config.number("actor.kl_ctl") > 0 and _has_group(config, "ref")
    estimator = PPO_ESTIMATOR if has_critic else _estimator(config)
    return TrainingSetup(
        config=config,
        key="critic.path" if has_critic else f"{_REWARD_NORM}.mean_level",
        estimator=estimator,
        has_ref=has_ref,
        kl_in_reward="actor.kl_ctl" if has_ref else None,
        reward=_function_reward(config),
        old_logprobs="recompute" if any(map(config.value, _RECOMPUTES)) else "generator",
    )


def _estimator(config: TrainerConfig) -> Estimator:
    """The estimator of a configuration without a critic, from the normalisation of rewards and advantages. AReaL
    averages the loss over tokens."""
    over_group = _is_over_group(config, _ADVANTAGE_NORM) and not _is_over_group(config, _REWARD_NORM)
    normalised = _ADVANTAGE_NORM if over_group else _REWARD_NORM
    leaves_one_out, std = (config.value(f"{normalised}.{key}") for key in ("mean_leave1out", "std_level"))
    is_whitened = _has_group(config, _ADVANTAGE_NORM) and not over_group
    estimator = REINFORCE_ESTIMATOR
    if _is_over_group(config, normalised) and config.integer(_SAMPLES) > 1:
        estimator = RLOO_ESTIMATOR if leaves_one_out else GRPO_ESTIMATOR
        if estimator is GRPO_ESTIMATOR and std is None:
            without_std = Estimator(algorithm="grpo", settings={"normalise_by_std": False})
            estimator = REINFORCE_BASELINE_ESTIMATOR if is_whitened else without_std
    return Estimator(algorithm=estimator.algorithm, settings={**estimator.settings, "loss_mean": "token"})


def _is_over_group(config: TrainerConfig, norm: str) -> bool:
    """True if rewards or advantages are compared with those of the other samples of their prompt."""
    return _has_group(config, norm) and config.value(f"{norm}.mean_level") == "group"


def _function_reward(config: TrainerConfig) -> FunctionReward:
    """The reward of the job: our check of answers for maths data, or a function that the user writes."""
    is_maths = _MATHS_DATA.search(str(config.text(_PATH)))
    return FunctionReward(MATHS if is_maths else USER_FUNCTION, (_PATH,))
