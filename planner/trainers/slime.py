"""slime: export of plans to the flags of `train.py` and `train_async.py`, and import from a script with them.

Megatron-core trains, SGLang generates and scores. All stages that train or compute log-probabilities have the actor's
ranks and degrees (slime/utils/arguments.py sets the critic's to the actor's). The engines share these ranks
(`--colocate`) or have their own; `train_async.py` generates one batch ahead, which excludes `--colocate`. A reward
model is served beside the actor (`--sglang-config`).

`TABLE` has a row for each key. The functions above it read and write rows that only slime has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.planner.job.algorithm_settings import GRPO, PPO, CriticFreeSettings, Reinforce
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.trainers import reads, writes
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
    reward_hook,
    script,
)
from meshwright.planner.trainers.parsed_config import (
    GRPO_ESTIMATOR,
    MATHS,
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
from meshwright.planner.trainers.table import Row, Write, read_table, write_field, write_table
from meshwright.planner.trainers.trainer import ConfigValue, ExportInput, KeyValue, OtherTrainer
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.stages import GENERATE, Role
from meshwright.profiles.untrusted_text import MAX_YAML_BYTES, read_text, yaml_value

_ENGINE_STAGES = (GENERATE, "reward_score")
_ESTIMATOR_NAMES: Mapping[Algorithm, str] = {"ppo": "ppo", "grpo": "grpo", "reinforce++": "reinforce_plus_plus"}
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


def deployment_modes(facts: Facts) -> Iterator[DeploymentMode]:
    """Yield the deployment modes of slime: engines on the trainer's ranks, or on their own ranks and one batch ahead.

    The engines of a reward model and those that generate are on different ranks.
    """
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
        pins=(*pool_pins, *tp_only_engines(has_drafts=True)),
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


# What is peculiar to slime in an import


def _function_reward(config: TrainerConfig) -> FunctionReward:
    """The reward of the job: a user's function or, for slime's maths rewards, our built-in one."""
    kind = config.value("rm-type")
    if config.value("custom-rm-path") is None and kind in _MATHS:
        return FunctionReward(MATHS, ("rm-type",))
    return FunctionReward(USER_FUNCTION, ("custom-rm-path", "rm-type"))


def _reward_model(config: TrainerConfig) -> dict[str, Any] | None:
    """The reward model and its engines from the SGLang configuration beside the script; None where it has none."""
    name = config.value("sglang-config")
    file = config.directory / str(name)
    if name is None or not file.exists():
        return None
    tree = yaml_value(read_text(file, "configuration", MAX_YAML_BYTES), f"configuration {file}")
    models = tree.get("sglang", []) if isinstance(tree, dict) else []
    return next((model for model in models if model.get("name") == "reward"), None)


def _read_prompt(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """The longest prompt: from its own key, or the longest context less the response."""
    config, context_key, response_key = setup.config, "rollout-max-context-len", "rollout-max-response-len"
    response = config.integer(response_key)
    if config.value(row.key):
        yield ParsedField("workload.prompt", config.integer(row.key), (row.key,))
    elif config.value(context_key) and config.integer(context_key) > response:
        yield ParsedField("workload.prompt", config.integer(context_key) - response, (context_key, response_key))
    else:
        yield ParsedField("workload.prompt", _ASSUMED_PROMPT, (row.key,))


def _read_minibatches(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """The number of updates in a step: from its own key, or the step's sequences divided by those of an update."""
    config, number_key = setup.config, "num-steps-per-rollout"
    batch = config.integer("rollout-batch-size") * config.integer("n-samples-per-prompt")
    updates = max(1, batch // max(1, config.integer_or(row.key, batch)))
    yield ParsedField("workload.num_minibatches", config.integer_or(number_key, updates), (row.key, number_key))


def _read_model_paths(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """One path for all models but the reward model."""
    yield from reads.models(*(role for role in setup.graph.roles if role != Role.REWARD))(setup, row)


def _read_pools(setup: TrainingSetup, _row: Row) -> Iterator[ParsedField]:
    """The cluster, and the pools of training, of generation and of the reward model.

    Raises BadInput where the reward model leaves no rank to generate.
    """
    config = setup.config
    nodes, ranks = config.integer("actor-num-nodes"), config.integer("actor-num-gpus-per-node")
    num_train_ranks, colocated = nodes * ranks, bool(config.value("colocate"))
    num_engine_ranks = config.integer_or("rollout-num-gpus", num_train_ranks if colocated else 0)
    num_reward_ranks = sum(int(group["num_gpus"]) for group in _reward_groups(config))
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
    yield ParsedField(f"{GENERATE}.pool", pools["generate"], ("rollout-num-gpus", "colocate"))
    if num_reward_ranks:
        yield ParsedField("reward_score.pool", pools["score"], ("sglang-config",))


def _reward_groups(config: TrainerConfig) -> list[dict[str, Any]]:
    """The groups of engines that serve the reward model."""
    model = _reward_model(config)
    return model["server_groups"] if model else []


def _read_reward_model(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """The path of the reward model and the degrees of its engines, from the file that the key names."""
    if (model := _reward_model(setup.config)) is None:
        return
    yield ParsedField("models.reward", str(model.get("model_path")), (row.key,))
    if groups := model["server_groups"]:
        yield ParsedField("reward_score.tp", int(groups[0]["num_gpus_per_engine"]), (row.key,))
        yield ParsedField("reward_score.pp", 1, (row.key,))


def _read_slots(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    if setup.config.value(row.key):
        yield ParsedField(f"{GENERATE}.generation_slots", setup.config.integer(row.key), (row.key,))


def _degrees(config: TrainerConfig) -> dict[str, int]:
    return {
        axis: config.integer_or(name, 0) if axis == "etp" else config.integer(name) for axis, name in _DEGREES.items()
    }


def _layout(config: TrainerConfig) -> Layout:
    num_ranks = config.integer("actor-num-nodes") * config.integer("actor-num-gpus-per-node")
    return layout_of(_degrees(config), num_ranks, keys=_DEGREES, sp=bool(config.value("sequence-parallel")))


def _read_layout(setup: TrainingSetup, _row: Row) -> Iterator[ParsedField]:
    """One layout for all stages that train or compute log-probabilities."""
    layout = _layout(setup.config)
    for stage in setup.stages(*_TRAINED):
        yield ParsedField(f"{stage}.layout", str(layout), tuple(_DEGREES.values()))


def _read_rows(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    if not setup.config.value("use-dynamic-batch-size"):
        for stage in setup.stages(*_TRAINED):
            yield ParsedField(f"{stage}.micro_batch_size", setup.config.integer(row.key), (row.key,))


def _read_budget(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Tokens of a micro-batch; forward passes may have a budget of their own."""
    config, forward_key = setup.config, "log-probs-max-tokens-per-gpu"
    if not config.value("use-dynamic-batch-size"):
        return
    for stage in setup.stages(*_TRAINED):
        has_own = not stage.endswith("train") and bool(config.value(forward_key))
        if has_own is (row.key == forward_key):
            yield ParsedField(f"{stage}.micro_batch_tokens", config.integer(row.key) * _layout(config).cp, (row.key,))


def _read_recompute(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    for stage in setup.stages("actor_train", "critic_train"):
        yield ParsedField(f"{stage}.recompute", setup.config.value(row.key) or "none", (row.key,))


def _read_offload(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    for stage in setup.stages("actor_train", "critic_train"):
        if setup.config.value(row.key):
            yield ParsedField(f"{stage}.offload", "optimizer", (row.key,))


def _read_no_std(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    yield from setup.setting("normalise_by_std", not setup.config.value(row.key), row.key)


def _read_loss_mean(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    yield from setup.setting("loss_mean", "token" if setup.config.value(row.key) else "sequence", row.key)


# What is peculiar to slime in an export


def _pool_ranks(plan: Plan, stage: str) -> Ranks:
    pool = plan.choice(stage, "pool")
    assert isinstance(pool, Ranks)
    return pool


def _num_engine_ranks(plan: Plan) -> int:
    return sum(_pool_ranks(plan, stage).num_ranks for stage in _ENGINE_STAGES if stage in plan.graph.by_name)


def _with_ref(write: Write) -> Write:
    """Write only where the job has a reference model."""
    return lambda source, row: write(source, row) if Role.REF in source.plan.graph.roles else None


def _write_kl(*, in_loss: bool) -> Write:
    """The coefficient of the KL penalty: GRPO has it in the loss, the other algorithms in the reward."""

    def write(source: ExportInput, row: Row) -> ConfigValue | KeyValue:
        return write_field(source, row) if isinstance(source.settings, GRPO) is in_loss else None

    return _with_ref(write)


def _write_kl_in_loss(source: ExportInput, _row: Row) -> ConfigValue:
    return isinstance(source.settings, GRPO)


def _write_estimator(source: ExportInput, _row: Row) -> ConfigValue:
    has_baseline = isinstance(source.settings, Reinforce) and source.settings.group_baseline
    return f"{_ESTIMATOR_NAMES[source.algorithm]}{'_baseline' if has_baseline else ''}"


def _write_no_std(source: ExportInput, _row: Row) -> ConfigValue:
    return not source.settings.normalise_by_std if isinstance(source.settings, GRPO) else None


def _write_token_mean(source: ExportInput, _row: Row) -> ConfigValue:
    return source.settings.loss_mean == "token" if isinstance(source.settings, CriticFreeSettings) else None


# The table


def _needs_weights(plan: Plan) -> bool:
    """True if stale tokens get importance weights; slime excludes them where the generator's log-probabilities are the
    old ones."""
    return bool(plan.ahead[GENERATE]) and plan.facts.old_logprobs == "recompute"


_ROLLOUT_LOGPROBS = "use-rollout-logprobs"
_FORWARD = ("actor_logprob", "ref_logprob", "critic_value")
"""The stages with one token budget; the first that a plan has leads the others."""
_TRAIN, _GENERATION = "placements.actor_train", f"placements.{GENERATE}"
_ACTOR_POOL, _ENGINE_POOLS = "pools: the pool of actor_train", "pools: the pools of actor_generate and reward_score"

TABLE = (
    # pools and engines
    Row("actor-num-nodes", _ACTOR_POOL, _read_pools, writes.number_of_nodes("actor_train")),
    Row("actor-num-gpus-per-node", _ACTOR_POOL,
        None, writes.ranks_of_node("actor_train"), "read with actor-num-nodes"),
    Row("num-gpus-per-node", "facts.cluster.ranks_per_node", None),
    Row("colocate", "rule: generation one batch ahead excludes it",
        None, writes.of_plan(lambda plan: not plan.ahead[GENERATE]), "read with actor-num-nodes"),
    Row("rollout-num-gpus", _ENGINE_POOLS, None, writes.of_plan(_num_engine_ranks), "read with actor-num-nodes"),
    Row("rollout-num-gpus-per-engine", f"{_GENERATION}.layout.tp"),
    Row("sglang-pp-size", f"{_GENERATION}.layout.pp", write=None),
    Row("sglang-config", _ENGINE_POOLS,
        _read_reward_model, writes.with_stage("reward_score", writes.always("sglang.yaml"))),
    Row("sglang-mem-fraction-static", f"{_GENERATION}: its weights and cache",
        reads.if_given(reads.memory_share), writes.of_plan(engine_memory_share)),
    Row("sglang-speculative-algorithm", writes.DRAFT_TOKENS, None, writes.if_drafts(lambda _: "NGRAM")),
    Row("sglang-speculative-num-draft-tokens", writes.DRAFT_TOKENS,
        None, writes.if_drafts(lambda draft_tokens: draft_tokens + 1), "the last token and the draft"),
    Row("sglang-max-running-requests", f"{_GENERATION}.schedule.generation_slots", _read_slots),
    # degrees and recomputation, the same for all stages that train or compute log-probabilities
    Row("tensor-model-parallel-size", f"{_TRAIN}.layout.tp", _read_layout),
    Row("pipeline-model-parallel-size", f"{_TRAIN}.layout.pp", None, note="read with tp"),
    Row("context-parallel-size", f"{_TRAIN}.layout.cp", None, note="read with tp"),
    Row("sequence-parallel", f"{_TRAIN}.layout.sp", None, note="read with tp"),
    Row("use-distributed-optimizer", "rule: optimizer state is divided over the replicas", None, writes.always(True)),
    Row("expert-model-parallel-size", f"{_TRAIN}.layout.ep",
        None, writes.with_experts("actor_train"), "read with tp"),
    Row("expert-tensor-parallel-size", f"{_TRAIN}.layout.etp",
        None, writes.with_experts("actor_train"), "read with tp"),
    Row("decoder-first-pipeline-num-layers", f"{_TRAIN}.layout.pp", None, writes.end_layers("actor_train", 0)),
    Row("decoder-last-pipeline-num-layers", f"{_TRAIN}.layout.pp", None, writes.end_layers("actor_train", 1)),
    Row("recompute-granularity", f"{_TRAIN}.schedule.recompute",
        _read_recompute, writes.recomputation("actor_train")),
    Row("recompute-method", f"{_TRAIN}.schedule.recompute",
        None, writes.if_recomputing_all("actor_train", "uniform")),
    Row("recompute-num-layers", f"{_TRAIN}.schedule.recompute", None, writes.if_recomputing_all("actor_train", 1)),
    Row("optimizer-cpu-offload", f"{_TRAIN}.schedule.offload", _read_offload, None),
    # batches, lengths and micro-batches
    Row("rollout-batch-size", "facts.workload: batch_size / group_size",
        reads.batch_size("n-samples-per-prompt"), writes.num_prompts),
    Row("n-samples-per-prompt", "facts.workload.group_size", reads.group_size),
    Row("global-batch-size", "facts.workload.num_minibatches", _read_minibatches, writes.of_plan(mini_batch)),
    Row("num-steps-per-rollout", "facts.workload.num_minibatches",
        None, None, "read with global-batch-size, over which it takes precedence"),
    Row("rollout-max-prompt-len", "facts.workload.prompt.max", _read_prompt),
    Row("rollout-max-response-len", "facts.workload.response.max"),
    Row("rollout-max-context-len", "facts.workload: prompt.max + response.max",
        None, None, "read with rollout-max-prompt-len"),
    Row("use-dynamic-batch-size", "rule: micro-batches are packed", None, writes.always(True)),
    Row("micro-batch-size", f"{_TRAIN}.schedule.micro_batch_size", _read_rows, None),
    Row("max-tokens-per-gpu", f"{_TRAIN}.schedule.micro_batch_tokens", _read_budget, writes.budget("actor_train")),
    Row("log-probs-max-tokens-per-gpu", "placements.actor_logprob.schedule.micro_batch_tokens",
        _read_budget, writes.budget(*_FORWARD)),
    # models and the algorithm
    Row("hf-checkpoint", "job: models.actor.path", _read_model_paths, writes.model_path(Role.ACTOR)),
    Row("ref-load", "job: models.ref.path, converted",
        None, _with_ref(lambda source, _row: f"{source.path(Role.REF)}_torch_dist")),
    Row("use-kl-loss", "job: algorithm and models.ref", None, _with_ref(_write_kl_in_loss)),
    Row("kl-loss-coef", "setting: kl_coefficient", reads.kl_penalty, _write_kl(in_loss=True)),
    Row("kl-coef", "setting: kl_coefficient", reads.kl_penalty, _write_kl(in_loss=False)),
    Row(_ESTIMATOR, "job: algorithm", reads.estimator, _write_estimator),
    Row("custom-rm-path", "job: rewards.function",
        reads.function_reward, writes.with_function(writes.always(f"{HOOK_FILE.removesuffix('.py')}.compute_score"))),
    Row("rm-type", "job: rewards.function", reads.function_reward, None, "slime's built-in reward functions"),
    Row("gamma", "setting: gamma"),
    Row("lambd", "setting: gae_lambda"),
    Row("lr", "setting: actor_learning_rate"),
    Row("eps-clip", "setting: clip_ratio"),
    Row("eps-clip-high", "setting: clip_ratio_high"),
    Row("value-clip", "setting: value_clip"),
    Row("num-critic-only-steps", "setting: critic_warmup_steps", reads.whole_number),
    Row("rollout-temperature", "setting: temperature"),
    Row("normalize-advantages", "setting: whiten_advantages", None),
    Row("disable-grpo-std-normalization", "job: grpo.normalise_by_std", _read_no_std, _write_no_std),
    Row("calculate-per-token-loss", "job: loss_mean", _read_loss_mean, _write_token_mean),
    Row("megatron-config-path", "job: ppo.critic_learning_rate",
        None, writes.with_stage("critic_train", writes.always("megatron.yaml"))),
    Row("use-tis", "staleness", None, writes.of_plan(_needs_weights)),
    Row(_ROLLOUT_LOGPROBS, "facts.old_logprobs",
        reads.old_logprobs, writes.old_logprobs_from("generator", writes.always(True))),
    # settings that are read and not written
    Row("entropy-coef", "setting: entropy_coefficient", write=None),
    Row("weight-decay", "setting: weight_decay", write=None),
    Row("clip-grad", "setting: max_grad_norm", write=None),
    Row("adam-beta1", "setting: adam_beta1", write=None),
    Row("adam-beta2", "setting: adam_beta2", write=None),
    Row("rollout-top-p", "setting: top_p", reads.top_p, None),
    Row("rollout-top-k", "setting: top_k", reads.top_k, None),
    Row("lr-warmup-iters", "setting: actor_schedule", reads.warmup_steps(Role.ACTOR), None),
    Row("lora-rank", "job: models.actor.adapter.rank", reads.adapter_rank, None),
    Row("lora-alpha", "job: models.actor.adapter.alpha", reads.adapter_alpha("lora-rank"), None),
)  # fmt: skip
"""slime's flags and our fields, in the order of an export."""


def _files(origin: ExportInput, settings: Sequence[KeyValue]) -> Mapping[str, str]:
    plan = origin.plan
    program = "train_async.py" if plan.ahead[GENERATE] else "train.py"
    head = (
        "Runs slime with this plan, from the root of its repository. First source the file of the model in its\n"
        "scripts/models/, then pass ${MODEL_ARGS[@]}, --prompt-data, --num-rollout and --custom-rm-path to this script."
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
    old_logprobs={"generator": tuple(_ESTIMATOR_NAMES)},
    modes=deployment_modes,
    settings=partial(write_table, TABLE),
    files=_files,
    remarks=(
        "the shapes of the model are flags of Megatron-core: source slime's scripts/models/ file.",
        "SGLang serves the reward model; write the function that requests its scores (--custom-rm-path).",
        "with a critic, slime offloads the training state between steps, whatever the plan says.",
    ),
)


def read_slime(path: Path, changed: Mapping[str, Any] | None = None) -> ParsedConfig:
    """Read the configuration in a script; the values in `changed`, by key, override those of the script.

    Raises BadInput naming a flag that a job cannot express.
    """
    config = read_flags(path, known_keys("slime"), changed=changed)
    is_async = any(Path(word).name == "train_async.py" for word in config.command)
    return read_table(
        TABLE, _training_setup(config), trainer="slime", notes=_notes, unused=lambda _: (), steps_ahead=int(is_async)
    )


def _notes(setup: TrainingSetup, _fields: Sequence[ParsedField]) -> Iterator[str]:
    config = setup.config
    if not config.value("rollout-max-prompt-len") and not config.value("rollout-max-context-len"):
        yield (
            f"no key gives the longest prompt: {_ASSUMED_PROMPT} tokens are ASSUMED; give it as "
            "--set rollout-max-prompt-len=TOKENS."
        )
    yield from setup.notes()
    yield from single_sample_notes(config, _ESTIMATOR, _ESTIMATORS, "n-samples-per-prompt")
    if config.value(_ESTIMATOR) == "gspo":
        yield (
            "--advantage-estimator gspo: a job clips the ratio of each token, as PPO does, and not that of the "
            "sequence; the cost is the same."
        )
    yield from layout_notes(_DEGREES["ep"], _degrees(config), _layout(config))


def _training_setup(config: TrainerConfig) -> TrainingSetup:
    """The setup, with a reference model if there is a KL penalty, as slime itself decides (ray/placement_group.py)."""
    estimator = estimator_of(config, _ESTIMATOR, _ESTIMATORS, single="n-samples-per-prompt")
    in_loss, in_reward = bool(config.value("use-kl-loss")), config.number("kl-coef") != 0
    return TrainingSetup(
        config=config,
        key=_ESTIMATOR,
        estimator=estimator,
        has_ref=in_loss or in_reward,
        kl_in_loss="kl-loss-coef" if in_loss else None,
        kl_in_reward="kl-coef" if in_reward or estimator is PPO_ESTIMATOR else None,
        reward=None if _reward_model(config) else _function_reward(config),
        old_logprobs="generator" if config.value(_ROLLOUT_LOGPROBS) else "recompute",
    )
