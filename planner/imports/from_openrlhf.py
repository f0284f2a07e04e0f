"""What a configuration of OpenRLHF says: the flags of `train_ppo_ray` in a script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.planner.export.known_keys import known_keys
from meshwright.planner.imports.estimators import (
    GRPO,
    LOSS_MEANS,
    PPO,
    REINFORCE,
    REINFORCE_BASELINE,
    RLOO,
    YOUR_FUNCTION,
    Configuration,
    Estimator,
    FunctionReward,
    estimator_of,
)
from meshwright.planner.imports.given_keys import GivenKeys, read_flags
from meshwright.planner.imports.openrlhf_flags import PRESENT, with_present_flags
from meshwright.planner.imports.said import (
    MEMORY_SHARE,
    Configured,
    Said,
    cluster_of,
    layout_of,
    of_ranks,
    pools_in_a_row,
)
from meshwright.profiles.stages import Role

_STAGES = {
    "actor": ("actor_train", "actor_logprob"),
    "critic": ("critic_train", "critic_value"),
    "ref": ("ref_logprob",),
    "reward": ("reward_score",),
}

_ESTIMATOR = "algo.advantage.estimator"
_ESTIMATORS: Mapping[str, Estimator] = {
    "gae": PPO,
    "group_norm": GRPO,
    "dr_grpo": Estimator(algorithm="grpo", settings={"normalise_by_std": False}),
    "rloo": RLOO,
    "trl_rloo": RLOO,  # its name in 0.5
    "reinforce": REINFORCE,
    "reinforce_baseline": REINFORCE_BASELINE,
}


def read_openrlhf(path: Path, changed: Mapping[str, Any] | None = None) -> Configured:
    """The configuration in a script, with other values for the keys that are `changed`.

    Raises BadInput naming the flag that has no place in a job."""
    given = with_present_flags(read_flags(path, known_keys("openrlhf"), PRESENT, changed=changed))
    configuration = _configuration(given)
    notes: list[str] = []
    if given.whole("ds.zero_stage") > 1:
        notes.append(
            f"--ds.zero_stage {given.value('ds.zero_stage')} is costed as ZeRO-1: optimizer state alone is sharded."
        )
    if (loss := given.value("actor.policy_loss_type")) != "ppo":
        notes.append(f"--actor.policy_loss_type {loss}: a job clips each token's ratio as PPO, which costs as much.")
    notes += configuration.notes()
    said = [*_workload(configuration), *_models(configuration), *_algorithm(configuration), *_placed(configuration)]
    said += _generation(configuration)
    ahead = int(bool(given.value("train.async_enable")))
    return configuration.configured("openrlhf", said, steps_ahead=ahead, notes=notes, idle=_idle(configuration))


def _idle(configuration: Configuration) -> Iterator[str]:
    """Patterns of keys that are of no use beside others."""
    if not configuration.stages("critic_train"):
        yield from ("critic.*", "train.colocate_critic_reward")
    if not configuration.has_ref:
        yield from ("ref.*", "train.colocate_actor_ref")
    if configuration.reward is not None:
        yield "reward.num_*"
    together = {"all": "*.num_*", "actor_ref": "ref.num_*", "critic_reward": "reward.num_*"}
    for name, pattern in together.items():
        if configuration.given.value(f"train.colocate_{name}"):
            yield pattern


def _configuration(given: GivenKeys) -> Configuration:
    """Follows train_ppo_ray: there is a reference where the KL penalty has a coefficient."""
    estimator, kl = estimator_of(given, _ESTIMATOR, _ESTIMATORS), "algo.kl.init_coef"
    has_ref, in_loss = given.number(kl) > 0, bool(given.value("algo.kl.use_loss")) and estimator is not PPO
    return Configuration(
        given=given,
        key=_ESTIMATOR,
        estimator=estimator,
        has_ref=has_ref,
        kl_in_loss=kl if in_loss and has_ref else None,
        kl_in_reward=kl if not in_loss and (has_ref or estimator is PPO) else None,
        reward=None if _has_reward_model(given) else FunctionReward(YOUR_FUNCTION, ("reward.remote_url",)),
    )


def _workload(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
    samples = given.whole("rollout.n_samples_per_prompt")
    batch = given.whole("rollout.batch_size") * samples
    longest = given.whole("data.max_len")
    response = given.whole_or("rollout.max_new_tokens", longest // 2)
    yield Said("workload.batch_size", batch, ("rollout.batch_size", "rollout.n_samples_per_prompt"))
    yield from configuration.group(samples, "rollout.n_samples_per_prompt")
    yield Said("workload.prompt", max(1, longest - response), ("data.max_len", "rollout.max_new_tokens"))
    yield Said("workload.response", response, ("rollout.max_new_tokens",))
    yield Said("workload.num_minibatches", max(1, batch // given.whole("train.batch_size")), ("train.batch_size",))
    yield Said("workload.num_epochs", given.whole("train.max_epochs"), ("train.max_epochs",))


def _models(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
    actor, reward = given.text("actor.model_name_or_path"), given.text("reward.model_name_or_path")
    critic = given.text("critic.model_name_or_path") or (str(reward).split(",")[0] if reward else actor)
    for role, path in (("actor", actor), ("ref", actor), ("critic", critic)):
        if role in configuration.graph.roles:
            yield Said(f"models.{role}", str(path), (f"{'actor' if role == 'ref' else role}.model_name_or_path",))
    if _has_reward_model(given):
        yield Said("models.reward", str(reward).split(",")[0], ("reward.model_name_or_path",))


def _has_reward_model(given: GivenKeys) -> bool:
    model, function = given.text("reward.model_name_or_path"), given.text("reward.remote_url")
    return bool(model) and not function


def _algorithm(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
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
    fields |= {field: key for field, key in rates.items() if given.has(key)}
    yield from configuration.settings(fields)
    yield from configuration.sampling(top_p="rollout.top_p")
    yield from configuration.overlong("reward.overlong_buffer_len", "reward.overlong_penalty_factor")
    yield from configuration.adapter("ds.lora.rank", "ds.lora.alpha")
    key = "actor.eps_clip_low_high"
    low, high = given.pair(key) if given.has(key) else (given.number("actor.eps_clip"),) * 2
    for name, value in (("clip_ratio", low), ("clip_ratio_high", high)):
        yield from configuration.setting(name, value, key if given.has(key) else "actor.eps_clip")
    key = "actor.loss_agg_mode"
    if loss_mean := LOSS_MEANS.get(given.value(key)):
        yield from configuration.setting("loss_mean", loss_mean, key)


def _size(given: GivenKeys, model: str) -> tuple[int, int]:
    return given.whole(f"{model}.num_nodes"), given.whole(f"{model}.num_gpus_per_node")


def _groups(configuration: Configuration) -> dict[str, tuple[int, int]]:
    """The pools by the model that they are first of, the engines' among them where they have their own."""
    given, roles = configuration.given, configuration.graph.roles
    if given.value("train.colocate_all"):
        found = {"actor": _size(given, "actor")}
    else:
        apart = ["actor", *(["critic"] if Role.CRITIC in roles else [])]
        apart += [] if given.value("train.colocate_actor_ref") or Role.REF not in roles else ["ref"]
        with_critic = given.value("train.colocate_critic_reward") and Role.CRITIC in roles
        apart += [] if with_critic or not _has_reward_model(given) else ["reward"]
        found = {model: _size(given, model) for model in apart}
    if not given.value("train.colocate_all") or given.value("train.async_enable"):
        found["vllm"] = of_ranks(given.whole("vllm.num_engines") * given.whole("vllm.tensor_parallel_size"))
    return found


