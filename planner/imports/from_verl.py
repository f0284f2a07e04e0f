"""What a configuration of verl says: hydra overrides in a script, or a YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.planner.export.known_keys import known_keys
from meshwright.planner.export.to_verl import VERL
from meshwright.planner.imports.estimators import (
    GRPO,
    LOSS_MEANS,
    MATHS,
    PPO,
    REINFORCE,
    REINFORCE_BASELINE,
    RLOO,
    YOUR_FUNCTION,
    Configuration,
    Estimator,
    FunctionReward,
    alone_notes,
    estimator_of,
)
from meshwright.planner.imports.given_keys import GivenKeys, read_overrides
from meshwright.planner.imports.said import (
    MEGATRON_SIZES,
    MEMORY_SHARE,
    Configured,
    Said,
    cluster_of,
    layout_of,
    narrowed,
    pools_in_a_row,
)
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout

_A, _R, _RM = "actor_rollout_ref", "actor_rollout_ref.rollout", "reward.reward_model"
_ENGINES = {f"{_A}.actor": ("actor_logprob", "actor_train"), "critic": ("critic_value", "critic_train")}
_DEGREES = {**MEGATRON_SIZES, "vpp": "virtual_pipeline_model_parallel_size"}

_STRATEGY = f"{_A}.actor.strategy"
_ESTIMATOR = "algorithm.adv_estimator"
_ESTIMATORS: Mapping[str, Estimator] = {
    "gae": PPO,
    "grpo": GRPO,
    "grpo_vectorized": GRPO,
    "rloo": RLOO,
    "rloo_vectorized": RLOO,
    "reinforce_plus_plus": REINFORCE,
    "reinforce_plus_plus_baseline": REINFORCE_BASELINE,
}

_ROLLOUTS = (VERL.engine, *VERL.other_engines)


def read_verl(path: Path, changed: Mapping[str, Any] | None = None) -> Configured:
    """The configuration in a file, with other values for the keys that are `changed`.

    Raises BadInput naming the key that has no place in a job."""
    given = read_overrides(path, known_keys("verl"), changed=changed)
    configuration = _configuration(given)
    is_megatron = _is_megatron(given)
    notes: list[str] = []
    if not is_megatron:
        notes.append(
            "model_engine is not megatron: FSDP sharding is not modelled, so layouts and micro-batches are free."
        )
    if given.value("trainer.v1.trainer_mode") == "colocate_async":
        notes.append("trainer.v1.trainer_mode=colocate_async is read as sync: what it overlaps is not modelled.")
    notes += [*configuration.notes(), *_loss_notes(given), *alone_notes(given, _ESTIMATOR, _ESTIMATORS, f"{_R}.n")]
    said = [*_workload(configuration), *_models(configuration), *_algorithm(configuration)]
    said += [*_pools(configuration), *_generation(given)]
    if is_megatron:
        notes += _expert_notes(configuration)
        said += [*_training(configuration), *_reference(configuration)]
        notes += _free_rows(configuration, said)
    ahead = int(given.value("trainer.v1.trainer_mode") == "separate_async")
    return configuration.configured("verl", said, steps_ahead=ahead, notes=notes, idle=_idle(configuration))


def _idle(configuration: Configuration) -> Iterator[str]:
    """Patterns of keys that are of no use beside others."""
    given = configuration.given
    if not configuration.has_ref:
        yield f"{_A}.ref.*"
    if not configuration.stages("critic_train"):
        yield "critic.*"
    if configuration.kl_in_loss is None:
        yield f"{_A}.actor.kl_loss_coef"
    if configuration.kl_in_reward is None:
        yield "algorithm.kl_ctrl.*"
    if not _has_reward_model(given):
        yield f"{_RM}.*"
    dynamic = {f"{_A}.actor": "use_dynamic_bsz", _R: "log_prob_use_dynamic_bsz", "critic": "use_dynamic_bsz"}
    for prefix, key in dynamic.items():
        other = "*micro_batch_size*" if given.value(f"{prefix}.{key}") else "*max_token_len_per_gpu"
        yield f"{prefix}.{other}"
    if given.value(f"{_A}.ref.log_prob_use_dynamic_bsz"):
        yield f"{_A}.ref.*micro_batch_size*"


def _is_megatron(given: GivenKeys) -> bool:
    """The engine, found by its name, by the configuration's name, or by keys that no other engine has."""
    names = (given.value("model_engine"), given.value(_STRATEGY) if given.has(_STRATEGY) else None)
    named = any(word.startswith("--config-name") and "megatron" in word for word in given.command)
    return "megatron" in names or named or any(".megatron." in key for key in given.given)


