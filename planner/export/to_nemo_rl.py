"""Export of plans to NeMo-RL: Megatron-core trains policy and value model, vLLM generates, a PyTorch worker scores.

Reference and log-probabilities have the policy's degrees, values those of the value model; both models share the ranks
that train. Generation shares them too or has its own ranks, whole nodes where there are several. One batch ahead, it
must have its own ranks, the asynchronous engine and the importance correction (examples/configs/ppo_math_1B.yaml). A
reward model is an environment on its own ranks, with tensor parallelism alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshwright.planner.export.shares import (
    engine_memory_share,
    megatron_degrees,
    mini_batch,
    pool_nodes,
    uneven_stage_layers,
)
from meshwright.planner.export.texts import nested_yaml, script
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
)
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.ppo_settings import PPO
from meshwright.profiles.errors import BadInput
from meshwright.profiles.schedule import Offload, Recompute
from meshwright.profiles.stages import GENERATE, Role

_G = "policy.generation"
_RM = "env.reward_model"
_MODEL_PREFIXES = {"actor_train": "policy", "critic_train": "value"}


def deployment_modes(facts: Facts) -> Iterator[DeploymentMode]:
    """Generation on the ranks that train, or on its own ranks one batch ahead; the reward model always on its own."""
    trained = tuple(name for name in ppo_stages() if name != "reward_score")
    if facts.rewards:
        all_pool = all_ranks(facts.cluster)
        yield _mode("colocated", (*on_pool(all_pool, trained), *on_pool(all_pool, (GENERATE,))))
        for train, generate in pool_divisions(facts.cluster, 2):
            pool_pins = (*on_pool(train, trained), *on_pool(generate, (GENERATE,)))
            yield _mode(f"async, {generate} generates", pool_pins, steps_ahead=ONE_AHEAD)
        return
    for train, score in pool_divisions(facts.cluster, 2):
        yield _mode("colocated", (*on_pool(train, (GENERATE, *trained)), *on_pool(score, ("reward_score",))))
    for train, generate, score in pool_divisions(facts.cluster, 3):
        pool_pins = (*on_pool(train, trained), *on_pool(generate, (GENERATE,)), *on_pool(score, ("reward_score",)))
        yield _mode(f"async_ppo, {generate} generates", pool_pins, steps_ahead=ONE_AHEAD)


def _mode(name: str, pool_pins: tuple[str, ...], *, steps_ahead: int = 0) -> DeploymentMode:
    return DeploymentMode(
        name=name,
        pins=(
            *pool_pins,
            *no_overlap(),
            f"{GENERATE}.cp=1",
            *pin_value("micro_batch_tokens", 0, ppo_stages()),
            "reward_score.pp=1",
            "reward_score.cp=1",
            *(f"{stage}.{key}" for stage in ppo_stages(trains=True) for key in ("vpp=1", "recompute!=selective")),
            "reward_score.offload=none",
            "ref_logprob.offload=none",
            "critic_train.offload=none",
        ),
        equal_choices=(
            *equal_choices("layout", "actor_train", ("actor_logprob", "ref_logprob")),
            *equal_choices("layout", "critic_train", ("critic_value",)),
            *equal_choices("micro_batch_size", "actor_logprob", ("ref_logprob",)),
            *equal_choices("micro_batch_size", "critic_train", ("critic_value",)),
        ),
        steps_ahead=steps_ahead,
    )


def settings(origin: ExportInput) -> Iterator[KeyValue]:
    """The keys of NeMo-RL's configuration that express a plan. Raises BadInput for a reward function."""
    plan = origin.plan
    if origin.reward_function is not None:
        raise BadInput(
            f"rewards.function={origin.reward_function}: NeMo-RL takes a function as an environment, which is not "
            f"exported "
            "here; export to verl, openrlhf or slime, or take pools and layouts over by hand."
        )
    yield from _batch_settings(plan)
    for stage in _MODEL_PREFIXES:
        yield from _degree_settings(plan, stage)
    yield from _micro_batch_settings(plan)
    yield from _generation_settings(plan)
    yield from _async_settings(plan)
    yield from _reward_settings(origin)
    yield from _algorithm_settings(origin)
    cluster = plan.facts.cluster
    yield KeyValue("cluster.num_nodes", cluster.nodes, "facts.cluster.nodes")
    yield KeyValue("cluster.gpus_per_node", cluster.ranks_per_node, "facts.cluster.ranks_per_node")


