"""Export of plans to verl: Megatron-core trains, vLLM generates and scores.

Actor, reference and critic share all ranks of the trainer, each with its own degrees; log-probabilities and values are
computed with the degrees of the model's training. Generation shares these ranks (`sync`) or has its own pool and works
one batch ahead (`separate_async`, trainer/ppo/v1/trainer_separate_async.py). An engine has no pipeline parallelism
(workers/config/rollout.py). A reward model may have its own pool, and must with `separate_async`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshwright.planner.export.reward_hook import HOOK_FILE, reward_hook
from meshwright.planner.export.shares import (
    engine_memory_share,
    megatron_degrees,
    pool_nodes,
    prompts_of_mini_batch,
    token_budget,
    token_budget_origin,
    uneven_stage_layers,
)
from meshwright.planner.export.texts import overrides, script
from meshwright.planner.export.trainer import ExportInput, KeyValue, OtherTrainer
from meshwright.planner.export.ways import (
    ONE_AHEAD,
    DeploymentMode,
    all_ranks,
    equal_choices,
    on_pool,
    pool_divisions,
    ppo_stages,
    present_stages,
    tp_only_engines,
)
from meshwright.planner.plan.critic_free_settings import CriticFreeSettings, Reinforce
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.schedule import Offload, Recompute
from meshwright.profiles.stages import GENERATE, Role

_A, _R = "actor_rollout_ref", "actor_rollout_ref.rollout"
_RM = "reward.reward_model"
_CORRECTION = "algorithm.rollout_correction"
_MODEL_PREFIXES = {"actor_train": f"{_A}.actor", "critic_train": "critic", "ref_logprob": f"{_A}.ref"}
"""The stage that a model's degrees are taken from, with verl's prefix of their keys."""
_ESTIMATOR_NAMES: Mapping[Algorithm, str] = {
    "ppo": "gae",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce++": "reinforce_plus_plus",
}
_LOSS_MEAN_NAMES = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
_SETTING_KEYS = {
    "gamma": "algorithm.gamma",
    "gae_lambda": "algorithm.lam",
    "actor_learning_rate": f"{_A}.actor.optim.lr",
    "critic_learning_rate": "critic.optim.lr",
    "value_clip": "critic.cliprange_value",
    "entropy_coefficient": f"{_A}.actor.entropy_coeff",
    "temperature": f"{_R}.temperature",
    "normalise_by_std": "algorithm.norm_adv_by_std_in_grpo",
}


def deployment_modes(facts: Facts) -> Iterator[DeploymentMode]:
    """Synchronous on all ranks, with or without a separate reward pool; or generation one batch ahead on its own
    pool."""
    all_pool, stages = all_ranks(facts.cluster), ppo_stages()
    stages_without_reward = tuple(name for name in stages if name != "reward_score")
    yield _mode("sync", on_pool(all_pool, (GENERATE, *stages)))
    if facts.rewards:
        for train, generate in pool_divisions(facts.cluster, 2):
            pool_pins = (*on_pool(train, stages), *on_pool(generate, (GENERATE,)))
            yield _mode(f"separate_async, {generate} generates", pool_pins, steps_ahead=ONE_AHEAD)
        return
    for train, score in pool_divisions(facts.cluster, 2):
        yield _mode(
            f"sync, rewards on {score}",
            (*on_pool(train, (GENERATE, *stages_without_reward)), *on_pool(score, ("reward_score",))),
        )
    for train, generate, score in pool_divisions(facts.cluster, 3):
        pool_pins = (
            *on_pool(train, stages_without_reward),
            *on_pool(generate, (GENERATE,)),
            *on_pool(score, ("reward_score",)),
        )
        yield _mode(f"separate_async, {generate} generates", pool_pins, steps_ahead=ONE_AHEAD)


def _mode(name: str, pool_pins: tuple[str, ...], *, steps_ahead: int = 0) -> DeploymentMode:
    return DeploymentMode(
        name=name,
        pins=(*pool_pins, *tp_only_engines()),
        equal_choices=(
            *equal_choices("layout", "actor_train", ("actor_logprob",)),
            *equal_choices("layout", "critic_train", ("critic_value",)),
            *equal_choices("micro_batch_size", "critic_train", ("critic_value",)),
            *equal_choices("micro_batch_tokens", "critic_train", ("critic_value",)),
        ),
        steps_ahead=steps_ahead,
    )


def settings(origin: ExportInput) -> Iterator[KeyValue]:
    """The overrides of verl's default configuration that express a plan."""
    plan = origin.plan
    yield KeyValue("model_engine", "megatron", "rule: degrees of pipeline and experts are Megatron's")
    yield from _batch_settings(plan)
    yield from _pool_settings(plan)
    for stage in present_stages(plan, _MODEL_PREFIXES):
        yield from _degree_settings(plan, stage)
    yield from _micro_batch_settings(plan)
    yield from _generation_settings(plan)
    yield from _fp8_settings(origin)
    yield from _reward_settings(origin)
    yield from _algorithm_settings(origin)


