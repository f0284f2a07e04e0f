"""What a configuration of NeMo-RL says: a YAML file over those that its `defaults` name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.planner.export.known_keys import known_keys
from meshwright.planner.imports.given_keys import GivenKeys, read_overrides
from meshwright.planner.imports.said import Configured, Said, layout_of, pools_in_a_row
from meshwright.profiles.errors import BadInput

_G, _RM = "policy.generation", "env.reward_model"
_DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
_STAGES = {"policy": ("actor_train", "actor_logprob", "ref_logprob"), "value": ("critic_train", "critic_value")}


def read_nemo_rl(path: Path) -> Configured:
    """The configuration in a file. Raises BadInput naming the key that has no place in a job."""
    given = read_overrides(path, known_keys("nemo_rl"))
    if any(key.startswith(("grpo.", "dpo.", "sft.", "distillation.")) for key in given.given):
        raise BadInput(
            f"configuration {path} has no ppo: a job here trains a critic, and this one has none; only PPO is imported."
        )
    is_megatron = bool(given.value("policy.megatron_cfg.enabled"))
    notes = (
        [] if is_megatron else ["policy.dtensor_cfg divides the models: that is no layout of ours, so it stays free."]
    )
    samples = given.whole("ppo.num_generations_per_prompt")
    if samples > 1:
        notes.append(f"ppo.num_generations_per_prompt={samples}: prompts that are shared are planned as many.")
    pools = dict(_pools(given))
    said = [*_workload(given), *_models(given), *_algorithm(given), *_places(given, pools), *_engines(given)]
    if is_megatron:
        said += [*_training(given, pools)]
    ahead = given.whole("ppo.async_ppo.max_trajectory_age_steps") if given.value("ppo.async_ppo.enabled") else 0
    if ahead > 1:
        notes.append(f"ppo.async_ppo.max_trajectory_age_steps={ahead} is read as 1: generation is one step ahead.")
    return Configured(said=tuple(said), steps_ahead=min(ahead, 1), notes=tuple(notes))


def _workload(given: GivenKeys) -> Iterator[Said]:
    batch, samples = given.whole("ppo.num_prompts_per_step"), given.whole("ppo.num_generations_per_prompt")
    yield Said("workload.batch_size", batch * samples, ("ppo.num_prompts_per_step", "ppo.num_generations_per_prompt"))
    total, key = given.whole("policy.max_total_sequence_length"), f"{_G}.max_new_tokens"
    prompt = min(given.whole("data.max_input_seq_length"), total - 1)
    yield Said("workload.prompt", prompt, ("data.max_input_seq_length",))
    yield Said("workload.response", min(given.whole(key), total - prompt), (key, "policy.max_total_sequence_length"))
    key = "policy.train_global_batch_size"
    yield Said("workload.num_minibatches", max(1, batch * samples // given.whole(key)), (key,))
    yield Said("workload.num_epochs", given.whole("ppo.ppo_epochs"), ("ppo.ppo_epochs",))


def _models(given: GivenKeys) -> Iterator[Said]:
    keys = {"actor": "policy.model_name", "ref": "policy.model_name", "critic": "value.model_name"}
    if given.has(f"{_RM}.model_name"):
        keys["reward"] = f"{_RM}.model_name"
    yield from (Said(f"models.{role}", str(given.value(key)), (key,)) for role, key in keys.items())


def _algorithm(given: GivenKeys) -> Iterator[Said]:
    fields = {
        "gamma": "ppo.adv_estimator.gae_gamma",
        "gae_lambda": "ppo.adv_estimator.gae_lambda",
        "kl_coefficient": "loss_fn.reference_policy_kl_penalty",
        "actor_learning_rate": "policy.megatron_cfg.optimizer.lr",
        "critic_learning_rate": "value.megatron_cfg.optimizer.lr",
        "clip_ratio": "loss_fn.ratio_clip_min",
        "value_clip": "value_loss_fn.cliprange",
        "temperature": f"{_G}.temperature",
    }
    yield from (Said(f"ppo.{field}", given.number(key), (key,)) for field, key in fields.items())


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
    nodes, ranks = given.value(f"{prefix}.num_nodes"), given.value(f"{prefix}.gpus_per_node")
    return int(nodes or 1) * int(ranks or per_node)


def _places(given: GivenKeys, pools: dict[str, str]) -> Iterator[Said]:
    for what, key in (("nodes", "cluster.num_nodes"), ("ranks_per_node", "cluster.gpus_per_node")):
        yield Said(f"cluster.{what}", given.whole(key), (key,))
    keys = (f"{_G}.colocated.enabled", f"{_G}.colocated.resources.num_nodes")
    yield Said("actor_generate.pool", pools.get("generate", pools["train"]), keys)
    yield Said("reward_score.pool", pools.get("score", pools["train"]), (f"{_RM}.resources.num_nodes",))
    for stage in (*_STAGES["policy"], *_STAGES["value"]):
        yield Said(f"{stage}.pool", pools["train"], ("cluster.num_nodes", "cluster.gpus_per_node"))


def _engines(given: GivenKeys) -> Iterator[Said]:
    for axis, name in (("tp", "tensor_parallel_size"), ("pp", "pipeline_parallel_size")):
        key = f"{_G}.vllm_cfg.{name}"
        yield Said(f"actor_generate.{axis}", given.whole(key), (key,))
    if given.has(f"{_RM}.model_name"):
        key = f"{_RM}.dtensor_cfg.tensor_parallel_size"
        yield Said("reward_score.tp", given.whole(key), (key,))
        yield Said("reward_score.pp", 1, (key,))


def _training(given: GivenKeys, pools: dict[str, str]) -> Iterator[Said]:
    num_ranks = int(pools["train"].partition(":")[2])
    for model, stages in _STAGES.items():
        prefix = f"{model}.megatron_cfg"
        degrees = {axis: given.whole(f"{prefix}.{name}") for axis, name in _DEGREES.items()}
        layout = layout_of(degrees, num_ranks, sp=bool(given.value(f"{prefix}.sequence_parallel")))
        keys = tuple(f"{prefix}.{name}" for name in _DEGREES.values())
        for stage in stages:
            yield Said(f"{stage}.layout", str(layout), keys)
            forward = model == "policy" and not stage.endswith("train")
            key = "policy.logprob_batch_size" if forward else f"{model}.train_micro_batch_size"
            yield Said(f"{stage}.micro_batch_size", given.whole(key), (key,))
        key = f"{prefix}.activation_checkpointing"
        yield Said(f"{stages[0]}.recompute", "full" if given.value(key) else "none", (key,))
    key = "policy.offload_optimizer_for_logprob"
    yield Said("actor_train.offload", "optimizer" if given.value(key) else "none", (key,))
