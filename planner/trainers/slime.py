"""slime: export of plans to the flags of `train.py` and `train_async.py`, and import from a script with them.

Megatron-core trains, SGLang generates and scores. All stages that train or compute log-probabilities have the actor's
ranks and degrees (slime/utils/arguments.py sets the critic's to the actor's). The engines share these ranks
(`--colocate`) or have their own; `train_async.py` generates one batch ahead, which excludes `--colocate`. A reward
model is served beside the actor (`--sglang-config`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.planner.job.algorithm_settings import GRPO, PPO, CriticFreeSettings, Reinforce
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.trainers.config_keys import TrainerConfig, known_keys, read_flags
from meshwright.planner.trainers.deployment_modes import (
    ONE_AHEAD,
    DeploymentMode,
    all_ranks,
    equal_choices,
    on_pool,
    pool_divisions,
    ppo_stages,
    tp_only_engines,
)
from meshwright.planner.trainers.export_settings import (
    HOOK_FILE,
    engine_memory_share,
    flags,
    mini_batch,
    pool_nodes,
    reward_hook,
    script,
    token_budget,
    token_budget_origin,
    uneven_stage_layers,
)
from meshwright.planner.trainers.parsed_config import (
    GRPO_ESTIMATOR,
    MATHS,
    MEMORY_SHARE,
    PPO_ESTIMATOR,
    REINFORCE_BASELINE_ESTIMATOR,
    REINFORCE_ESTIMATOR,
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
from meshwright.planner.trainers.trainer import ExportInput, KeyValue, OtherTrainer
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Recompute
from meshwright.profiles.stages import GENERATE, Role
from meshwright.profiles.untrusted_text import MAX_YAML_BYTES, read_text, yaml_value

_ENGINE_STAGES = (GENERATE, "reward_score")
_SETTING_KEYS = {
    "gamma": "gamma",
    "gae_lambda": "lambd",
    "actor_learning_rate": "lr",
    "clip_ratio": "eps-clip",
    "clip_ratio_high": "eps-clip-high",
    "value_clip": "value-clip",
    "temperature": "rollout-temperature",
    "whiten_advantages": "normalize-advantages",
}
_ESTIMATOR_NAMES: Mapping[Algorithm, str] = {"ppo": "ppo", "grpo": "grpo", "reinforce++": "reinforce_plus_plus"}
_LAYOUT_FIELD = "placements.actor_train.layout"


def deployment_modes(facts: Facts) -> Iterator[DeploymentMode]:
    """Yield the ways in which slime can place the stages: engines on the trainer's ranks, or one batch ahead on their
    own ranks. The engines of a reward model have ranks beside those that generate."""
    trained = tuple(name for name in ppo_stages() if name != "reward_score")
    if facts.rewards:
        all_pool = all_ranks(facts.cluster)
        yield _mode("colocate", (*on_pool(all_pool, trained), *on_pool(all_pool, (GENERATE,))), trained)
        for train, generate in pool_divisions(facts.cluster, 2):
            pool_pins = (*on_pool(train, trained), *on_pool(generate, (GENERATE,)))
            yield _mode(f"async, {generate} generates", pool_pins, trained, steps_ahead=ONE_AHEAD)
        return
    for generate, score in pool_divisions(facts.cluster, 2):
        engines = (*on_pool(generate, (GENERATE,)), *on_pool(score, ("reward_score",)))
        yield _mode(f"colocate, rewards on {score}", (*on_pool(all_ranks(facts.cluster), trained), *engines), trained)
    for train, generate, score in pool_divisions(facts.cluster, 3):
        engines = (*on_pool(generate, (GENERATE,)), *on_pool(score, ("reward_score",)))
        yield _mode(
            f"async, {generate} generates", (*on_pool(train, trained), *engines), trained, steps_ahead=ONE_AHEAD
        )


def _mode(name: str, pool_pins: tuple[str, ...], trained: tuple[str, ...], *, steps_ahead: int = 0) -> DeploymentMode:
    followers = tuple(stage for stage in trained if stage != "actor_train")
    forward = tuple(stage for stage in followers if stage in ppo_stages(trains=False) and stage != "actor_logprob")
    return DeploymentMode(
        name=name,
        pins=(*pool_pins, *tp_only_engines()),
        equal_choices=(
            *equal_choices("layout", "actor_train", followers),
            *equal_choices("micro_batch_size", "actor_logprob", forward),
            *equal_choices("micro_batch_tokens", "actor_logprob", forward),
            *equal_choices("micro_batch_size", "actor_train", ("critic_train",)),
            *equal_choices("micro_batch_tokens", "actor_train", ("critic_train",)),
            *equal_choices("recompute", "actor_train", ("critic_train",)),
        ),
        steps_ahead=steps_ahead,
    )


def settings(origin: ExportInput) -> Iterator[KeyValue]:
    """The flags of `train.py` or `train_async.py` that express a plan."""
    plan = origin.plan
    yield from _pool_settings(plan)
    yield from _degree_settings(plan)
    yield from _batch_settings(plan)
    yield from _algorithm_settings(origin)


def _pool_settings(plan: Plan) -> Iterator[KeyValue]:
    nodes, per_node = pool_nodes(plan, "actor_train")
    yield KeyValue("actor-num-nodes", nodes, "pools: the pool of actor_train")
    yield KeyValue("actor-num-gpus-per-node", per_node, "pools: the pool of actor_train")
    yield KeyValue("num-gpus-per-node", plan.facts.cluster.ranks_per_node, "facts.cluster.ranks_per_node")
    yield KeyValue("colocate", not plan.ahead[GENERATE], "rule: generation one batch ahead excludes it")
    engines = sum(_pool_ranks(plan, stage).num_ranks for stage in _ENGINE_STAGES if stage in plan.graph.by_name)
    yield KeyValue("rollout-num-gpus", engines, "pools: the pools of actor_generate and reward_score")
    yield KeyValue(
        "rollout-num-gpus-per-engine", plan.placement(GENERATE).layout.tp, "placements.actor_generate.layout.tp"
    )
    if "reward_score" in plan.graph.by_name:
        yield KeyValue("sglang-config", "sglang.yaml", "pools: the pools of actor_generate and reward_score")
    yield KeyValue(
        "sglang-mem-fraction-static", engine_memory_share(plan), "placements.actor_generate: its weights and cache"
    )
    slots = plan.placement(GENERATE).schedule.generation_slots
    yield KeyValue("sglang-max-running-requests", slots, "placements.actor_generate.schedule.generation_slots")


def _degree_settings(plan: Plan) -> Iterator[KeyValue]:
    placement = plan.placement("actor_train")
    layout, recompute = placement.layout, placement.schedule.recompute
    yield KeyValue("tensor-model-parallel-size", layout.tp, f"{_LAYOUT_FIELD}.tp")
    yield KeyValue("pipeline-model-parallel-size", layout.pp, f"{_LAYOUT_FIELD}.pp")
    yield KeyValue("context-parallel-size", layout.cp, f"{_LAYOUT_FIELD}.cp")
    yield KeyValue("sequence-parallel", layout.sp, f"{_LAYOUT_FIELD}.sp")
    yield KeyValue("use-distributed-optimizer", True, "rule: optimizer state is divided over the replicas")
    if plan.facts.models.actor.experts:
        yield KeyValue("expert-model-parallel-size", layout.ep, f"{_LAYOUT_FIELD}.ep")
        yield KeyValue("expert-tensor-parallel-size", layout.etp, f"{_LAYOUT_FIELD}.etp")
    if ends := uneven_stage_layers(plan, "actor_train"):
        for name, number in zip(("first", "last"), ends, strict=True):
            yield KeyValue(f"decoder-{name}-pipeline-num-layers", number, f"{_LAYOUT_FIELD}.pp")
    if recompute is not Recompute.NONE:
        field = "placements.actor_train.schedule.recompute"
        yield KeyValue("recompute-granularity", recompute.value, field)
        if recompute is Recompute.FULL:
            yield KeyValue("recompute-method", "uniform", field)
            yield KeyValue("recompute-num-layers", 1, field)


def _batch_settings(plan: Plan) -> Iterator[KeyValue]:
    workload = plan.facts.workload
    yield KeyValue("rollout-batch-size", workload.num_prompts, "facts.workload: batch_size / group_size")
    yield KeyValue("n-samples-per-prompt", workload.group_size, "facts.workload.group_size")
    yield KeyValue("global-batch-size", mini_batch(plan), "facts.workload.num_minibatches")
    yield KeyValue("rollout-max-prompt-len", workload.prompt.max, "facts.workload.prompt.max")
    yield KeyValue("rollout-max-response-len", workload.response.max, "facts.workload.response.max")
    yield KeyValue("use-dynamic-batch-size", True, "rule: micro-batches are packed")
    for key, stage in (("max-tokens-per-gpu", "actor_train"), ("log-probs-max-tokens-per-gpu", "actor_logprob")):
        yield KeyValue(key, token_budget(plan, stage), token_budget_origin(plan, stage))


def _algorithm_settings(origin: ExportInput) -> Iterator[KeyValue]:
    roles, settings = origin.plan.graph.roles, origin.settings
    yield KeyValue("hf-checkpoint", origin.path(Role.ACTOR), "job: models.actor.path")
    if Role.REF in roles:
        yield KeyValue("ref-load", f"{origin.path(Role.REF)}_torch_dist", "job: models.ref.path, converted")
        in_loss = isinstance(settings, GRPO)
        yield KeyValue("use-kl-loss", in_loss, "job: algorithm and models.ref")
        yield from origin.setting("kl_coefficient", "kl-loss-coef" if in_loss else "kl-coef")
    has_baseline = isinstance(settings, Reinforce) and settings.group_baseline
    estimator = f"{_ESTIMATOR_NAMES[origin.algorithm]}{'_baseline' if has_baseline else ''}"
    yield KeyValue("advantage-estimator", estimator, "job: algorithm")
    if origin.reward_function is not None:
        hook = f"{HOOK_FILE.removesuffix('.py')}.compute_score"
        yield KeyValue("custom-rm-path", hook, "job: rewards.function")
    yield from origin.settings_by_key(_SETTING_KEYS)
    if isinstance(settings, GRPO):
        yield KeyValue("disable-grpo-std-normalization", not settings.normalise_by_std, "job: grpo.normalise_by_std")
    if isinstance(settings, CriticFreeSettings):
        yield KeyValue("calculate-per-token-loss", settings.loss_mean == "token", "job: loss_mean")
    if Role.CRITIC in roles:
        yield KeyValue("megatron-config-path", "megatron.yaml", "job: ppo.critic_learning_rate")
    yield KeyValue("use-tis", bool(origin.plan.ahead[GENERATE]), "staleness")


def _pool_ranks(plan: Plan, stage: str) -> Ranks:
    pool = plan.choice(stage, "pool")
    assert isinstance(pool, Ranks)
    return pool


def _files(origin: ExportInput, settings: Sequence[KeyValue]) -> Mapping[str, str]:
    plan = origin.plan
    program = "train_async.py" if plan.ahead[GENERATE] else "train.py"
    head = (
        "Runs slime with this plan, from the root of its repository. Source its scripts/models/ file of the model\n"
        "first, and give ${MODEL_ARGS[@]}, --prompt-data, --num-rollout and --custom-rm-path to this script."
    )
    return {
        "run.sh": script(head, f"python3 {program}", flags(settings)),
        **({} if origin.reward_function else {"sglang.yaml": "".join(_sglang_config(origin))}),
        **reward_hook("slime", origin),
        **_critic_file(origin),
    }


def _sglang_config(origin: ExportInput) -> Iterator[str]:
    """The SGLang configuration: the engines that generate, and those that serve the reward model."""
    yield "sglang:\n"
    for role, stage in ((Role.ACTOR, GENERATE), (Role.REWARD, "reward_score")):
        layout, field = origin.plan.placement(stage).layout, f"placements.{stage}.layout"
        is_trained = str(role is Role.ACTOR).lower()
        yield f"- name: {role}\n  model_path: {origin.path(role)}\n  update_weights: {is_trained}\n"
        yield f"  server_groups:\n  - worker_type: regular\n    num_gpus: {_pool_ranks(origin.plan, stage).num_ranks}\n"
        yield f"    num_gpus_per_engine: {layout.tp}  # {field}.tp\n"
        if layout.ep > 1:
            yield f"    overrides: {{ep_size: {layout.tp}}}  # {field}.ep: within an engine\n"


def _critic_file(origin: ExportInput) -> dict[str, str]:
    """The file with the critic's settings, where there is a critic."""
    if not isinstance(origin.settings, PPO):
        return {}
    rate = f"lr: {origin.settings.critic_learning_rate}  # job: ppo.critic_learning_rate"
    return {"megatron.yaml": f"megatron:\n- name: critic\n  role: critic\n  overrides:\n    {rate}\n"}


SLIME = OtherTrainer(
    name="slime",
    key_file="slime",
    algorithms=tuple(_ESTIMATOR_NAMES),
    engine="sglang",
    modes=deployment_modes,
    settings=settings,
    files=_files,
    remarks=(
        "the shapes of the model are flags of Megatron-core: source slime's scripts/models/ file.",
        "SGLang serves the reward model; write the function that requests its scores (--custom-rm-path).",
        "with a critic, slime offloads the training state between steps, whatever the plan says.",
    ),
)


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
