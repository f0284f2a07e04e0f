"""RLHF steps: the best single layout where the plan is unpublished, and stated layouts.

A step is the sum of its stages on one pool, refits included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.lengths import cut_lognormal
from benchmarks.fidelity.rows import Row, Skip, count, number
from benchmarks.fidelity.score import Answer
from benchmarks.fidelity.shapes import model_named
from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.cost import Cost, Tally, total
from meshwright.cost_models.question import Call, Move
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import framework_named
from meshwright.profiles.layout import Layout, divisors
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model import ModelSpec
from meshwright.profiles.schedule import Recompute, Schedule
from meshwright.profiles.stages import STAGE_BY_NAME, Role
from meshwright.profiles.workload import Workload

_REAL_STAGES = ("actor_generate", "reward_score", "ref_logprob", "critic_value", "actor_train", "critic_train")
_REAL_MINIBATCHES = 8
"""Updates per step of the PPO experiments in the ReaL repository (examples/, ppo.ppo_n_minibatches)."""

_GRPO_STAGES = ("actor_logprob", "ref_logprob", "actor_train")
_PROMPT_TOKENS = 150
"""Mean prompt of the mathematics data of NeMo-RL's recipes, which their tables do not state."""

_MICRO_BATCHES = (1, 2, 4, 8, 16)
_TRAINED = {Role.ACTOR, Role.CRITIC}
_MEMORY_SHARE = 0.9
_CONFIG = re.compile(r"gen \[TP,PP\]=\[(\d+),(\d+)\] train \[TP,CP,EP,PP,VPP\]=\[([^\]]+)\]")
_NOTES = re.compile(r"\(samples generated\) (\d+), T-GBS (\d+), max seq (\d+)")


def real_heuristic(_stem: str, row: Row) -> Answer:
    """The quickest symmetric layout that fits, all models sharing all ranks."""
    cluster = cluster_of(row["gpu"], count(row, "num_gpus"))
    prompt, response = count(row, "prompt_len_tok"), count(row, "response_len_tok")
    workload = Workload(
        batch_size=count(row, "batch_prompts"),
        prompt=LengthSpec(max=prompt, fixed=prompt),
        response=LengthSpec(max=response, fixed=response),
        num_minibatches=_REAL_MINIBATCHES,
    )
    models = {
        Role.ACTOR: model_named(row["model_actor"]),
        Role.REF: model_named(row["model_ref"]),
        Role.CRITIC: replace(model_named(row["model_critic"]), scalar_head=True),
        Role.REWARD: replace(model_named(row["model_reward"]), scalar_head=True),
    }
    layouts = [_step_on(layout, models, workload, cluster) for layout in _layouts(cluster, workload.batch_size)]
    found = min((step for step in layouts if step), key=lambda step: step.cost.total, default=None)
    if found is None:
        raise Skip("no single layout fits in memory")
    label = f"{row['model_actor']} {row['model_critic']} x{cluster.num_ranks} {prompt}+{response} -> {found.layout}"
    return Answer(
        label=label, measured=number(row, "step_time_s"), predicted=found.cost.total, terms=found.cost.merged()
    )


class _Step(NamedTuple):
    layout: Layout
    cost: Cost