def _batch_settings(plan: Plan) -> Iterator[KeyValue]:
    workload = plan.facts.workload
    yield KeyValue("data.train_batch_size", workload.num_prompts, "facts.workload: batch_size / group_size")
    yield KeyValue("data.max_prompt_length", workload.prompt.max, "facts.workload.prompt.max")
    yield KeyValue("data.max_response_length", workload.response.max, "facts.workload.response.max")
    for model in present_stages(plan, {f"{_A}.actor": "actor_train", "critic": "critic_train"}):
        yield KeyValue(f"{model}.ppo_mini_batch_size", prompts_of_mini_batch(plan), "facts.workload.num_minibatches")
        yield KeyValue(f"{model}.ppo_epochs", workload.num_epochs, "facts.workload.num_epochs")


def _pool_settings(plan: Plan) -> Iterator[KeyValue]:
    nodes, per_node = pool_nodes(plan, "actor_train")
    yield KeyValue("trainer.nnodes", nodes, "pools, that of actor_train")
    yield KeyValue("trainer.n_gpus_per_node", per_node, "pools, that of actor_train")
    if not plan.ahead[GENERATE]:
        yield KeyValue("trainer.v1.trainer_mode", "sync", "placements.actor_generate.steps_ahead")
        return
    nodes, per_node = pool_nodes(plan, GENERATE)
    steps = plan.facts.workload.num_minibatches
    yield KeyValue("trainer.v1.trainer_mode", "separate_async", "placements.actor_generate.steps_ahead")
    yield KeyValue(f"{_A}.hybrid_engine", False, "pools: no engine on the ranks that train")
    yield KeyValue(f"{_R}.nnodes", nodes, "pools, that of actor_generate")
    yield KeyValue(f"{_R}.n_gpus_per_node", per_node, "pools, that of actor_generate")
    yield KeyValue(
        "trainer.v1.separate_async.parameter_sync_step", steps, "rule: batch = parameter_sync_step x mini-batch"
    )
    yield KeyValue("trainer.v1.sampler.max_off_policy_threshold", plan.ahead[GENERATE] + 1, "staleness")
    yield KeyValue(f"{_R}.checkpoint_engine.backend", "nccl", "rule: separate_async excludes naive")


def _degree_settings(plan: Plan, stage: str) -> Iterator[KeyValue]:
    schedule, prefix = plan.placement(stage).schedule, f"{_MODEL_PREFIXES[stage]}.megatron"
    field = f"placements.{stage}.layout"
    yield from megatron_degrees(plan, stage, prefix)
    if ends := uneven_stage_layers(plan, stage):
        for name, number in zip(("first", "last"), ends, strict=True):
            key = f"+{prefix}.override_transformer_config.num_layers_in_{name}_pipeline_stage"
            yield KeyValue(key, number, f"{field}.pp")
    offloads = {Offload.OPTIMIZER: "optimizer_offload", Offload.WEIGHTS: "param_offload"}
    if schedule.offload in offloads:
        yield KeyValue(f"{prefix}.{offloads[schedule.offload]}", True, f"placements.{stage}.schedule.offload")
    if schedule.recompute is not Recompute.NONE:
        yield from _recompute_settings(prefix, stage, schedule.recompute)


