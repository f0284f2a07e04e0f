"""What passes between stages within a step, how many bytes it is, and what handing it over costs."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost_models.cost import Cost
from meshwright.cost_models.question import CostModel
from meshwright.cost_models.waves import sees_waves
from meshwright.planner.plan.host_workers import least_cost
from meshwright.planner.plan.job import Facts
from meshwright.profiles.stages import GENERATE, values_of
from meshwright.profiles.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Handover:
    """Fields that a consumer needs from a producer; their cost is the same wherever the two run."""

    producer: str
    consumer: str
    fields: tuple[str, ...]
    num_bytes: float
    cost: Cost


def handovers(facts: Facts, model: CostModel) -> tuple[Handover, ...]:
    """Every edge of the step, by producer and consumer in the order of the stages; those from the generation with what
    rewards on hosts keep their readers waiting at least. What scores the candidates is handed all of them, the other
    stages what is kept."""
    found = []
    for producer, consumer, fields in facts.graph.edges:
        workload = facts.workload.candidates if sees_waves(facts.graph.by_name[consumer]) else facts.workload
        num_bytes = sum(field_bytes(workload, field) for field in fields)
        cost = model.handover_seconds(num_bytes)
        if producer == GENERATE:
            cost += least_cost(facts, consumer)
        found.append(Handover(producer=producer, consumer=consumer, fields=fields, num_bytes=num_bytes, cost=cost))
    return tuple(found)


def field_bytes(workload: Workload, field: str) -> float:
    """Bytes of one field of a whole batch."""
    values = values_of(field)
    per_sequence = 1 if values.is_one else workload.mean_tokens
    return float(workload.batch_size * per_sequence * values.num_bytes)