def _layouts(cluster: Cluster, batch_size: int) -> Iterator[Layout]:
    for tp in divisors(cluster.ranks_per_node):
        for pp in divisors(cluster.num_ranks // tp):
            dp = cluster.num_ranks // tp // pp
            if batch_size % (dp * _REAL_MINIBATCHES) == 0:
                yield Layout(tp=tp, pp=pp, dp=dp)


def _step_on(layout: Layout, models: dict[Role, ModelSpec], workload: Workload, cluster: Cluster) -> _Step | None:
    """All stages with the quickest micro-batch of each that fits beside what is resident; None when nothing does."""
    model = AnalyticModel(cluster, workload, "bf16", framework=framework_named("realhf"))
    stages = [_choices(name, layout, models, workload) for name in _REAL_STAGES]
    try:
        owners = [calls[0] for calls in stages if calls[0].stage.trains or calls[0].stage.role not in _TRAINED]
        resident = sum(model.memory(call).resident_bytes for call in owners)
        fitting = [[call for call in calls if _fits(model, call, resident, cluster)] for calls in stages]
        if not all(fitting):
            return None
        best = [min(map(model.seconds, calls), key=lambda cost: cost.total) for calls in fitting]
    except BadInput:
        return None
    return _Step(layout, total(best))


def _choices(name: str, layout: Layout, models: dict[Role, ModelSpec], workload: Workload) -> list[Call]:
    """One stage with each micro-batch; training recomputes, generation has a slot for every row."""
    stage, rows = STAGE_BY_NAME[name], -(-workload.batch_size // layout.dp)
    recompute = Recompute.FULL if stage.trains else Recompute.NONE
    slots = rows if stage.generates else 0
    schedules = (
        Schedule(micro_batch_size=size, recompute=recompute, generation_slots=slots)
        for size in _MICRO_BATCHES
        if size <= rows
    )
    return [Call(stage=stage, model=models[stage.role], layout=layout, schedule=schedule) for schedule in schedules]


def _fits(model: AnalyticModel, call: Call, resident: int, cluster: Cluster) -> bool:
    return resident + model.memory(call).transient.total < _MEMORY_SHARE * cluster.device.memory_bytes


def grpo_step(_stem: str, row: Row) -> Answer:
    """A synchronous step whose layouts are stated: generation, refit, two log-probabilities, updates."""
    if row["mode"] != "sync":
        raise Skip("asynchronous: how many ranks generate is not stated")
    cost = _grpo(row, count(row, "num_gpus"))
    label = f"{row['system']} {row['model_actor']} {row['gpu']} x{row['num_gpus']}"
    return Answer(label=label, measured=number(row, "step_time_s"), predicted=cost.total, terms=cost)


def _grpo(row: Row, num_ranks: int) -> Cost:
    """Terms by stage, one after the other on all ranks."""
    plan = _plan_of(row, num_ranks)
    cluster, tally = cluster_of(row["gpu"], num_ranks), Tally()
    engine = AnalyticModel(cluster, plan.workload, "bf16", framework=framework_named("vllm"))
    trainer = AnalyticModel(cluster, plan.workload, "bf16", framework=framework_named("megatron-core"))
    slots = min(-(-plan.workload.batch_size // plan.generation.dp), framework_named("vllm").max_rows)
    generate = Call(
        stage=STAGE_BY_NAME["actor_generate"],
        model=plan.model,
        layout=plan.generation,
        schedule=Schedule(generation_slots=slots),
    )
    tally.add("generation", engine.seconds(generate).total)
    for name in _GRPO_STAGES:
        schedule = Schedule(recompute=Recompute.FULL)
        asked = Call(stage=STAGE_BY_NAME[name], model=plan.model, layout=plan.training, schedule=schedule)
        tally.add(name.replace("_", " "), trainer.seconds(asked).total)
    move = Move(model=plan.model, source=plan.training, target=plan.generation, overlap=num_ranks)
    tally.add("refit", trainer.move_seconds(move).total)
    return tally.cost()


class _Plan(NamedTuple):
    model: ModelSpec
    workload: Workload
    generation: Layout
    training: Layout


def _plan_of(row: Row, num_ranks: int) -> _Plan:
    """The layouts that a row states in free text, and lengths that have its mean and its longest."""
    config, notes = _CONFIG.search(row["parallel_config"]), _NOTES.search(row["notes"])
    if config is None or notes is None:
        raise Skip("layouts not stated")
    if row["precision"].upper() != "BF16":
        raise Skip(f"precision {row['precision']} is not priced in training")
    degrees = [int(part) for part in config[3].split(",") if part.strip().isdigit()]
    tp, cp, ep, pp = degrees[0], degrees[1], degrees[2], degrees[-1] if len(degrees) > 4 else degrees[3]
    if cp > 1 or ep > 1:
        raise Skip("context or expert parallelism is not a layout here")
    gen_tp, gen_pp = int(config[1]), int(config[2])
    samples, batch, longest = int(notes[1]), int(notes[2]), int(notes[3])
    mean = float(row["response_len_tok"].split()[0]) - _PROMPT_TOKENS
    workload = Workload(
        batch_size=samples,
        prompt=LengthSpec(max=_PROMPT_TOKENS, fixed=_PROMPT_TOKENS),
        response=cut_lognormal(mean, longest - _PROMPT_TOKENS),
        num_minibatches=samples // batch,
    )
    return _Plan(
        model=model_named(row["model_actor"]),
        workload=workload,
        generation=Layout(tp=gen_tp, pp=gen_pp, dp=num_ranks // (gen_tp * gen_pp)),
        training=Layout(tp=tp, pp=pp, dp=num_ranks // (tp * pp), sp=tp > 1),
    )
