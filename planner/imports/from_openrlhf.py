"""What a configuration of OpenRLHF says: the flags of `train_ppo_ray` in a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.planner.export.known_keys import known_keys
from meshwright.planner.imports.given_keys import GivenKeys, read_flags
from meshwright.planner.imports.said import Configured, Said, cluster_of, layout_of, pools_in_a_row, rows_of
from meshwright.profiles.errors import BadInput

_STAGES = {
    "actor": ("actor_train", "actor_logprob"),
    "critic": ("critic_train", "critic_value"),
    "ref": ("ref_logprob",),
    "reward": ("reward_score",),
}


def read_openrlhf(path: Path) -> Configured:
    """The configuration in a script. Raises BadInput naming the flag that has no place in a job."""
    given = read_flags(path, known_keys("openrlhf"))
    if (estimator := given.value("algo.advantage.estimator")) != "gae":
        raise BadInput(
            f"--algo.advantage.estimator={estimator}: a job here trains a critic, and this configuration has none; "
            "only gae is imported."
        )
    notes = [f"--{key} is no flag of OpenRLHF {given.known.version} and says nothing here." for key in given.unknown]
    if given.whole("ds.zero_stage") > 1:
        notes.append(
            f"--ds.zero_stage {given.value('ds.zero_stage')} is costed as 1: the optimizer's state is divided."
        )
    samples = given.whole("rollout.n_samples_per_prompt")
    if samples > 1:
        notes.append(f"--rollout.n_samples_per_prompt {samples}: prompts that are shared are planned as many.")
    said = [*_workload(given), *_models(given), *_algorithm(given), *_placed(given), *_generation(given)]
    ahead = int(bool(given.value("train.async_enable")))
    return Configured(said=tuple(said), steps_ahead=ahead, notes=tuple(notes))


def _workload(given: GivenKeys) -> Iterator[Said]:
    batch = given.whole("rollout.batch_size") * given.whole("rollout.n_samples_per_prompt")
    longest = given.whole("data.max_len")
    response = given.value("rollout.max_new_tokens") or longest // 2
    yield Said("workload.batch_size", batch, ("rollout.batch_size", "rollout.n_samples_per_prompt"))
    yield Said("workload.prompt", max(1, longest - int(response)), ("data.max_len", "rollout.max_new_tokens"))
    yield Said("workload.response", int(response), ("rollout.max_new_tokens",))
    yield Said("workload.num_minibatches", max(1, batch // given.whole("train.batch_size")), ("train.batch_size",))
    yield Said("workload.num_epochs", given.whole("train.max_epochs"), ("train.max_epochs",))


def _models(given: GivenKeys) -> Iterator[Said]:
    actor, reward = given.value("actor.model_name_or_path"), given.value("reward.model_name_or_path")
    critic = given.value("critic.model_name_or_path") or (str(reward).split(",")[0] if reward else actor)
    for role, path in (("actor", actor), ("ref", actor), ("critic", critic)):
        yield Said(f"models.{role}", str(path), (f"{'actor' if role == 'ref' else role}.model_name_or_path",))
    if reward and not given.value("reward.remote_url"):
        yield Said("models.reward", str(reward).split(",")[0], ("reward.model_name_or_path",))


def _algorithm(given: GivenKeys) -> Iterator[Said]:
    fields = {
        "gamma": "algo.advantage.gamma",
        "gae_lambda": "algo.advantage.lambd",
        "kl_coefficient": "algo.kl.init_coef",
        "clip_ratio": "actor.eps_clip",
        "value_clip": "critic.value_clip",
        "temperature": "rollout.temperature",
    }
    rates = {"actor_learning_rate": "actor.adam.lr", "critic_learning_rate": "critic.adam.lr"}
    fields |= {field: key for field, key in rates.items() if given.has(key)}
    yield from (Said(f"ppo.{field}", given.number(key), (key,)) for field, key in fields.items())


def _size(given: GivenKeys, model: str) -> tuple[int, int]:
    return given.whole(f"{model}.num_nodes"), given.whole(f"{model}.num_gpus_per_node")


def _groups(given: GivenKeys) -> dict[str, tuple[int, int]]:
    """The pools by the model that they are first of, the engines' among them where they have their own."""
    if given.value("train.colocate_all"):
        found = {"actor": _size(given, "actor")}
    else:
        apart = ["actor", "critic"]
        apart += [] if given.value("train.colocate_actor_ref") else ["ref"]
        apart += [] if given.value("train.colocate_critic_reward") else ["reward"]
        found = {model: _size(given, model) for model in apart}
    if not given.value("train.colocate_all") or given.value("train.async_enable"):
        per_node = max(ranks for _, ranks in found.values())
        engines = given.whole("vllm.num_engines") * given.whole("vllm.tensor_parallel_size")
        found["vllm"] = (engines // per_node, per_node) if engines % per_node == 0 else (1, engines)
    return found


def _pools(given: GivenKeys) -> dict[str, str]:
    """The pool of each model, and of the engines."""
    pools = dict(pools_in_a_row((name, nodes * ranks) for name, (nodes, ranks) in _groups(given).items()))
    critic = pools.get("critic", pools["actor"])
    return {
        "actor": pools["actor"],
        "critic": critic,
        "ref": pools.get("ref", pools["actor"]),
        "reward": pools.get("reward", critic),
        "vllm": pools.get("vllm", pools["actor"]),
    }


def _placed(given: GivenKeys) -> Iterator[Said]:
    nodes, per_node = cluster_of(_groups(given))
    yield Said("cluster.nodes", nodes, ("actor.num_nodes", "train.colocate_all"))
    yield Said("cluster.ranks_per_node", per_node, ("actor.num_gpus_per_node",))
    pools = _pools(given)
    degrees = {"tp": given.whole("ds.tensor_parallel_size"), "cp": given.whole("ds.ring_attn_size")}
    full = bool(given.value("actor.gradient_checkpointing_enable"))
    sleeps = bool(given.value("ds.enable_sleep")) or bool(given.value("ds.adam_offload"))
    for model, stages in _STAGES.items():
        for stage in stages:
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
        yield Said(f"{_STAGES[model][0]}.offload", waits, (f"{model}.offload",))


def _rows(given: GivenKeys, stage: str, cp: int) -> Said:
    group = "train" if stage.endswith("train") else "rollout"
    if given.value("train.dynamic_batch_enable"):
        key = f"{group}.max_tokens_per_gpu"
        budget = given.value(key) or given.whole("train.max_tokens_per_gpu")
        rows = rows_of(int(budget), cp, given.whole("data.max_len"))
        return Said(f"{stage}.micro_batch_size", rows, (key,))
    key = f"{group}.micro_batch_size"
    return Said(f"{stage}.micro_batch_size", given.whole(key), (key,))


def _generation(given: GivenKeys) -> Iterator[Said]:
    yield Said("actor_generate.pool", _pools(given)["vllm"], ("vllm.num_engines", "train.colocate_all"))
    key = "vllm.tensor_parallel_size"
    yield Said("actor_generate.tp", given.whole(key), (key,))
    yield Said("actor_generate.pp", 1, (key,))
