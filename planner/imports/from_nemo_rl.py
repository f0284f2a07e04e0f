"""What a configuration of NeMo-RL says: a YAML file over those that its `defaults` name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.planner.export.known_keys import known_keys
from meshwright.planner.imports.estimators import (
    GRPO,
    MATHS,
    PPO,
    REINFORCE,
    REINFORCE_BASELINE,
    Configuration,
    Estimator,
    FunctionReward,
    estimator_of,
)
from meshwright.planner.imports.given_keys import GivenKeys, read_overrides
from meshwright.planner.imports.said import (
    MEGATRON_SIZES,
    MEMORY_SHARE,
    Configured,
    Said,
    layout_of,
    narrowed,
    pools_in_a_row,
)
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout

_G, _RM = "policy.generation", "env.reward_model"
_ESTIMATORS: Mapping[str, Estimator] = {"gae": PPO, "grpo": GRPO, "reinforce_plus_plus": REINFORCE}
_DEFAULTS = ("grpo_math_1B.yaml", "ppo_math_1B.yaml")
"""Files whose values are known."""

_OTHERS = ("dpo.", "sft.", "distillation.", "teacher.", "teachers.", "rm.", "eval.")
"""Prefixes of keys that configure other trainings than reinforcement learning."""

_OTHER_FILES = re.compile(r"^(dpo|sft|distillation|rm|eval)\b|^(dpo|sft|distillation|rm)_")
"""Names of files that configure those."""

_PRECISIONS = {
    "policy.precision": ("bfloat16",),
    "value.precision": ("bfloat16", None),
    f"{_G}.vllm_cfg.precision": ("bfloat16", "fp8"),
}
"""Precisions that a job has, by key."""

_STAGES = {"policy": ("actor_train", "actor_logprob", "ref_logprob"), "value": ("critic_train", "critic_value")}


def read_nemo_rl(path: Path, changed: Mapping[str, Any] | None = None) -> Configured:
    """The configuration in a file, with other values for the keys that are `changed`.

    Raises BadInput naming the key that has no place in a job."""
    given = read_overrides(path, known_keys("nemo_rl"), changed=changed)
    if other := _other_training(given):
        raise BadInput(
            f"{other}: configuration {path} is of another training than reinforcement learning; give one with ppo or "
            "grpo."
        )
    try:
        return _read(given)
    except BadInput as error:
        names = [name for name in given.missing if Path(name).name not in _DEFAULTS]
        if not names:
            raise
        beside = f"{', '.join(names)} is not beside the configuration, which goes on from it: put it there."
        raise BadInput(f"{error} {beside}") from error


def _read(given: GivenKeys) -> Configured:
    """Reads the keys of a configuration of ppo or grpo.

    Raises BadInput naming the key that has no place in a job."""
    is_grpo = any(key.startswith("grpo.") for key in given.given) or any("grpo" in name for name in given.missing)
    if is_grpo:
        given = replace(given, known=known_keys("nemo_rl_grpo"))
    group = "grpo" if is_grpo else "ppo"
    configuration = _configuration(given, group)
    is_megatron = _is_megatron(given)
    notes = (
        []
        if is_megatron
        else ["policy.megatron_cfg is not enabled: FSDP sharding is not modelled, so layouts and rows are free."]
    )
    notes += [*configuration.notes(), *_notes(given)]
    pools = dict(_pools(given))
    said = [*_workload(configuration, group), *_models(configuration), *_algorithm(configuration, group)]
    said += [*_places(configuration, pools), *_engines(given)]
    if is_megatron:
        notes += _expert_notes(configuration, int(pools["train"].partition(":")[2]))
        said += [*_training(configuration, pools)]
    steps = f"{group}.async_{group}.max_trajectory_age_steps"
    ahead = given.whole(steps) if given.value(f"{group}.async_{group}.enabled") else 0
    if ahead > 1:
        notes.append(f"{steps}={ahead} is read as 1: generation is one step ahead.")
    return configuration.configured(
        "nemo-rl", said, steps_ahead=min(ahead, 1), notes=notes, idle=_idle(configuration, is_megatron=is_megatron)
    )


def _idle(configuration: Configuration, *, is_megatron: bool) -> Iterator[str]:
    """Patterns of keys that are of no use beside others."""
    if is_megatron:
        yield from ("*.dtensor_cfg.*", "*.automodel_cfg.*", "policy.optimizer*", "value.optimizer*")
    else:
        yield "*.megatron_cfg.*"
    if not configuration.stages("critic_train"):
        yield from ("value.*", "value_loss_fn.*")


def _other_training(given: GivenKeys) -> str | None:
    """The key, or the file that it goes on from, by which a configuration is of another training."""
    for name in given.missing:
        if _OTHER_FILES.match(Path(name).name):
            return f"defaults: {name}"
    return next((key for key in given.given if key.startswith(_OTHERS)), None)


def _is_megatron(given: GivenKeys) -> bool:
    """Whether Megatron-core trains: by its key, by the name of the file that the configuration goes on from and that is
    not here, by keys that only Megatron has, or by default."""
    key = "policy.megatron_cfg.enabled"
    if not given.has(key):
        names = [Path(name).name for name in given.missing]
        if any("megatron" in name for name in names):
            return True
        if any(name in _DEFAULTS for name in names):
            return False
        if names:
            return any(one.startswith("policy.megatron_cfg.") for one in given.given)
    return bool(given.value(key))


def _configuration(given: GivenKeys, group: str) -> Configuration:
    """A reference is asked unless that is skipped; the KL penalty is in the loss unless it is put inside the reward."""
    key, kl = f"{group}.adv_estimator.name", "loss_fn.reference_policy_kl_penalty"
    estimator = estimator_of(given, key, _ESTIMATORS)
    if estimator is REINFORCE and given.value("grpo.adv_estimator.minus_baseline"):
        estimator = REINFORCE_BASELINE
    has_ref = not given.value(f"{group}.skip_reference_policy_logprobs_calculation")
    in_reward = bool(given.value("loss_fn.use_kl_in_reward")) or estimator is PPO
    return Configuration(
        given=given,
        key=key,
        estimator=estimator,
        has_ref=has_ref,
        kl_in_loss=kl if has_ref and not in_reward else None,
        kl_in_reward=kl if in_reward and has_ref else None,
        reward=None if given.has(f"{_RM}.model_name") else FunctionReward(MATHS, ("env.math.num_workers",)),
    )


def _notes(given: GivenKeys) -> Iterator[str]:
    for name in given.missing:
        if Path(name).name not in _DEFAULTS:
            yield f"defaults: {name} is not beside the configuration; what it says is read as in {given.known.source}."
    for key, known in _PRECISIONS.items():
        if (precision := given.value(key)) not in known:
            yield f"{key}={precision}: training and generation are costed in bf16, generation in FP8 where it says fp8."
    if given.value("loss_fn.sequence_level_importance_ratios"):
        yield "loss_fn.sequence_level_importance_ratios: a job clips each token's ratio as PPO, which costs as much."
    if given.value("grpo.use_leave_one_out_baseline"):
        yield "grpo.use_leave_one_out_baseline: the baseline of a job is the mean reward of the whole group."
    if given.whole("data.max_input_seq_length") >= given.whole("policy.max_total_sequence_length"):
        yield (
            "data.max_input_seq_length allows prompts of all tokens of a sequence: what the longest response leaves of "
            "them is read as a prompt, and half where it leaves none."
        )


def _workload(configuration: Configuration, group: str) -> Iterator[Said]:
    given = configuration.given
    keys = (f"{group}.num_prompts_per_step", f"{group}.num_generations_per_prompt")
    batch, samples = map(given.whole, keys)
    yield Said("workload.batch_size", batch * samples, keys)
    yield from configuration.group(samples, keys[1])
    total, key = given.whole("policy.max_total_sequence_length"), f"{_G}.max_new_tokens"
    prompt, response = given.whole("data.max_input_seq_length"), given.whole(key)
    if prompt >= total:
        prompt = max(1, total - response if response < total else total // 2)
    yield Said("workload.prompt", prompt, ("data.max_input_seq_length",))
    yield Said("workload.response", min(response, total - prompt), (key, "policy.max_total_sequence_length"))
    key = "policy.train_global_batch_size"
    if (size := given.whole(key)) < 1:
        raise BadInput(f"{key}={size} sequences are no minibatch; use 1 or more.")
    yield Said("workload.num_minibatches", max(1, batch * samples // size), (key,))
    if configuration.algorithm == "ppo":
        yield Said("workload.num_epochs", given.whole("ppo.ppo_epochs"), ("ppo.ppo_epochs",))


def _models(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
    keys = {"actor": "policy.model_name", "ref": "policy.model_name", "critic": "value.model_name"}
    if given.has(f"{_RM}.model_name"):
        keys["reward"] = f"{_RM}.model_name"
    for role, key in keys.items():
        if role in configuration.graph.roles:
            yield Said(f"models.{role}", str(given.text(key)), (key,))


def _algorithm(configuration: Configuration, group: str) -> Iterator[Said]:
    given = configuration.given
    is_megatron = _is_megatron(given)
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
    yield from configuration.settings(fields)
    yield from configuration.sampling(top_p=f"{_G}.top_p", top_k=f"{_G}.top_k")
    if is_megatron:
        yield from configuration.warmup("actor", "policy.megatron_cfg.scheduler.lr_warmup_iters")
        yield from configuration.warmup("critic", "value.megatron_cfg.scheduler.lr_warmup_iters")
    if given.value(f"{group}.reward_shaping.enabled"):
        shaping = f"{group}.reward_shaping.overlong_buffer"
        yield from configuration.overlong(f"{shaping}_length", f"{shaping}_penalty")
    if given.value("policy.megatron_cfg.peft.enabled"):
        yield from configuration.adapter("policy.megatron_cfg.peft.dim", "policy.megatron_cfg.peft.alpha")
    elif given.value("policy.dtensor_cfg.lora_cfg.enabled"):
        yield from configuration.adapter("policy.dtensor_cfg.lora_cfg.dim", "policy.dtensor_cfg.lora_cfg.alpha")
    if given.value(f"{_G}.vllm_cfg.precision") == "fp8":
        yield Said("generation_weights", "fp8", (f"{_G}.vllm_cfg.precision",))
    key = "loss_fn.token_level_loss"
    yield from configuration.setting("loss_mean", "token" if given.value(key) else "sequence", key)
    keys = ("grpo.adv_estimator.normalize_rewards", "grpo.normalize_rewards")
    key = next((key for key in keys if given.has(key)), keys[1])
    yield from configuration.setting("normalise_by_std", bool(given.value(key)), key)


def _pools(given: GivenKeys) -> Iterator[tuple[str, str]]:
    """Those of rewards and generation are taken from the cluster, and what is left trains."""
    per_node = given.whole("cluster.gpus_per_node")
    left = given.whole("cluster.num_nodes") * per_node
    taken = {}
    if not given.value(f"{_G}.colocated.enabled"):
        taken["generate"] = _share(given, f"{_G}.colocated.resources", per_node)
    if given.has(f"{_RM}.model_name"):
        taken["score"] = _share(given, f"{_RM}.resources", per_node)
    if sum(taken.values()) >= left:
        raise BadInput(f"cluster.num_nodes={given.value('cluster.num_nodes')} leaves no rank to train; give it more.")
    yield from pools_in_a_row([("train", left - sum(taken.values())), *taken.items()])


def _share(given: GivenKeys, prefix: str, per_node: int) -> int:
    return given.whole_or(f"{prefix}.num_nodes", 1) * given.whole_or(f"{prefix}.gpus_per_node", per_node)


def _places(configuration: Configuration, pools: dict[str, str]) -> Iterator[Said]:
    given = configuration.given
    for what, key in (("nodes", "cluster.num_nodes"), ("ranks_per_node", "cluster.gpus_per_node")):
        yield Said(f"cluster.{what}", given.whole(key), (key,))
    keys = (f"{_G}.colocated.enabled", f"{_G}.colocated.resources.num_nodes")
    yield Said("actor_generate.pool", pools.get("generate", pools["train"]), keys)
    if configuration.reward is None:
        yield Said("reward_score.pool", pools.get("score", pools["train"]), (f"{_RM}.resources.num_nodes",))
    for stage in configuration.stages(*_STAGES["policy"], *_STAGES["value"]):
        yield Said(f"{stage}.pool", pools["train"], ("cluster.num_nodes", "cluster.gpus_per_node"))


def _engines(given: GivenKeys) -> Iterator[Said]:
    for axis, name in (("tp", "tensor_parallel_size"), ("pp", "pipeline_parallel_size")):
        key = f"{_G}.vllm_cfg.{name}"
        yield Said(f"actor_generate.{axis}", given.whole(key), (key,))
    key = f"{_G}.vllm_cfg.gpu_memory_utilization"
    yield Said(MEMORY_SHARE, given.number(key), (key,))
    if given.has(f"{_RM}.model_name"):
        key = f"{_RM}.dtensor_cfg.tensor_parallel_size"
        yield Said("reward_score.tp", given.whole(key), (key,))
        yield Said("reward_score.pp", 1, (key,))


def _layout(given: GivenKeys, model: str, num_ranks: int) -> Layout:
    sp = bool(given.value(f"{model}.megatron_cfg.sequence_parallel"))
    return layout_of(_degrees(given, model), num_ranks, sp=sp)


def _degrees(given: GivenKeys, model: str) -> dict[str, int]:
    return {axis: given.whole(f"{model}.megatron_cfg.{name}") for axis, name in MEGATRON_SIZES.items()}


def _expert_notes(configuration: Configuration, num_ranks: int) -> Iterator[str]:
    for model, stages in _STAGES.items():
        if configuration.stages(*stages):
            degrees, layout = _degrees(configuration.given, model), _layout(configuration.given, model, num_ranks)
            yield from narrowed(f"{model}.megatron_cfg.{MEGATRON_SIZES['ep']}", degrees, layout)


def _training(configuration: Configuration, pools: dict[str, str]) -> Iterator[Said]:
    given, num_ranks = configuration.given, int(pools["train"].partition(":")[2])
    present = {model: configuration.stages(*stages) for model, stages in _STAGES.items()}
    for model, stages in present.items():
        if not stages:
            continue
        prefix = f"{model}.megatron_cfg"
        layout = _layout(given, model, num_ranks)
        keys = tuple(f"{prefix}.{name}" for name in MEGATRON_SIZES.values())
        for stage in stages:
            yield Said(f"{stage}.layout", str(layout), keys)
            yield _rows(given, model, stage)
        keys = (f"{prefix}.activation_checkpointing", f"{prefix}.recompute_granularity")
        recompute = given.value(keys[1]) or "full" if given.value(keys[0]) else "none"
        yield Said(f"{stages[0]}.recompute", recompute, keys)
    keys = ("policy.offload_optimizer_for_logprob", "policy.megatron_cfg.optimizer.optimizer_cpu_offload")
    offloads = [bool(given.value(key)) for key in keys]
    yield Said("actor_train.offload", "optimizer" if any(offloads) else "none", keys)


def _rows(given: GivenKeys, model: str, stage: str) -> Said:
    """The rows of a micro-batch, or the tokens of one that is packed: those of all ranks that share its sequences."""
    trains = stage.endswith("train")
    for packing in ("sequence_packing", "dynamic_batching"):
        if given.value(f"{model}.{packing}.enabled"):
            key = f"{model}.{packing}.{'train' if trains else 'logprob'}_mb_tokens"
            return Said(f"{stage}.micro_batch_tokens", given.whole(key), (key, f"{model}.{packing}.enabled"))
    key = f"{model}.train_micro_batch_size" if trains or model == "value" else "policy.logprob_batch_size"
    return Said(f"{stage}.micro_batch_size", given.whole(key), (key,))
