"""What a configuration of slime says: the flags of `train.py` or `train_async.py` in a script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.planner.export.known_keys import known_keys
from meshwright.planner.imports.estimators import (
    GRPO,
    MATHS,
    PPO,
    REINFORCE,
    REINFORCE_BASELINE,
    YOUR_FUNCTION,
    Configuration,
    Estimator,
    FunctionReward,
    alone_notes,
    estimator_of,
)
from meshwright.planner.imports.given_keys import GivenKeys, read_flags
from meshwright.planner.imports.said import (
    MEMORY_SHARE,
    Configured,
    Said,
    cluster_of,
    layout_of,
    narrowed,
    of_ranks,
    pools_in_a_row,
)
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.stages import Role
from meshwright.profiles.values import MOST_YAML_BYTES, read_text, yaml_value

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
"""Tokens of the longest prompt where no key gives it, said aloud."""

_ESTIMATOR = "advantage-estimator"
_ESTIMATORS: Mapping[str, Estimator] = {
    "ppo": PPO,
    "grpo": GRPO,
    "gspo": GRPO,
    "reinforce_plus_plus": REINFORCE,
    "reinforce_plus_plus_baseline": REINFORCE_BASELINE,
}


def read_slime(path: Path, changed: Mapping[str, Any] | None = None) -> Configured:
    """The configuration in a script, with other values for the keys that are `changed`.

    Raises BadInput naming the flag that has no place in a job."""
    given = read_flags(path, known_keys("slime"), changed=changed)
    served = _served(given, path)
    configuration = _configuration(given, served)
    notes = [*_prompt_notes(given), *configuration.notes()]
    notes += alone_notes(given, _ESTIMATOR, _ESTIMATORS, "n-samples-per-prompt")
    if given.value(_ESTIMATOR) == "gspo":
        notes.append("--advantage-estimator gspo: a job clips each token's ratio as PPO, which costs as much.")
    degrees = _degrees(given)
    notes += narrowed(_DEGREES["ep"], degrees, _layout(given))
    is_async = any(Path(word).name == "train_async.py" for word in given.command)
    said = [*_workload(configuration), *_models(configuration, served), *_algorithm(configuration)]
    said += [*_placed(configuration, served), *_training(configuration)]
    return configuration.configured("slime", said, steps_ahead=int(is_async), notes=notes)


def _configuration(given: GivenKeys, served: dict[str, Any] | None) -> Configuration:
    """Follows slime's own rule (ray/placement_group.py): there is a reference where a KL penalty asks for it."""
    estimator = estimator_of(given, _ESTIMATOR, _ESTIMATORS, single="n-samples-per-prompt")
    in_loss, in_reward = bool(given.value("use-kl-loss")), given.number("kl-coef") != 0
    return Configuration(
        given=given,
        key=_ESTIMATOR,
        estimator=estimator,
        has_ref=in_loss or in_reward,
        kl_in_loss="kl-loss-coef" if in_loss else None,
        kl_in_reward="kl-coef" if in_reward or estimator is PPO else None,
        reward=None if served else _paid_by(given),
    )


def _paid_by(given: GivenKeys) -> FunctionReward:
    """A user's own function, or one of slime's, of which those for maths are ours too."""
    kind = given.value("rm-type")
    if given.value("custom-rm-path") is None and kind in _MATHS:
        return FunctionReward(MATHS, ("rm-type",))
    return FunctionReward(YOUR_FUNCTION, ("custom-rm-path", "rm-type"))


def _served(given: GivenKeys, path: Path) -> dict[str, Any] | None:
    """The reward model and its engines, where a configuration of SGLang beside the script has one."""
    name = given.value("sglang-config")
    file = path.parent / str(name)
    if name is None or not file.exists():
        return None
    found = yaml_value(read_text(file, "configuration", MOST_YAML_BYTES), f"configuration {file}")
    models = found.get("sglang", []) if isinstance(found, dict) else []
    return next((model for model in models if model.get("name") == "reward"), None)


