"""Quantities of a plan in the units of other trainers: nodes of a pool, token budgets, the engine's memory share."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.cost_models.cost import WEIGHTS
from meshwright.planner.export.trainer import KeyValue
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import unequal_layers_per_stage
from meshwright.profiles.stages import GENERATE

_MIN_SHARE, _MAX_SHARE = 0.1, 0.95


def pool_nodes(plan: Plan, stage: str) -> tuple[int, int]:
    """The nodes of a stage's pool, and the ranks on each."""
    ranks, per_node = plan.choice(stage, "pool"), plan.facts.cluster.ranks_per_node
    assert isinstance(ranks, Ranks)
    nodes = max(1, ranks.num_ranks // per_node)
    return nodes, ranks.num_ranks // nodes


def token_budget(plan: Plan, stage: str) -> int:
    """Tokens of a micro-batch per context-parallel rank: its token cap or, without one, its rows at the mean length,
    and at least one row of the longest."""
    placement, workload = plan.placement(stage), plan.facts.workload
    rows = placement.schedule.micro_batch_size
    if cap := placement.schedule.micro_batch_tokens:
        return math.ceil(cap / placement.layout.cp)
    return math.ceil(max(workload.max_tokens, rows * workload.mean_tokens) / placement.layout.cp)


def token_budget_origin(plan: Plan, stage: str) -> str:
    """The field of the plan that the token budget comes from."""
    field = "micro_batch_tokens" if plan.placement(stage).schedule.micro_batch_tokens else "micro_batch_size"
    return f"placements.{stage}.schedule.{field}"


def engine_memory_share(plan: Plan) -> float:
    """The fraction of a device's memory that generation's weights and KV cache take, rounded up to hundredths."""
    placement = plan.placement(GENERATE)
    device = plan.facts.cluster.parts[plan.part_of(GENERATE)].device
    weights = placement.resident.amount(WEIGHTS)
    share = math.ceil(100 * (weights + placement.transient.total) / device.memory_bytes) / 100
    return min(max(share, _MIN_SHARE), _MAX_SHARE)


def uneven_stage_layers(plan: Plan, stage: str) -> tuple[int, int] | None:
    """Layers of the first and the last pipeline stage; None where all stages have equally many."""
    layout, role = plan.placement(stage).layout, PPO_GRAPH.by_name[stage].role
    counts = unequal_layers_per_stage(plan.facts.models.spec(role), layout.pp)
    return (counts[0], counts[-1]) if counts else None


def megatron_degrees(plan: Plan, stage: str, prefix: str) -> Iterator[KeyValue]:
    """The degrees of a stage under Megatron's names, below a prefix."""
    layout, field = plan.placement(stage).layout, f"placements.{stage}.layout"
    yield KeyValue(f"{prefix}.tensor_model_parallel_size", layout.tp, f"{field}.tp")
    yield KeyValue(f"{prefix}.pipeline_model_parallel_size", layout.pp, f"{field}.pp")
    yield KeyValue(f"{prefix}.context_parallel_size", layout.cp, f"{field}.cp")
    yield KeyValue(f"{prefix}.sequence_parallel", layout.sp, f"{field}.sp")
    if plan.facts.models.spec(plan.graph.by_name[stage].role).experts:
        yield KeyValue(f"{prefix}.expert_model_parallel_size", layout.ep, f"{field}.ep")
        yield KeyValue(f"{prefix}.expert_tensor_parallel_size", layout.etp, f"{field}.etp")


def mini_batch(plan: Plan) -> int:
    """Sequences of one update."""
    return plan.facts.workload.batch_size // plan.facts.workload.num_minibatches


def prompts_of_mini_batch(plan: Plan) -> int:
    """Prompts of one update, at least one."""
    return max(1, plan.facts.workload.num_prompts // plan.facts.workload.num_minibatches)