def _recompute_settings(prefix: str, stage: str, recompute: Recompute) -> Iterator[KeyValue]:
    override, field = f"{prefix}.override_transformer_config", f"placements.{stage}.schedule.recompute"
    yield KeyValue(f"{override}.recompute_granularity", recompute.value, field)
    if recompute is Recompute.FULL:
        yield KeyValue(f"{override}.recompute_method", "uniform", field)
        yield KeyValue(f"{override}.recompute_num_layers", 1, field)


def _micro_batch_settings(plan: Plan) -> Iterator[KeyValue]:
    """Token budgets. The critic's micro-batch rows never reach its worker, so both budgets are its training's
    (trainer_base.py)."""
    budgets = {
        f"{_A}.actor.ppo_max_token_len_per_gpu": "actor_train",
        f"{_R}.log_prob_max_token_len_per_gpu": "actor_logprob",
        f"{_A}.ref.log_prob_max_token_len_per_gpu": "ref_logprob",
        "critic.ppo_max_token_len_per_gpu": "critic_train",
        "critic.forward_max_token_len_per_gpu": "critic_train",
    }
    yield KeyValue(f"{_A}.actor.use_dynamic_bsz", True, "rule: micro-batches are packed")
    if "critic_train" in plan.graph.by_name:
        yield KeyValue("critic.use_dynamic_bsz", True, "rule: the critic's rows do not reach its worker")
    for key, stage in present_stages(plan, budgets).items():
        yield KeyValue(key, token_budget(plan, stage), token_budget_origin(plan, stage))


def _generation_settings(plan: Plan) -> Iterator[KeyValue]:
    placement = plan.placement(GENERATE)
    layout, field = placement.layout, "placements.actor_generate.layout"
    yield KeyValue(f"{_R}.name", plan.facts.engine, "facts.engine")
    yield KeyValue(f"{_R}.n", plan.facts.workload.group_size, "facts.workload.group_size")
    yield KeyValue(f"{_R}.tensor_model_parallel_size", layout.tp, f"{field}.tp")
    if layout.ep > 1:
        replicas = layout.expert_replicas
        yield KeyValue(f"{_R}.data_parallel_size", replicas, f"{field}.ep")
        yield KeyValue(f"{_R}.expert_parallel_size", replicas * layout.tp, "rule: expert = tensor x data of an engine")
    slots = placement.schedule.generation_slots
    yield KeyValue(f"{_R}.max_num_seqs", slots, "placements.actor_generate.schedule.generation_slots")
    share = engine_memory_share(plan)
    yield KeyValue(f"{_R}.gpu_memory_utilization", share, "placements.actor_generate: its weights and cache")
    yield KeyValue(f"{_R}.max_model_len", plan.facts.workload.max_tokens, "facts.workload: prompt.max + response.max")


def _fp8_settings(origin: ExportInput) -> Iterator[KeyValue]:
    """FP8 generation samples from a different policy than the trained one, so each token gets an importance weight."""
    if origin.plan.facts.generation_weights:
        yield KeyValue(f"{_R}.quantization", "fp8", "facts.generation_weights")
        yield KeyValue(f"{_CORRECTION}.rollout_is", "token", "rule: tokens sampled in FP8 get importance weights")
        yield from origin.setting("importance_cap", f"{_CORRECTION}.rollout_is_threshold")