def _workload(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
    samples = given.whole("n-samples-per-prompt")
    batch = given.whole("rollout-batch-size") * samples
    yield Said("workload.batch_size", batch, ("rollout-batch-size", "n-samples-per-prompt"))
    yield from configuration.group(samples, "n-samples-per-prompt")
    response = given.whole("rollout-max-response-len")
    yield _prompt(given, response)
    yield Said("workload.response", response, ("rollout-max-response-len",))
    updates = max(1, batch // max(1, given.whole_or("global-batch-size", batch)))
    updates = given.whole_or("num-steps-per-rollout", updates)
    yield Said("workload.num_minibatches", updates, ("global-batch-size", "num-steps-per-rollout"))


def _prompt(given: GivenKeys, response: int) -> Said:
    """The longest prompt: by its own key, or what the longest context leaves beside a response."""
    key, whole = "rollout-max-prompt-len", "rollout-max-context-len"
    if given.value(key):
        return Said("workload.prompt", given.whole(key), (key,))
    if given.value(whole) and given.whole(whole) > response:
        return Said("workload.prompt", given.whole(whole) - response, (whole, "rollout-max-response-len"))
    return Said("workload.prompt", _ASSUMED_PROMPT, (key,))


def _prompt_notes(given: GivenKeys) -> Iterator[str]:
    if not given.value("rollout-max-prompt-len") and not given.value("rollout-max-context-len"):
        yield (
            f"no key gives the longest prompt: {_ASSUMED_PROMPT} tokens are ASSUMED; give it as "
            "--set rollout-max-prompt-len=TOKENS."
        )


def _models(configuration: Configuration, served: dict[str, Any] | None) -> Iterator[Said]:
    for role in configuration.graph.roles:
        if role != Role.REWARD:
            yield Said(f"models.{role}", str(configuration.given.text("hf-checkpoint")), ("hf-checkpoint",))
    if served:
        yield Said("models.reward", str(served.get("model_path")), ("sglang-config",))


def _algorithm(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
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
    yield from configuration.settings(fields)
    yield from configuration.sampling(top_p="rollout-top-p", top_k="rollout-top-k")
    yield from configuration.warmup("actor", "lr-warmup-iters")
    yield from configuration.adapter("lora-rank", "lora-alpha")
    key = "disable-grpo-std-normalization"
    yield from configuration.setting("normalise_by_std", not given.value(key), key)
    key = "calculate-per-token-loss"
    yield from configuration.setting("loss_mean", "token" if given.value(key) else "sequence", key)


def _placed(configuration: Configuration, served: dict[str, Any] | None) -> Iterator[Said]:
    given = configuration.given
    nodes, ranks = given.whole("actor-num-nodes"), given.whole("actor-num-gpus-per-node")
    train = nodes * ranks
    colocated = bool(given.value("colocate"))
    engines = given.whole_or("rollout-num-gpus", train if colocated else 0)
    groups = served["server_groups"] if served else []
    scoring = sum(int(group["num_gpus"]) for group in groups)
    shares = [("train", 0 if colocated else train), ("generate", engines - scoring), ("score", scoring)]
    pools = dict(pools_in_a_row((name, size) for name, size in shares if size))
    if engines <= scoring:
        raise BadInput(f"--rollout-num-gpus {engines} leaves no rank to generate; give it more.")
    apart = {} if colocated else {"generate": of_ranks(engines)}
    total_nodes, per_node = cluster_of({"train": (nodes, ranks), **apart})
    yield Said("cluster.nodes", total_nodes, ("actor-num-nodes", "rollout-num-gpus"))
    yield Said("cluster.ranks_per_node", per_node, ("actor-num-gpus-per-node",))
    for stage in configuration.stages(*_TRAINED):
        pool = pools.get("train", f"0:{train}")
        yield Said(f"{stage}.pool", pool, ("actor-num-nodes", "actor-num-gpus-per-node"))
    yield Said("actor_generate.pool", pools["generate"], ("rollout-num-gpus", "colocate"))
    key = "rollout-num-gpus-per-engine"
    yield Said("actor_generate.tp", given.whole(key), (key,))
    yield Said("actor_generate.pp", given.whole("sglang-pp-size"), ("sglang-pp-size",))
    if given.value("sglang-max-running-requests"):
        key = "sglang-max-running-requests"
        yield Said("actor_generate.generation_slots", given.whole(key), (key,))
    if given.value("sglang-mem-fraction-static") is not None:
        yield Said(MEMORY_SHARE, given.number("sglang-mem-fraction-static"), ("sglang-mem-fraction-static",))
    if groups:
        yield Said("reward_score.pool", pools["score"], ("sglang-config",))
        yield Said("reward_score.tp", int(groups[0]["num_gpus_per_engine"]), ("sglang-config",))
        yield Said("reward_score.pp", 1, ("sglang-config",))


def _degrees(given: GivenKeys) -> dict[str, int]:
    return {axis: given.whole_or(name, 0) if axis == "etp" else given.whole(name) for axis, name in _DEGREES.items()}


def _layout(given: GivenKeys) -> Layout:
    train = given.whole("actor-num-nodes") * given.whole("actor-num-gpus-per-node")
    return layout_of(_degrees(given), train, sp=bool(given.value("sequence-parallel")))


def _training(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
    layout = _layout(given)
    for stage in configuration.stages(*_TRAINED):
        yield Said(f"{stage}.layout", str(layout), tuple(_DEGREES.values()))
        yield _rows(given, stage, layout.cp)
        if stage.endswith("train"):
            recompute = given.value("recompute-granularity") or "none"
            yield Said(f"{stage}.recompute", recompute, ("recompute-granularity",))
            if given.value("optimizer-cpu-offload"):
                yield Said(f"{stage}.offload", "optimizer", ("optimizer-cpu-offload",))


def _rows(given: GivenKeys, stage: str, cp: int) -> Said:
    if not given.value("use-dynamic-batch-size"):
        return Said(f"{stage}.micro_batch_size", given.whole("micro-batch-size"), ("micro-batch-size",))
    key = "max-tokens-per-gpu"
    if not stage.endswith("train") and given.value("log-probs-max-tokens-per-gpu"):
        key = "log-probs-max-tokens-per-gpu"
    return Said(f"{stage}.micro_batch_tokens", given.whole(key) * cp, (key,))
