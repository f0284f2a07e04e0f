"""Export of plans to OpenRLHF: DeepSpeed trains and scores, vLLM generates.

All four models have the same degrees of tensor parallelism and ring attention, and no pipeline. They share all ranks
with the engines (`--train.colocate_all`); or generation works one batch ahead on its own ranks, and the models share
the rest, all together or actor with reference and critic with reward. There is one micro-batch size for training and
one for scoring (cli/train_ppo_ray.py). Recomputation of activations is full or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright.planner.export.reward_hook import HOOK_FILE, reward_hook
from meshwright.planner.export.shares import engine_memory_share, mini_batch, pool_nodes
from meshwright.planner.export.texts import flags, script
from meshwright.planner.export.trainer import ExportInput, KeyValue, OtherTrainer
from meshwright.planner.export.ways import (
    ONE_AHEAD,
    DeploymentMode,
    all_ranks,
    equal_choices,
    no_overlap,
    on_pool,
    pin_value,
    pool_divisions,
    ppo_stages,
    present_stages,
)
from meshwright.planner.plan.critic_free_settings import GRPO, CriticFreeSettings, Reinforce
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute
from meshwright.profiles.stages import GENERATE, Role

_TP_CP_DEGREES = tuple((tp, cp) for cp in (1, 2, 4) for tp in (1, 2, 4, 8))
_FORWARD_STAGES = ppo_stages(trains=False)
_TRAIN_STAGES = ppo_stages(trains=True)
_SETTING_KEYS = {
    "gamma": "algo.advantage.gamma",
    "gae_lambda": "algo.advantage.lambd",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "value_clip": "critic.value_clip",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
}
_ESTIMATOR_NAMES: Mapping[Algorithm, str] = {
    "ppo": "gae",
    "grpo": "group_norm",
    "rloo": "rloo",
    "reinforce++": "reinforce",
}
_LOSS_MEAN_NAMES = {"token": "token-mean", "sequence": "seq-mean-token-mean"}
_MODEL_STAGES = {"actor": "actor_train", "critic": "critic_train", "ref": "ref_logprob", "reward": "reward_score"}


def deployment_modes(facts: Facts) -> Iterator[DeploymentMode]:
    """All degrees, with the models on all ranks; or in one or two groups, with generation one batch ahead."""
    all_pool = all_ranks(facts.cluster)
    actors = (*ppo_stages(role="actor"), *ppo_stages(role="ref"))
    critics = (*ppo_stages(role="critic"), *ppo_stages(role="reward"))
    for tp, cp in _TP_CP_DEGREES:
        layout = Layout(tp=tp, cp=cp)
        yield from _modes(facts, {all_pool: (*actors, *critics)}, all_pool, layout)
        for train, generate in pool_divisions(facts.cluster, 2):
            yield from _modes(facts, {train: (*actors, *critics)}, generate, layout, ONE_AHEAD)
        for actor_pool, critic_pool, generate in pool_divisions(facts.cluster, 3):
            yield from _modes(facts, {actor_pool: actors, critic_pool: critics}, generate, layout, ONE_AHEAD)


def _modes(
    facts: Facts, groups: Mapping[Ranks, tuple[str, ...]], engines: Ranks, degrees: Layout, steps_ahead: int = 0
) -> Iterator[DeploymentMode]:
    """One mode; none where the degrees do not divide the ranks of a group or the heads of a model."""
    ranks_per_replica = degrees.num_ranks
    heads = [facts.models.spec(stage.role).num_kv_heads for stage in facts.graph.stages if stage.trains]
    if any(ranks.num_ranks % ranks_per_replica for ranks in groups) or any(number % degrees.tp for number in heads):
        return
    layouts = {
        stage: replace(degrees, dp=ranks.num_ranks // ranks_per_replica)
        for ranks, stages in groups.items()
        for stage in stages
    }
    mode = "colocate_all" if steps_ahead == 0 else "async, in groups" if len(groups) > 1 else "async, models together"
    yield DeploymentMode(
        name=f"{mode}, tp{degrees.tp}, ring{degrees.cp}",
        pins=(
            *(pin for ranks, stages in groups.items() for pin in on_pool(ranks, stages)),
            *on_pool(engines, (GENERATE,)),
            *(f"{stage}.layout={layout}" for stage, layout in layouts.items()),
            *no_overlap(),
            *pin_value("micro_batch_tokens", 0, ppo_stages()),
            *pin_value("pp", 1, (GENERATE,)),
            *pin_value("cp", 1, (GENERATE,)),
            *pin_value("ep", 1, (GENERATE,)),
            *(f"{stage}.recompute!=selective" for stage in _TRAIN_STAGES),
            *(pin_value("offload", "none", _TRAIN_STAGES) if steps_ahead else ()),
        ),
        equal_choices=(
            *equal_choices("recompute", "actor_train", ("critic_train",)),
            *equal_choices("offload", "actor_train", ("critic_train",)),
            *equal_choices("micro_batch_size", "actor_train", ("critic_train",)),
            *equal_choices(
                "micro_batch_size", "actor_logprob", tuple(s for s in _FORWARD_STAGES if s != "actor_logprob")
            ),
        ),
        steps_ahead=steps_ahead,
    )


def settings(origin: ExportInput) -> Iterator[KeyValue]:
    """The flags of `train_ppo_ray` that express a plan."""
    plan = origin.plan
    yield from _degree_settings(plan)
    yield from _pool_settings(plan)
    yield from _batch_settings(plan)
    yield from _generation_settings(plan)
    yield from _algorithm_settings(origin)


def _pool_settings(plan: Plan) -> Iterator[KeyValue]:
    for model, stage in present_stages(plan, _MODEL_STAGES).items():
        nodes, per_node = pool_nodes(plan, stage)
        yield KeyValue(f"{model}.num_nodes", nodes, f"pools, that of {stage}")
        yield KeyValue(f"{model}.num_gpus_per_node", per_node, f"pools, that of {stage}")
    pools = {stage: plan.choice(stage, "pool") for stage in present_stages(plan, _MODEL_STAGES).values()}
    together = len(set(pools.values())) == 1
    yield KeyValue("train.colocate_all", together, "pools: all models on one")
    yield KeyValue("train.colocate_actor_ref", not together, "pools, that of actor_train and ref_logprob")
    if "critic_train" in plan.graph.by_name:
        yield KeyValue("train.colocate_critic_reward", not together, "pools, that of critic_train and reward_score")
    ahead = bool(plan.ahead[GENERATE])
    yield KeyValue("train.async_enable", ahead, "placements.actor_generate.steps_ahead")
    yield KeyValue("vllm.enable_sleep", not ahead, "rule: excluded by async_enable")


def _degree_settings(plan: Plan) -> Iterator[KeyValue]:
    placement = plan.placement("actor_train")
    layout, schedule = placement.layout, placement.schedule
    yield KeyValue("ds.tensor_parallel_size", layout.tp, "placements.actor_train.layout.tp")
    yield KeyValue("ds.ring_attn_size", layout.cp, "placements.actor_train.layout.cp")
    yield KeyValue("ds.zero_stage", 1, "rule: replicas divide the optimizer's state and keep all gradients")
    yield KeyValue("ds.packing_samples", True, "rule: micro-batches are packed")
    recomputes = schedule.recompute is Recompute.FULL
    yield KeyValue("actor.gradient_checkpointing_enable", recomputes, "placements.actor_train.schedule.recompute")
    offloads = schedule.offload is Offload.OPTIMIZER
    yield KeyValue("ds.enable_sleep", offloads, "placements.actor_train.schedule.offload")
    for model, stage in present_stages(plan, {"ref": "ref_logprob", "reward": "reward_score"}).items():
        offloads = plan.placement(stage).schedule.offload is Offload.WEIGHTS
        yield KeyValue(f"{model}.offload", offloads, f"placements.{stage}.schedule.offload")


def _batch_settings(plan: Plan) -> Iterator[KeyValue]:
    workload = plan.facts.workload
    yield KeyValue("rollout.batch_size", workload.num_prompts, "facts.workload: batch_size / group_size")
    yield KeyValue("rollout.n_samples_per_prompt", workload.group_size, "facts.workload.group_size")
    yield KeyValue("train.batch_size", mini_batch(plan), "facts.workload.num_minibatches")
    yield KeyValue("train.max_epochs", workload.num_epochs, "facts.workload.num_epochs")
    yield KeyValue("data.max_len", workload.max_tokens, "facts.workload: prompt.max + response.max")
    yield KeyValue("rollout.max_new_tokens", workload.response.max, "facts.workload.response.max")
    for key, stage in (("train", "actor_train"), ("rollout", "actor_logprob")):
        rows = plan.placement(stage).schedule.micro_batch_size
        yield KeyValue(f"{key}.micro_batch_size", rows, f"placements.{stage}.schedule.micro_batch_size")


def _generation_settings(plan: Plan) -> Iterator[KeyValue]:
    layout, ranks = plan.placement(GENERATE).layout, plan.choice(GENERATE, "pool")
    assert isinstance(ranks, Ranks)
    yield KeyValue("vllm.num_engines", ranks.num_ranks // layout.tp, "placements.actor_generate.layout.dp")
    yield KeyValue("vllm.tensor_parallel_size", layout.tp, "placements.actor_generate.layout.tp")
    share = engine_memory_share(plan)
    yield KeyValue("vllm.gpu_memory_utilization", share, "placements.actor_generate: its weights and cache")


def _algorithm_settings(origin: ExportInput) -> Iterator[KeyValue]:
    roles, settings = origin.plan.graph.roles, origin.settings
    for model in ("actor", "critic", "reward"):
        if model in roles:
            yield KeyValue(f"{model}.model_name_or_path", origin.path(Role(model)), f"job: models.{model}.path")
    if origin.reward_function is not None:
        yield KeyValue("reward.remote_url", HOOK_FILE, "job: rewards.function")
    yield KeyValue("algo.advantage.estimator", _estimator_name(origin), "job: algorithm")
    if Role.REF in roles:
        yield from origin.setting("kl_coefficient", "algo.kl.init_coef")
    else:
        yield KeyValue("algo.kl.init_coef", 0.0, "job: no models.ref")
    yield KeyValue(
        "algo.kl.use_loss", Role.REF in roles and isinstance(settings, GRPO), "job: algorithm and models.ref"
    )
    yield from origin.settings_by_key(_SETTING_KEYS)
    low, high = settings.clip_range
    yield KeyValue("actor.eps_clip_low_high", (round(1 - low, 9), round(high - 1, 9)), "job: clip_ratio")
    if isinstance(settings, CriticFreeSettings) and settings.loss_mean in _LOSS_MEAN_NAMES:
        yield KeyValue("actor.loss_agg_mode", _LOSS_MEAN_NAMES[settings.loss_mean], "job: loss_mean")


def _estimator_name(origin: ExportInput) -> str:
    settings = origin.settings
    if isinstance(settings, GRPO) and not settings.normalise_by_std:
        return "dr_grpo"
    if isinstance(settings, Reinforce) and settings.group_baseline:
        return "reinforce_baseline"
    return _ESTIMATOR_NAMES[origin.algorithm]


def _files(origin: ExportInput, settings: Sequence[KeyValue]) -> Mapping[str, str]:
    head = "OpenRLHF with this plan. Add --data.prompt_dataset, as an argument of this script."
    command = script(head, "python3 -m openrlhf.cli.train_ppo_ray", flags(settings))
    return {"run.sh": command, **reward_hook("openrlhf", origin)}


OPENRLHF = OtherTrainer(
    name="openrlhf",
    key_file="openrlhf",
    engine="vllm",
    modes=deployment_modes,
    algorithms=tuple(_ESTIMATOR_NAMES),
    settings=settings,
    files=_files,
    remarks=(
        "--data.prompt_dataset is yours to give.",
        "weights divided over replicas (ZeRO-3) are no choice of a plan; with them it holds larger models.",
        "an engine's slots cannot be given: it admits what its cache holds.",
    ),
)