def _reward_settings(origin: ExportInput) -> Iterator[KeyValue]:
    plan = origin.plan
    if origin.reward_function is not None:
        yield KeyValue(f"{_RM}.enable", False, "job: rewards")
        yield KeyValue("reward.custom_reward_function.path", HOOK_FILE, "job: rewards.function")
        yield KeyValue("reward.custom_reward_function.name", "compute_score", "rule: the name in that file")
        return
    score, train = plan.choice("reward_score", "pool"), plan.choice("actor_train", "pool")
    yield KeyValue(f"{_RM}.enable", True, "placements.reward_score")
    yield KeyValue(f"{_RM}.model_path", origin.path(Role.REWARD), "job: models.reward.path")
    yield KeyValue(f"{_RM}.enable_resource_pool", score != train, "pools, that of reward_score")
    if score != train:
        nodes, per_node = pool_nodes(plan, "reward_score")
        yield KeyValue(f"{_RM}.nnodes", nodes, "pools, that of reward_score")
        yield KeyValue(f"{_RM}.n_gpus_per_node", per_node, "pools, that of reward_score")
    yield KeyValue(f"{_RM}.rollout.name", "vllm", "rule: the engine that is assumed")
    layout = plan.placement("reward_score").layout
    yield KeyValue(f"{_RM}.rollout.tensor_model_parallel_size", layout.tp, "placements.reward_score.layout.tp")


def _algorithm_settings(origin: ExportInput) -> Iterator[KeyValue]:
    algorithm, roles = origin.algorithm, origin.plan.graph.roles
    yield KeyValue(f"{_A}.model.path", origin.path(Role.ACTOR), "job: models.actor.path")
    if Role.CRITIC in roles:
        yield KeyValue("critic.model.path", origin.path(Role.CRITIC), "job: models.critic.path")
    yield KeyValue("critic.enable", Role.CRITIC in roles, "job: algorithm")
    estimator = "reinforce_plus_plus_baseline" if _has_group_baseline(origin) else _ESTIMATOR_NAMES[algorithm]
    yield KeyValue("algorithm.adv_estimator", estimator, "job: algorithm")
    in_loss = algorithm == "grpo"
    yield KeyValue("algorithm.use_kl_in_reward", Role.REF in roles and not in_loss, "job: algorithm and models.ref")
    yield KeyValue(f"{_A}.actor.use_kl_loss", Role.REF in roles and in_loss, "job: algorithm and models.ref")
    if Role.REF in roles:
        key = f"{_A}.actor.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"
        yield from origin.setting("kl_coefficient", key)
    yield from origin.settings_by_key(_SETTING_KEYS)
    low, high = origin.settings.clip_range
    yield KeyValue(f"{_A}.actor.clip_ratio_low", round(1 - low, 9), "job: clip_ratio")
    yield KeyValue(f"{_A}.actor.clip_ratio_high", round(high - 1, 9), "job: clip_ratio_high, or clip_ratio")
    if isinstance(origin.settings, CriticFreeSettings):
        aggregation = _LOSS_MEAN_NAMES[origin.settings.loss_mean]
        yield KeyValue(f"{_A}.actor.loss_agg_mode", aggregation, "job: loss_mean")


def _has_group_baseline(origin: ExportInput) -> bool:
    return isinstance(origin.settings, Reinforce) and origin.settings.group_baseline


def _files(origin: ExportInput, settings: Sequence[KeyValue]) -> Mapping[str, str]:
    head = "verl with this plan. Add data.train_files and data.val_files, as arguments of this script."
    command = script(head, "python3 -m verl.trainer.main_ppo", overrides(settings))
    return {"run.sh": command, **reward_hook("verl", origin)}


VERL = OtherTrainer(
    name="verl",
    key_file="verl",
    algorithms=tuple(_ESTIMATOR_NAMES),
    engine="vllm",
    other_engines=("sglang",),
    supports_fp8=True,
    modes=deployment_modes,
    settings=settings,
    files=_files,
    remarks=(
        "data.train_files and data.val_files are yours to give.",
        "log-probabilities and values are computed with the degrees of their model's training.",
    ),
)