def _configuration(given: GivenKeys) -> Configuration:
    """Follows verl's own rules (trainer/ppo/utils.py): there is a reference where a KL penalty asks for it.

    Raises BadInput for distillation, and for PPO without a critic."""
    if given.value("distillation.enabled"):
        raise BadInput(
            "distillation.enabled=True: on-policy distillation of a configuration is not read; write its job by hand, "
            "with algorithm: distill and its teachers."
        )
    estimator = estimator_of(given, _ESTIMATOR, _ESTIMATORS, single=f"{_R}.n")
    if estimator is PPO and given.value("critic.enable") is False:
        raise BadInput(f"critic.enable=False: {_ESTIMATOR}=gae trains a critic; enable it or choose another estimator.")
    in_loss, in_reward = given.value(f"{_A}.actor.use_kl_loss"), given.value("algorithm.use_kl_in_reward")
    return Configuration(
        given=given,
        key=_ESTIMATOR,
        estimator=estimator,
        has_ref=bool(in_loss or in_reward),
        kl_in_loss=f"{_A}.actor.kl_loss_coef" if in_loss else None,
        kl_in_reward="algorithm.kl_ctrl.kl_coef" if in_reward else None,
        reward=None if _has_reward_model(given) else _paid_by(given),
    )


def _paid_by(given: GivenKeys) -> FunctionReward:
    """A user's own function, or verl's own checks of answers."""
    keys = ("reward.custom_reward_function.path", "custom_reward_function.path")
    own = next((key for key in keys if given.text(key)), None)
    return FunctionReward(YOUR_FUNCTION, (own,)) if own else FunctionReward(MATHS, ("reward.reward_manager.name",))


def _loss_notes(given: GivenKeys) -> Iterator[str]:
    mode, key = given.value(f"{_A}.actor.policy_loss.loss_mode"), f"{_A}.actor.loss_agg_mode"
    if mode != "vanilla":
        yield f"{_A}.actor.policy_loss.loss_mode={mode}: a job clips each token's ratio as PPO, which costs as much."
    if given.value(key) not in LOSS_MEANS:
        yield f"{key}={given.value(key)} is no loss aggregation that a job has; the job keeps its own."


