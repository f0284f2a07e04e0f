"""Import of slime configurations: the flags of `train.py` or `train_async.py` in a script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.planner.export.known_keys import known_keys
from meshwright.planner.imports.estimators import (
    GRPO_ESTIMATOR,
    MATHS,
    PPO_ESTIMATOR,
    REINFORCE_BASELINE_ESTIMATOR,
    REINFORCE_ESTIMATOR,
    USER_FUNCTION,
    Estimator,
    FunctionReward,
    TrainingSetup,
    estimator_of,
    single_sample_notes,
)
from meshwright.planner.imports.given_keys import TrainerConfig, read_flags
from meshwright.planner.imports.said import (
    MEMORY_SHARE,
    ParsedConfig,
    ParsedField,
    cluster_of,
    consecutive_pools,
    layout_notes,
    layout_of,
    nodes_of_ranks,
)
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.stages import Role
from meshwright.profiles.values import MAX_YAML_BYTES, read_text, yaml_value

_TRAINED = ("actor_train", "actor_logprob", "ref_logprob", "critic_train", "critic_value")
_DEGREES = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
}

_MATHS = ("math", "dapo", "deepscaler")
_ASSUMED_PROMPT = 1024
"""Tokens of the longest prompt where no key gives it; a note says so."""

_ESTIMATOR = "advantage-estimator"
_ESTIMATORS: Mapping[str, Estimator] = {
    "ppo": PPO_ESTIMATOR,
    "grpo": GRPO_ESTIMATOR,
    "gspo": GRPO_ESTIMATOR,
    "reinforce_plus_plus": REINFORCE_ESTIMATOR,
    "reinforce_plus_plus_baseline": REINFORCE_BASELINE_ESTIMATOR,
}


def read_slime(path: Path, changed: Mapping[str, Any] | None = None) -> ParsedConfig:
    """Read the configuration in a script; `changed` are keys with values that override its own.

    Raises BadInput naming a flag that a job cannot express.
    """
    config = read_flags(path, known_keys("slime"), changed=changed)
    reward_model = _reward_model(config, path)
    setup = _training_setup(config, reward_model)
    notes = [*_prompt_notes(config), *setup.notes()]
    notes += single_sample_notes(config, _ESTIMATOR, _ESTIMATORS, "n-samples-per-prompt")
    if config.value(_ESTIMATOR) == "gspo":
        notes.append("--advantage-estimator gspo: a job clips each token's ratio as PPO, which costs as much.")
    degrees = _degrees(config)
    notes += layout_notes(_DEGREES["ep"], degrees, _layout(config))
    is_async = any(Path(word).name == "train_async.py" for word in config.command)
    fields = [*_workload_fields(setup), *_model_fields(setup, reward_model), *_algorithm_fields(setup)]
    fields += [*_placement_fields(setup, reward_model), *_training_fields(setup)]
    return setup.parsed("slime", fields, steps_ahead=int(is_async), notes=notes)


def _training_setup(config: TrainerConfig, reward_model: dict[str, Any] | None) -> TrainingSetup:
    """The algorithm by slime's own rule (ray/placement_group.py): a KL penalty needs a reference model."""
    estimator = estimator_of(config, _ESTIMATOR, _ESTIMATORS, single="n-samples-per-prompt")
    in_loss, in_reward = bool(config.value("use-kl-loss")), config.number("kl-coef") != 0
    return TrainingSetup(
        config=config,
        key=_ESTIMATOR,
        estimator=estimator,
        has_ref=in_loss or in_reward,
        kl_in_loss="kl-loss-coef" if in_loss else None,
        kl_in_reward="kl-coef" if in_reward or estimator is PPO_ESTIMATOR else None,
        reward=None if reward_model else _function_reward(config),
    )


def _function_reward(config: TrainerConfig) -> FunctionReward:
    """The reward of the job: a user's function or, for slime's maths rewards, our built-in one."""
    kind = config.value("rm-type")
    if config.value("custom-rm-path") is None and kind in _MATHS:
        return FunctionReward(MATHS, ("rm-type",))
    return FunctionReward(USER_FUNCTION, ("custom-rm-path", "rm-type"))