def _batch_settings(plan: Plan) -> Iterator[KeyValue]:
    workload = plan.facts.workload
    yield KeyValue("ppo.num_prompts_per_step", workload.num_prompts, "facts.workload: batch_size / group_size")
    yield KeyValue("ppo.num_generations_per_prompt", workload.group_size, "facts.workload.group_size")
    yield KeyValue("ppo.ppo_epochs", workload.num_epochs, "facts.workload.num_epochs")
    yield KeyValue("policy.train_global_batch_size", mini_batch(plan), "facts.workload.num_minibatches")
    yield KeyValue("policy.max_total_sequence_length", workload.max_tokens, "facts.workload: prompt.max + response.max")
    yield KeyValue("data.max_input_seq_length", workload.prompt.max, "facts.workload.prompt.max")
    yield KeyValue(f"{_G}.max_new_tokens", workload.response.max, "facts.workload.response.max")


def _degree_settings(plan: Plan, stage: str) -> Iterator[KeyValue]:
    placement, prefix, field = (
        plan.placement(stage),
        f"{_MODEL_PREFIXES[stage]}.megatron_cfg",
        f"placements.{stage}.layout",
    )
    layout = placement.layout
    yield KeyValue(f"{prefix}.enabled", True, "rule: degrees of pipeline and experts are Megatron's")
    yield from megatron_degrees(plan, stage, prefix)
    if ends := uneven_stage_layers(plan, stage):
        for name, number in zip(("first", "last"), ends, strict=True):
            yield KeyValue(f"{prefix}.num_layers_in_{name}_pipeline_stage", number, f"{field}.pp")
    recomputes = placement.schedule.recompute is Recompute.FULL
    yield KeyValue(f"{prefix}.activation_checkpointing", recomputes, f"placements.{stage}.schedule.recompute")
    if layout.cp > 1 and stage == "critic_train":
        yield KeyValue("value.sequence_packing.enabled", True, "rule: context parallelism of the value model packs")


def _micro_batch_settings(plan: Plan) -> Iterator[KeyValue]:
    stages = {
        "policy.train_micro_batch_size": "actor_train",
        "policy.logprob_batch_size": "actor_logprob",
        "value.train_micro_batch_size": "critic_train",
    }
    for key, stage in stages.items():
        schedule = plan.placement(stage).schedule
        yield KeyValue(key, schedule.micro_batch_size, f"placements.{stage}.schedule.micro_batch_size")
    offloads = plan.placement("actor_train").schedule.offload is Offload.OPTIMIZER
    yield KeyValue("policy.offload_optimizer_for_logprob", offloads, "placements.actor_train.schedule.offload")


def _generation_settings(plan: Plan) -> Iterator[KeyValue]:
    layout, field = plan.placement(GENERATE).layout, "placements.actor_generate.layout"
    yield KeyValue(f"{_G}.vllm_cfg.tensor_parallel_size", layout.tp, f"{field}.tp")
    yield KeyValue(f"{_G}.vllm_cfg.pipeline_parallel_size", layout.pp, f"{field}.pp")
    if layout.ep > 1:
        number = layout.expert_replicas * layout.tp
        yield KeyValue(f"{_G}.vllm_cfg.expert_parallel_size", number, "rule: a multiple of tensor's")
    share = engine_memory_share(plan)
    yield KeyValue(f"{_G}.vllm_cfg.gpu_memory_utilization", share, "placements.actor_generate: its weights and cache")


def _async_settings(plan: Plan) -> Iterator[KeyValue]:
    ahead = plan.ahead[GENERATE]
    yield KeyValue(f"{_G}.colocated.enabled", not ahead, "pools, that of actor_generate")
    yield KeyValue("ppo.async_ppo.enabled", bool(ahead), "placements.actor_generate.steps_ahead")
    if ahead:
        nodes, per_node = pool_nodes(plan, GENERATE)
        yield KeyValue("ppo.async_ppo.max_trajectory_age_steps", ahead, "placements.actor_generate.steps_ahead")
        yield KeyValue(f"{_G}.colocated.resources.num_nodes", nodes, "pools, that of actor_generate")
        yield KeyValue(f"{_G}.colocated.resources.gpus_per_node", per_node, "pools, that of actor_generate")
        yield KeyValue(f"{_G}.vllm_cfg.async_engine", True, "rule: async_ppo needs it")
        yield KeyValue("loss_fn.use_importance_sampling_correction", True, "rule: async_ppo needs it")