def _pools(configuration: Configuration) -> dict[str, str]:
    """The pool of each model, and of the engines."""
    groups = _groups(configuration)
    pools = dict(pools_in_a_row((name, nodes * ranks) for name, (nodes, ranks) in groups.items()))
    critic = pools.get("critic", pools["actor"])
    return {
        "actor": pools["actor"],
        "critic": critic,
        "ref": pools.get("ref", pools["actor"]),
        "reward": pools.get("reward", critic),
        "vllm": pools.get("vllm", pools["actor"]),
    }


def _placed(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
    nodes, per_node = cluster_of(_groups(configuration))
    yield Said("cluster.nodes", nodes, ("actor.num_nodes", "train.colocate_all"))
    yield Said("cluster.ranks_per_node", per_node, ("actor.num_gpus_per_node",))
    pools = _pools(configuration)
    degrees = {"tp": given.whole("ds.tensor_parallel_size"), "cp": given.whole("ds.ring_attn_size")}
    full = bool(given.value("actor.gradient_checkpointing_enable"))
    sleeps = bool(given.value("ds.enable_sleep")) or bool(given.value("ds.adam_offload"))
    for model, stages in _STAGES.items():
        for stage in configuration.stages(*stages):
            num_ranks = int(pools[model].partition(":")[2])
            keys = (f"{model}.num_nodes", f"{model}.num_gpus_per_node", "train.colocate_all")
            yield Said(f"{stage}.pool", pools[model], keys)
            degree_keys = ("ds.tensor_parallel_size", "ds.ring_attn_size")
            yield Said(f"{stage}.layout", str(layout_of(degrees, num_ranks)), degree_keys)
            yield _rows(given, stage, degrees["cp"])
            if stage.endswith("train"):
                key = "actor.gradient_checkpointing_enable"
                yield Said(f"{stage}.recompute", "full" if full else "none", (key,))
                yield Said(
                    f"{stage}.offload", "optimizer" if sleeps else "none", ("ds.enable_sleep", "ds.adam_offload")
                )
    for model in ("ref", "reward"):
        waits = "weights" if given.value(f"{model}.offload") else "none"
        for stage in configuration.stages(*_STAGES[model]):
            yield Said(f"{stage}.offload", waits, (f"{model}.offload",))


def _rows(given: GivenKeys, stage: str, cp: int) -> Said:
    group = "train" if stage.endswith("train") else "rollout"
    if given.value("train.dynamic_batch_enable"):
        key = f"{group}.max_tokens_per_gpu"
        budget = given.whole_or(key, given.whole("train.max_tokens_per_gpu"))
        return Said(f"{stage}.micro_batch_tokens", budget * cp, (key,))
    key = f"{group}.micro_batch_size"
    return Said(f"{stage}.micro_batch_size", given.whole(key), (key,))


def _generation(configuration: Configuration) -> Iterator[Said]:
    given = configuration.given
    yield Said("actor_generate.pool", _pools(configuration)["vllm"], ("vllm.num_engines", "train.colocate_all"))
    key = "vllm.tensor_parallel_size"
    yield Said("actor_generate.tp", given.whole(key), (key,))
    yield Said("actor_generate.pp", 1, (key,))
    key = "vllm.gpu_memory_utilization"
    yield Said(MEMORY_SHARE, given.number(key), (key,))
