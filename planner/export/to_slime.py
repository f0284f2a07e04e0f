"""Export of plans to slime: Megatron-core trains, SGLang generates and scores.

All stages that train or compute log-probabilities have the actor's ranks and degrees (slime/utils/arguments.py sets the
critic's to the actor's). The engines share these ranks (`--colocate`) or have their own; `train_async.py` generates one
batch ahead, which excludes `--colocate`. A reward model is served beside the actor (`--sglang-config`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshwright.planner.export.reward_hook import HOOK_FILE, reward_hook
from meshwright.planner.export.shares import (
    engine_memory_share,
    mini_batch,
    pool_nodes,
    token_budget,
    token_budget_origin,
    uneven_stage_layers,
)
from meshwright.planner.export.texts import flags, script
from meshwright.planner.export.trainer import ExportInput, KeyValue, OtherTrainer
from meshwright.planner.export.ways import (
    ONE_AHEAD,
    DeploymentMode,
    all_ranks,
    equal_choices,
    on_pool,
    pool_divisions,
    ppo_stages,
    tp_only_engines,
)
from meshwright.planner.plan.critic_free_settings import GRPO, CriticFreeSettings, Reinforce
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.ppo_settings import PPO
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.schedule import Recompute
from meshwright.profiles.stages import GENERATE, Role

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
    """Engines on the trainer's ranks, or on their own ranks and one batch ahead; the reward model's beside them."""
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
    yield KeyValue("actor-num-nodes", nodes, "pools, that of actor_train")
    yield KeyValue("actor-num-gpus-per-node", per_node, "pools, that of actor_train")
    yield KeyValue("num-gpus-per-node", plan.facts.cluster.ranks_per_node, "facts.cluster.ranks_per_node")
    yield KeyValue("colocate", not plan.ahead[GENERATE], "rule: generation a batch ahead excludes it")
    engines = sum(_pool_ranks(plan, stage).num_ranks for stage in _ENGINE_STAGES if stage in plan.graph.by_name)
    yield KeyValue("rollout-num-gpus", engines, "pools, those of actor_generate and reward_score")
    yield KeyValue(
        "rollout-num-gpus-per-engine", plan.placement(GENERATE).layout.tp, "placements.actor_generate.layout.tp"
    )
    if "reward_score" in plan.graph.by_name:
        yield KeyValue("sglang-config", "sglang.yaml", "pools, those of actor_generate and reward_score")
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
        "slime with this plan, from the root of its repository. Source its scripts/models/ file of the model first,\n"
        "and add ${MODEL_ARGS[@]}, --prompt-data, --num-rollout and --custom-rm-path as arguments of this script."
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
        "the reward model is served; the function that asks it for scores is yours (--custom-rm-path).",
        "a critic has slime offload the training state between steps, whatever the plan says.",
    ),
)
