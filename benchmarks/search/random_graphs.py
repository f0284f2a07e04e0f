"""Random jobs with graphs of stages of their own, so small that every choice and every order can be tried.

Two ranks, models of one or two layers, three to nine stages of which one to four train; a seed says which.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.planner.environment.rewards import RewardLoad
from meshwright.planner.plan.job import Facts, RoleModels
from meshwright.planner.plan.own_graph import OwnGraph, OwnStage
from meshwright.profiles.cluster import Cluster, Device, Link
from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import ENVIRONMENT, GENERATE, Role, Stage
from meshwright.profiles.workload import Workload

FEWEST_STAGES, MOST_STAGES, MOST_TRAINED = 3, 9, 4

_DRAWN = ("tokens", "prompt_lengths", "versions")
_BATCH = 8
_FREE = {3: 3, 4: 4, 5: 4, 6: 4, 7: 3, 8: 3, 9: 2}
"""By the number of stages, those that may be on any pool; the others are pinned to one."""


@dataclass(frozen=True, kw_only=True)
class RandomJob:
    """Facts, and pins that leave few choices."""

    seed: int
    facts: Facts
    pins: tuple[str, ...]


def random_job(seed: int, *, group_size: int = 1, best_of: int | None = None) -> RandomJob:
    """The job of a seed, with so many samples of a prompt, which may be the best of more."""
    draw = random.Random(f"{seed} {group_size}" + (f" of {best_of}" if best_of else ""))
    num_stages = FEWEST_STAGES + seed % (MOST_STAGES - FEWEST_STAGES + 1)
    graph = _filtered(draw, num_stages) if best_of else _graph(draw, num_stages)
    hosted = any(stage.kind == "environment" for stage in graph.stages)
    roles = dict.fromkeys(stage.role for stage in graph.stages if stage.role)
    facts = Facts(
        algorithm=graph,
        models=RoleModels(**{role.value: _model(draw, role) for role in roles}),
        cluster=_cluster(draw),
        precision="bf16",
        workload=Workload(
            batch_size=_BATCH,
            group_size=group_size,
            best_of=best_of,
            prompt=LengthSpec(max=64, fixed=64),
            response=LengthSpec(max=128, fixed=draw.choice((64, 128))),
        ),
        staleness=0 if best_of else int(draw.random() < 0.25),
        rewards=(_reward(draw),) if hosted else (),
    )
    return RandomJob(seed=seed, facts=facts, pins=tuple(_pins(draw, facts)))


def _graph(draw: random.Random, num_stages: int) -> OwnGraph:
    """A generation, others that read of what stands before them, and a stage for each role that is trained; what is
    written is read by some stage."""
    return _graph_of(draw, num_stages, [role for role in Role if role is not Role.ACTOR])


def _filtered(draw: random.Random, num_stages: int) -> OwnGraph:
    """The same with a reward model that scores all samples, and a filter that all others stand behind."""
    roles = [role for role in Role if role not in (Role.ACTOR, Role.REWARD)]
    generation, *others = _graph_of(draw, num_stages - 1, roles).stages
    hosted = [stage for stage in others if stage.kind == "environment"]
    score = OwnStage(name="reward_score", kind="inference", role=Role.REWARD, reads=("tokens",), writes=("scores",))
    scores = tuple(stage.writes[0] for stage in (score, *hosted))
    keep = OwnStage(name="keep_best", kind="filter", reads=scores, writes=("kept",))
    behind = (
        stage.model_copy(update={"reads": (*stage.reads, "kept"), "may_stream": False})
        for stage in others
        if stage not in hosted
    )
    return OwnGraph(stages=(generation, score, *hosted, keep, *behind))


def _graph_of(draw: random.Random, num_stages: int, roles: Sequence[Role]) -> OwnGraph:
    others = draw.sample(roles, len(roles))
    num_trained = draw.randint(1, min(MOST_TRAINED, num_stages - 1))
    trained, fixed = [Role.ACTOR, *others[: num_trained - 1]], others[num_trained - 1 :]
    num_between = num_stages - 1 - num_trained
    hosted = num_between > 0 and draw.random() < 0.4
    stages = [OwnStage(name=GENERATE, kind="generation", role=Role.ACTOR, writes=_DRAWN)]
    for number in range(num_between - hosted):
        role = fixed.pop() if fixed and draw.random() < 0.5 else draw.choice(trained)
        stages.append(_inference(draw, stages, role, number))
    if hosted:
        stages.append(
            OwnStage(name=ENVIRONMENT, kind="environment", reads=_DRAWN[:2], writes=("environment_scores",)),
        )
    written = [field for stage in stages[1:] for field in stage.writes]
    unread = {field for field in written if not any(field in stage.reads for stage in stages)}
    reads = {role: {field for field in written if draw.random() < 0.5} for role in trained}
    for field in sorted(unread):
        reads[draw.choice(trained)].add(field)
    stages += [
        OwnStage(name=f"{role}_train", kind="training", role=role, reads=("tokens", *sorted(reads[role])))
        for role in trained
    ]
    return OwnGraph(stages=tuple(stages))


def _inference(draw: random.Random, before: Sequence[OwnStage], role: Role, number: int) -> OwnStage:
    found = [field for stage in before[1:] for field in stage.writes if draw.random() < 0.3]
    return OwnStage(
        name=f"{role}_{number}",
        kind="inference",
        role=role,
        reads=("tokens", *found),
        writes=(f"field_{number}",),
        may_stream=not found and draw.random() < 0.5,
    )


def _model(draw: random.Random, role: Role) -> ModelSpec:
    hidden_size = draw.choice((64, 128))
    return ModelSpec(
        name=role.value,
        architecture="LlamaForCausalLM",
        num_layers=draw.choice((2, 4)),
        hidden_size=hidden_size,
        ffn_size=4 * hidden_size,
        num_heads=4,
        num_kv_heads=4,
        head_dim=hidden_size // 4,
        vocab_size=256,
        max_positions=512,
        tied_embeddings=False,
        activation="silu",
        norm_epsilon=1e-6,
        scalar_head=role in (Role.CRITIC, Role.REWARD),
    )


def _cluster(draw: random.Random) -> Cluster:
    link = Link(seconds=1e-5, bytes_per_second=draw.choice((1e8, 1e9, 1e10)))
    device = Device(
        name="made up",
        kind="cpu",
        memory_bytes=draw.choice((2**25, 2**26, 2**30)),
        memory_bytes_per_second=1e10,
        flops_per_second={"fp32": 1e11, "bf16": 2e11},
        launch_seconds=1e-6,
        source="made up to be tried whole",
    )
    return Cluster(
        nodes=1,
        ranks_per_node=2,
        device=device,
        intra_node=link,
        inter_node=link,
        host=link,
        host_memory_bytes=2**36,
    )


def _reward(draw: random.Random) -> RewardLoad:
    latency = LatencySpec(fixed=draw.choice((1e-4, 1e-2)))
    return RewardLoad(name="judge", is_remote=draw.random() < 0.5, batch_size=1, latency_seconds=latency)


def _pins(draw: random.Random, facts: Facts) -> Iterator[str]:
    """What is not tried: micro-batches and what is like them, and all pools but one of some stages."""
    stages = facts.graph.stages
    free = draw.sample(stages, min(len(stages), _FREE[len(stages) + len(facts.graph.hosted)]))
    for stage in stages:
        yield from _schedule_pins(stage)
        if stage not in free:
            pool = draw.choice(("0:1", "1:1", "0:2"))
            yield f"{stage.name}.pool={pool}"
            if pool == "0:2":
                yield f"{stage.name}.{draw.choice(('tp', 'dp', 'pp'))}=2"


def _schedule_pins(stage: Stage) -> Iterator[str]:
    if stage.generates:
        yield from (f"{stage.name}.{key}" for key in ("generation_slots=4", "batches_in_flight=1", "overcommit=0"))
        return
    yield f"{stage.name}.micro_batch_size=2"
    yield f"{stage.name}.offload=none"
    if stage.trains:
        yield f"{stage.name}.recompute=none"
