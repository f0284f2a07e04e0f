"""Random jobs with graphs of stages of their own, so small that every choice and every order can be tried.

Two ranks of a node, or three nodes of one rank; three to nine stages of which one to four train; a seed says which. On
three nodes pools are of any number of them, three replicas have uneven rows, and most pipelines stages of different
numbers of layers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.planner.job.custom_graph import OwnGraph, OwnStage
from meshwright.planner.job.job import Facts, RoleModels
from meshwright.planner.job.rewards_and_tools import RewardLoad
from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.hardware import Cluster, Device, Link
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import ENVIRONMENT, GENERATE, Role, Stage
from meshwright.profiles.workload import Workload

FEWEST_STAGES, MOST_STAGES, MOST_TRAINED = 3, 9, 4

_DRAWN = ("tokens", "prompt_lengths", "versions")
_BATCH = 8
_FREE = {3: 3, 4: 4, 5: 4, 6: 4, 7: 3, 8: 3, 9: 2}
"""By the number of stages, those that may be on any pool; the others are pinned to one."""

_LAYERS = {1: (2, 4), 3: (3, 4, 5, 7)}
"""Of a model, by the number of nodes."""

_POOLS = {1: ("0:1", "1:1", "0:2"), 3: ("0:1", "2:1", "0:2", "0:3")}
"""Those of stages that are pinned to one: of each two one lies in the other, or they are apart."""


@dataclass(frozen=True, kw_only=True)
class RandomJob:
    """Facts, and pins that leave few choices."""

    seed: int
    facts: Facts
    pins: tuple[str, ...]


def random_job(seed: int, *, group_size: int = 1, best_of: int | None = None, num_nodes: int = 1) -> RandomJob:
    """The job of a seed, with so many samples of a prompt, which may be the best of more, on one node or three."""
    told = (f" of {best_of}" if best_of else "") + (f" on {num_nodes}" if num_nodes > 1 else "")
    draw = random.Random(f"{seed} {group_size}{told}")
    num_stages = FEWEST_STAGES + seed % (MOST_STAGES - FEWEST_STAGES + 1)
    graph = _filtered(draw, num_stages) if best_of else _graph(draw, num_stages)
    hosted = any(stage.kind == "environment" for stage in graph.stages)
    roles = dict.fromkeys(stage.role for stage in graph.stages if stage.role)
    facts = Facts(
        algorithm=graph,
        models=RoleModels(**{role.value: _model(draw, role, num_nodes) for role in roles}),
        cluster=_cluster(draw, num_nodes),
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


def _model(draw: random.Random, role: Role, num_nodes: int) -> ModelSpec:
    hidden_size = draw.choice((64, 128))
    return ModelSpec(
        name=role.value,
        architecture="LlamaForCausalLM",
        num_layers=draw.choice(_LAYERS[num_nodes]),
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


def _cluster(draw: random.Random, num_nodes: int) -> Cluster:
    link = Link(seconds=1e-5, bytes_per_second=draw.choice((1e8, 1e9, 1e10)))
    device = Device(
        name="made up",
        kind="cpu",
        memory_bytes=draw.choice((2**26, 2**27, 2**30)),
        memory_bytes_per_second=1e10,
        flops_per_second={"fp32": 1e11, "bf16": 2e11},
        launch_seconds=1e-6,
        source="made up to be tried whole",
    )
    return Cluster(
        nodes=num_nodes,
        ranks_per_node=2 if num_nodes == 1 else 1,
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
    """What is not tried: micro-batches and what is like them, and all pools but one of some stages, one more of them
    where there are more pools."""
    stages, num_nodes = facts.graph.stages, sum(part.nodes for part in facts.cluster.parts)
    num_free = _FREE[len(stages) + len(facts.graph.host_stages)] - (num_nodes > 1)
    free = draw.sample(stages, min(len(stages), num_free))
    for stage in stages:
        place = () if stage in free else tuple(_place_pins(draw, stage, num_nodes))
        yield from _schedule_pins(stage, 3 if f"{stage.name}.dp=3" in place else 4)
        yield from place


def _place_pins(draw: random.Random, stage: Stage, num_nodes: int) -> Iterator[str]:
    pool = draw.choice(_POOLS[num_nodes])
    yield f"{stage.name}.pool={pool}"
    if (num_ranks := int(pool[-1])) > 1:
        axes = ("tp", "dp", "pp") if num_nodes == 1 else ("dp", "pp")
        yield f"{stage.name}.{draw.choice(axes)}={num_ranks}"


def _schedule_pins(stage: Stage, num_slots: int) -> Iterator[str]:
    if stage.generates:
        yield from (
            f"{stage.name}.{key}" for key in (f"generation_slots={num_slots}", "batches_in_flight=1", "overcommit=0")
        )
        return
    yield f"{stage.name}.micro_batch_size=2"
    yield f"{stage.name}.offload=none"
    if stage.trains:
        yield f"{stage.name}.recompute=none"