def _reward_settings(origin: ExportInput) -> Iterator[KeyValue]:
    nodes, per_node = pool_nodes(origin.plan, "reward_score")
    layout, schedule = origin.plan.placement("reward_score").layout, origin.plan.placement("reward_score").schedule
    field = "placements.reward_score"
    yield KeyValue("data.default.env_name", "reward_model", field)
    yield KeyValue(f"{_RM}.enabled", True, field)
    yield KeyValue(f"{_RM}.model_name", origin.path(Role.REWARD), "job: models.reward.path")
    yield KeyValue(f"{_RM}.batch_size", schedule.micro_batch_size, f"{field}.schedule.micro_batch_size")
    yield KeyValue(f"{_RM}.max_model_len", origin.plan.facts.workload.max_tokens, "facts.workload")
    yield KeyValue(f"{_RM}.resources.num_nodes", nodes, "pools, that of reward_score")
    yield KeyValue(f"{_RM}.resources.gpus_per_node", per_node, "pools, that of reward_score")
    yield KeyValue(f"{_RM}.dtensor_cfg.tensor_parallel_size", layout.tp, f"{field}.layout.tp")


def _algorithm_settings(origin: ExportInput) -> Iterator[KeyValue]:
    ppo = origin.settings
    assert isinstance(ppo, PPO)
    yield KeyValue("policy.model_name", origin.path(Role.ACTOR), "job: models.actor.path")
    yield KeyValue("value.model_name", origin.path(Role.CRITIC), "job: models.critic.path")
    yield KeyValue("policy.megatron_cfg.optimizer.lr", ppo.actor_learning_rate, "job: ppo.actor_learning_rate")
    yield KeyValue("value.megatron_cfg.optimizer.lr", ppo.critic_learning_rate, "job: ppo.critic_learning_rate")
    yield KeyValue("ppo.adv_estimator.gae_lambda", ppo.gae_lambda, "job: ppo.gae_lambda")
    yield KeyValue("ppo.adv_estimator.gae_gamma", ppo.gamma, "job: ppo.gamma")
    yield KeyValue("ppo.skip_reference_policy_logprobs_calculation", False, "placements.ref_logprob")
    yield KeyValue("ppo.reward_shaping.enabled", False, "rule: async_ppo excludes it, and no stage of the plan does it")
    yield KeyValue("ppo.reward_scaling.enabled", False, "job: ppo.reward_scale")
    yield KeyValue("loss_fn.reference_policy_kl_penalty", ppo.kl_coefficient, "job: ppo.kl_coefficient")
    yield KeyValue("loss_fn.use_kl_in_reward", True, "placements.ref_logprob")
    yield KeyValue("loss_fn.ratio_clip_min", ppo.clip_ratio, "job: ppo.clip_ratio")
    yield KeyValue("loss_fn.ratio_clip_max", ppo.clip_ratio, "job: ppo.clip_ratio")
    yield KeyValue("value_loss_fn.cliprange", ppo.value_clip, "job: ppo.value_clip")
    yield KeyValue(f"{_G}.temperature", ppo.temperature, "job: ppo.temperature")


def _files(_origin: ExportInput, settings: Sequence[KeyValue]) -> Mapping[str, str]:
    head = (
        "NeMo-RL with this plan, from the root of its repository: copy config.yaml into examples/configs first,\n"
        "where the configuration that it builds on lies."
    )
    command = "uv run examples/run_ppo.py --config examples/configs/config.yaml"
    return {
        "run.sh": script(head, command, ()),
        "config.yaml": "defaults: ppo_math_1B_megatron.yaml\n" + nested_yaml(settings),
    }


NEMO_RL = OtherTrainer(
    name="nemo-rl",
    key_file="nemo_rl",
    engine="vllm",
    modes=deployment_modes,
    settings=settings,
    files=_files,
    remarks=(
        "the data set is that of ppo_math_1B_megatron.yaml; data.train and data.validation are yours to give.",
        "a dense clip of ratio_clip_c stays that of the configuration it builds on.",
    ),
)