def _workload(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
    batch, samples = given.whole("data.train_batch_size"), given.whole(f"{_R}.n")
    yield Said("workload.batch_size", batch * samples, ("data.train_batch_size", f"{_R}.n"))
    yield from configuration.group(samples, f"{_R}.n")
    yield Said("workload.prompt", given.whole("data.max_prompt_length"), ("data.max_prompt_length",))
    yield Said("workload.response", given.whole("data.max_response_length"), ("data.max_response_length",))
    key = f"{_A}.actor.ppo_mini_batch_size"
    yield Said("workload.num_minibatches", max(1, batch // given.whole(key)), (key,))
    key = f"{_A}.actor.ppo_epochs"
    yield Said("workload.num_epochs", given.whole(key), (key,))


def _models(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
    for role, key in (("actor", f"{_A}.model.path"), ("ref", f"{_A}.model.path"), ("critic", "critic.model.path")):
        if role in configuration.graph.roles:
            yield Said(f"models.{role}", str(given.text(key)), (key,))
    if _has_reward_model(given):
        key = f"{_RM}.model_path" if given.value(f"{_RM}.model_path") else "reward_model.model.path"
        yield Said("models.reward", str(given.text(key)), (key,))


def _algorithm(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
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
    yield from configuration.settings(fields)
    yield from configuration.sampling(top_p=f"{_R}.top_p", top_k=f"{_R}.top_k")
    for role, optimizer in (("actor", f"{_A}.actor.optim"), ("critic", "critic.optim")):
        yield from configuration.warmup(role, f"{optimizer}.lr_warmup_steps")
    yield from _overlong(configuration)
    for prefix in (f"{_A}.model.lora.rank", f"{_A}.model.lora_rank"):
        if given.value(prefix):
            yield from configuration.adapter(prefix, prefix.removesuffix("rank") + "alpha")
            break
    if given.value(f"{_R}.quantization") == "fp8":
        yield Said("generation_weights", "fp8", (f"{_R}.quantization",))
    key = "algorithm.norm_adv_by_std_in_grpo"
    yield from configuration.setting("normalise_by_std", bool(given.value(key)), key)
    key = f"{_A}.actor.loss_agg_mode"
    if loss_mean := LOSS_MEANS.get(given.value(key)):
        yield from configuration.setting("loss_mean", loss_mean, key)


def _overlong(configuration: Configuration) -> Iterator[Said]:
    """Yields DAPO's penalty of overlong responses, by the key that it has and the one that it had before."""
    for manager in ("reward.reward_kwargs", "reward_model.reward_kwargs"):
        prefix = f"{manager}.overlong_buffer_cfg"
        if configuration.given.value(f"{prefix}.enable"):
            yield from configuration.overlong(f"{prefix}.len", f"{prefix}.penalty_factor")


def _has_reward_model(given: GivenKeys) -> bool:
    """Whether a reward model scores, by the key that it has or the one that it had before."""
    return bool(given.value(f"{_RM}.enable") or given.value("reward_model.enable"))


def _shares(given: GivenKeys) -> dict[str, tuple[int, int]]:
    """The pools by name: their nodes, and ranks on each."""
    found = {"train": (given.whole("trainer.nnodes"), given.whole("trainer.n_gpus_per_node"))}
    if given.value("trainer.v1.trainer_mode") == "separate_async":
        found["generate"] = (given.whole(f"{_R}.nnodes"), given.whole(f"{_R}.n_gpus_per_node"))
    if _has_reward_model(given) and given.value(f"{_RM}.enable_resource_pool"):
        found["score"] = (given.whole(f"{_RM}.nnodes"), given.whole(f"{_RM}.n_gpus_per_node"))
    return found


def _pools(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
    shares = _shares(given)
    keys = ("trainer.nnodes", "trainer.n_gpus_per_node")
    nodes, per_node = cluster_of(shares)
    yield Said("cluster.nodes", nodes, keys)
    yield Said("cluster.ranks_per_node", per_node, keys)
    pools = dict(pools_in_a_row((name, nodes * ranks) for name, (nodes, ranks) in shares.items()))
    where = {"actor_generate": "generate", "reward_score": "score"}
    for stage in configuration.graph.by_name:
        pool = pools.get(where.get(stage, "train"), pools["train"])
        yield Said(f"{stage}.pool", pool, keys)


def _generation(given: GivenKeys) -> Iterator[Said]:
    if given.value(f"{_R}.name") in _ROLLOUTS:
        yield Said("engine", given.value(f"{_R}.name"), (f"{_R}.name",))
    shares = _shares(given)
    nodes, ranks = shares.get("generate", shares["train"])
    tp, key = given.whole(f"{_R}.tensor_model_parallel_size"), f"{_R}.tensor_model_parallel_size"
    layout_of({"tp": tp}, nodes * ranks)
    yield Said("actor_generate.tp", tp, (key,))
    key = f"{_R}.pipeline_model_parallel_size"
    yield Said("actor_generate.pp", given.whole_or(key, 1), (key,))
    yield Said("actor_generate.generation_slots", given.whole(f"{_R}.max_num_seqs"), (f"{_R}.max_num_seqs",))
    yield Said(MEMORY_SHARE, given.number(f"{_R}.gpu_memory_utilization"), (f"{_R}.gpu_memory_utilization",))
    if _has_reward_model(given):
        key = f"{_RM}.rollout.tensor_model_parallel_size"
        yield Said("reward_score.tp", given.whole(key), (key,))
        yield Said("reward_score.pp", 1, (f"{_RM}.rollout.pipeline_model_parallel_size",))


def _degrees(given: GivenKeys, engine: str) -> dict[str, int]:
    keys = {axis: f"{engine}.megatron.{name}" for axis, name in _DEGREES.items()}
    return {axis: int(axis != "etp") if given.value(key) is None else given.whole(key) for axis, key in keys.items()}


def _layout(given: GivenKeys, engine: str) -> Layout:
    nodes, ranks = _shares(given)["train"]
    return layout_of(
        _degrees(given, engine), nodes * ranks, sp=bool(given.value(f"{engine}.megatron.sequence_parallel"))
    )


def _expert_notes(configuration: Configuration) -> Iterator[str]:
    engines = [engine for engine, stages in _ENGINES.items() if configuration.stages(*stages)]
    for engine in (*engines, *([f"{_A}.ref"] if configuration.stages("ref_logprob") else [])):
        degrees, layout = _degrees(configuration.given, engine), _layout(configuration.given, engine)
        yield from narrowed(f"{engine}.megatron.{_DEGREES['ep']}", degrees, layout)


def _training(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
    engines = {engine: stages for engine, stages in _ENGINES.items() if configuration.stages(*stages)}
    for engine, stages in engines.items():
        layout, prefix = _layout(given, engine), f"{engine}.megatron"
        keys = tuple(f"{prefix}.{name}" for name in _DEGREES.values())
        for stage, key in zip(stages, _budgets(given, engine), strict=True):
            plain = layout if stage.endswith("train") else Layout(**{**vars(layout), "vpp": 1})
            yield Said(f"{stage}.layout", str(plain), keys)
            yield from _rows(given, stage, key, layout.cp)
        key = f"{prefix}.override_transformer_config.recompute_granularity"
        yield Said(f"{stages[1]}.recompute", given.value(key) or "none", (key,))
        offloads = (f"{prefix}.optimizer_offload", f"{engine}.optim.override_optimizer_config.optimizer_cpu_offload")
        are_away = [bool(given.value(key)) for key in offloads]
        yield Said(f"{stages[1]}.offload", "optimizer" if any(are_away) else "none", offloads)


def _reference(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
    if not configuration.stages("ref_logprob"):
        return
    layout, prefix = _layout(given, f"{_A}.ref"), f"{_A}.ref.megatron"
    keys = tuple(f"{prefix}.{name}" for name in _DEGREES.values())
    yield Said("ref_logprob.layout", str(Layout(**{**vars(layout), "vpp": 1})), keys)
    key = f"{_A}.ref.log_prob_{_budget(given.value(f'{_A}.ref.log_prob_use_dynamic_bsz'))}"
    yield from _rows(given, "ref_logprob", key, layout.cp)
    key = f"{prefix}.param_offload"
    yield Said("ref_logprob.offload", "weights" if given.value(key) else "none", (key,))


def _budgets(given: GivenKeys, engine: str) -> tuple[str, str]:
    """The keys of the rows, or tokens, of the forward pass and of the training."""
    name = _budget(given.value(f"{engine}.use_dynamic_bsz"))
    if engine == "critic":
        forward = "forward_max_token_len_per_gpu" if given.value("critic.use_dynamic_bsz") else f"ppo_{name}"
        return f"critic.{forward}", f"critic.ppo_{name}"
    forward = _budget(given.value(f"{_R}.log_prob_use_dynamic_bsz"))
    return f"{_R}.log_prob_{forward}", f"{engine}.ppo_{name}"


def _budget(is_dynamic: object) -> str:
    return "max_token_len_per_gpu" if is_dynamic else "micro_batch_size_per_gpu"


def _rows(given: GivenKeys, stage: str, key: str, cp: int) -> Iterator[Said]:
    """Yields the micro-batch of a stage; nothing where the key has no value, since verl then has another key for it, of
    all ranks together."""
    if given.value(key) is None:
        return
    if "token" in key:
        yield Said(f"{stage}.micro_batch_tokens", given.whole(key) * cp, (key,))
    else:
        yield Said(f"{stage}.micro_batch_size", given.whole(key), (key,))


def _free_rows(configuration: Configuration, said: Iterable[Said]) -> Iterator[str]:
    """Yields a sentence for each stage whose micro-batch no key gives."""
    told = {one.what for one in said}
    for stages in (*_ENGINES.values(), ("ref_logprob",)):
        for stage in configuration.stages(*stages):
            if not {f"{stage}.micro_batch_size", f"{stage}.micro_batch_tokens"} & told:
                yield f"{stage}: no key gives the rows or tokens of its micro-batch on a rank, so they stay free."