def _reward_model(config: TrainerConfig, path: Path) -> dict[str, Any] | None:
    """The reward model and its engines from the SGLang configuration beside the script; None where it has none."""
    name = config.value("sglang-config")
    file = path.parent / str(name)
    if name is None or not file.exists():
        return None
    tree = yaml_value(read_text(file, "configuration", MAX_YAML_BYTES), f"configuration {file}")
    models = tree.get("sglang", []) if isinstance(tree, dict) else []
    return next((model for model in models if model.get("name") == "reward"), None)


def _workload_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    samples = config.integer("n-samples-per-prompt")
    batch = config.integer("rollout-batch-size") * samples
    yield ParsedField("workload.batch_size", batch, ("rollout-batch-size", "n-samples-per-prompt"))
    yield from setup.group(samples, "n-samples-per-prompt")
    response = config.integer("rollout-max-response-len")
    yield _prompt_field(config, response)
    yield ParsedField("workload.response", response, ("rollout-max-response-len",))
    updates = max(1, batch // max(1, config.integer_or("global-batch-size", batch)))
    updates = config.integer_or("num-steps-per-rollout", updates)
    yield ParsedField("workload.num_minibatches", updates, ("global-batch-size", "num-steps-per-rollout"))


def _prompt_field(config: TrainerConfig, response: int) -> ParsedField:
    """The longest prompt: from its own key, or the longest context less the response."""
    key, context_key = "rollout-max-prompt-len", "rollout-max-context-len"
    if config.value(key):
        return ParsedField("workload.prompt", config.integer(key), (key,))
    if config.value(context_key) and config.integer(context_key) > response:
        return ParsedField(
            "workload.prompt", config.integer(context_key) - response, (context_key, "rollout-max-response-len")
        )
    return ParsedField("workload.prompt", _ASSUMED_PROMPT, (key,))


def _prompt_notes(config: TrainerConfig) -> Iterator[str]:
    if not config.value("rollout-max-prompt-len") and not config.value("rollout-max-context-len"):
        yield (
            f"no key gives the longest prompt: {_ASSUMED_PROMPT} tokens are ASSUMED; give it as "
            "--set rollout-max-prompt-len=TOKENS."
        )


def _model_fields(setup: TrainingSetup, reward_model: dict[str, Any] | None) -> Iterator[ParsedField]:
    for role in setup.graph.roles:
        if role != Role.REWARD:
            yield ParsedField(f"models.{role}", str(setup.config.text("hf-checkpoint")), ("hf-checkpoint",))
    if reward_model:
        yield ParsedField("models.reward", str(reward_model.get("model_path")), ("sglang-config",))


def _algorithm_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    fields = {
        "gamma": "gamma",
        "gae_lambda": "lambd",
        "actor_learning_rate": "lr",
        "clip_ratio": "eps-clip",
        "clip_ratio_high": "eps-clip-high",
        "entropy_coefficient": "entropy-coef",
        "value_clip": "value-clip",
        "temperature": "rollout-temperature",
        "weight_decay": "weight-decay",
        "max_grad_norm": "clip-grad",
        "adam_beta1": "adam-beta1",
        "adam_beta2": "adam-beta2",
    }
    yield from setup.settings(fields)
    yield from setup.sampling(top_p="rollout-top-p", top_k="rollout-top-k")
    yield from setup.warmup("actor", "lr-warmup-iters")
    yield from setup.adapter("lora-rank", "lora-alpha")
    key = "disable-grpo-std-normalization"
    yield from setup.setting("normalise_by_std", not config.value(key), key)
    key = "calculate-per-token-loss"
    yield from setup.setting("loss_mean", "token" if config.value(key) else "sequence", key)


def _placement_fields(setup: TrainingSetup, reward_model: dict[str, Any] | None) -> Iterator[ParsedField]:
    config = setup.config
    nodes, ranks = config.integer("actor-num-nodes"), config.integer("actor-num-gpus-per-node")
    num_train_ranks = nodes * ranks
    colocated = bool(config.value("colocate"))
    num_engine_ranks = config.integer_or("rollout-num-gpus", num_train_ranks if colocated else 0)
    groups = reward_model["server_groups"] if reward_model else []
    num_reward_ranks = sum(int(group["num_gpus"]) for group in groups)
    sizes = [
        ("train", 0 if colocated else num_train_ranks),
        ("generate", num_engine_ranks - num_reward_ranks),
        ("score", num_reward_ranks),
    ]
    pools = dict(consecutive_pools((name, size) for name, size in sizes if size))
    if num_engine_ranks <= num_reward_ranks:
        raise BadInput(f"--rollout-num-gpus {num_engine_ranks} leaves no rank to generate; give it more.")
    separate_pools = {} if colocated else {"generate": nodes_of_ranks(num_engine_ranks)}
    total_nodes, per_node = cluster_of({"train": (nodes, ranks), **separate_pools})
    yield ParsedField("cluster.nodes", total_nodes, ("actor-num-nodes", "rollout-num-gpus"))
    yield ParsedField("cluster.ranks_per_node", per_node, ("actor-num-gpus-per-node",))
    for stage in setup.stages(*_TRAINED):
        pool = pools.get("train", f"0:{num_train_ranks}")
        yield ParsedField(f"{stage}.pool", pool, ("actor-num-nodes", "actor-num-gpus-per-node"))
    yield ParsedField("actor_generate.pool", pools["generate"], ("rollout-num-gpus", "colocate"))
    key = "rollout-num-gpus-per-engine"
    yield ParsedField("actor_generate.tp", config.integer(key), (key,))
    yield ParsedField("actor_generate.pp", config.integer("sglang-pp-size"), ("sglang-pp-size",))
    if config.value("sglang-max-running-requests"):
        key = "sglang-max-running-requests"
        yield ParsedField("actor_generate.generation_slots", config.integer(key), (key,))
    if config.value("sglang-mem-fraction-static") is not None:
        yield ParsedField(MEMORY_SHARE, config.number("sglang-mem-fraction-static"), ("sglang-mem-fraction-static",))
    if groups:
        yield ParsedField("reward_score.pool", pools["score"], ("sglang-config",))
        yield ParsedField("reward_score.tp", int(groups[0]["num_gpus_per_engine"]), ("sglang-config",))
        yield ParsedField("reward_score.pp", 1, ("sglang-config",))


def _degrees(config: TrainerConfig) -> dict[str, int]:
    return {
        axis: config.integer_or(name, 0) if axis == "etp" else config.integer(name) for axis, name in _DEGREES.items()
    }


def _layout(config: TrainerConfig) -> Layout:
    num_ranks = config.integer("actor-num-nodes") * config.integer("actor-num-gpus-per-node")
    return layout_of(_degrees(config), num_ranks, sp=bool(config.value("sequence-parallel")))


def _training_fields(setup: TrainingSetup) -> Iterator[ParsedField]:
    config = setup.config
    layout = _layout(config)
    for stage in setup.stages(*_TRAINED):
        yield ParsedField(f"{stage}.layout", str(layout), tuple(_DEGREES.values()))
        yield _micro_batch_field(config, stage, layout.cp)
        if stage.endswith("train"):
            recompute = config.value("recompute-granularity") or "none"
            yield ParsedField(f"{stage}.recompute", recompute, ("recompute-granularity",))
            if config.value("optimizer-cpu-offload"):
                yield ParsedField(f"{stage}.offload", "optimizer", ("optimizer-cpu-offload",))


def _micro_batch_field(config: TrainerConfig, stage: str, cp: int) -> ParsedField:
    if not config.value("use-dynamic-batch-size"):
        return ParsedField(f"{stage}.micro_batch_size", config.integer("micro-batch-size"), ("micro-batch-size",))
    key = "max-tokens-per-gpu"
    if not stage.endswith("train") and config.value("log-probs-max-tokens-per-gpu"):
        key = "log-probs-max-tokens-per-gpu"
    return ParsedField(f"{stage}.micro_batch_tokens", config.integer(key) * cp, (key,))
