"""The data transfers between stages within a step: their fields, bytes and costs."""

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
    """The transfer of fields from a producer to a consumer; its cost does not depend on where the two run."""

    producer: str
    consumer: str
    fields: tuple[str, ...]
    num_bytes: float
    cost: Cost


def handovers(facts: Facts, model: CostModel) -> tuple[Handover, ...]:
    """Return the transfers of a step, by producer and consumer in the order of the stages.

    Transfers from the generation include the least wait of the consumer for rewards on hosts. Stages that score
    candidates receive all of them, other stages only the samples that are kept.
    """
    transfers = []
    for producer, consumer, fields in facts.graph.edges:
        workload = facts.workload.candidates if sees_waves(facts.graph.by_name[consumer]) else facts.workload
        num_bytes = sum(field_bytes(workload, field) for field in fields)
        cost = model.handover_seconds(num_bytes)
        if producer == GENERATE:
            cost += least_cost(facts, consumer)
        transfers.append(Handover(producer=producer, consumer=consumer, fields=fields, num_bytes=num_bytes, cost=cost))
    return tuple(transfers)


def field_bytes(workload: Workload, field: str) -> float:
    """Bytes of one field for a whole batch."""
    values = values_of(field)
    per_sequence = 1 if values.is_one else workload.mean_tokens
    return float(workload.batch_size * per_sequence * values.num_bytes)
