"""The data transfers between stages within a step: their fields, bytes and costs."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost_models.cost import Cost
from meshwright.cost_models.question import CostModel
from meshwright.cost_models.waves import processes_all_samples
from meshwright.planner.plan.host_workers import min_reward_wait
from meshwright.planner.plan.job import Facts
from meshwright.profiles.stages import GENERATE, field_type
from meshwright.profiles.workload import Workload


@dataclass(frozen=True, kw_only=True)
class StageTransfer:
    """The transfer of fields from a producer to a consumer; its cost does not depend on where the two run."""

    producer: str
    consumer: str
    fields: tuple[str, ...]
    num_bytes: float
    cost: Cost


def stage_transfers(facts: Facts, model: CostModel) -> tuple[StageTransfer, ...]:
    """Return the transfers of a step, by producer and consumer in the order of the stages.

    Transfers from the generation include the least wait of the consumer for rewards on hosts. Stages that score
    candidates receive all of them, other stages only the samples that are kept.
    """
    transfers = []
    for producer, consumer, fields in facts.graph.edges:
        workload = facts.workload.candidates if processes_all_samples(facts.graph.by_name[consumer]) else facts.workload
        num_bytes = sum(field_bytes(workload, field) for field in fields)
        cost = model.transfer_seconds(num_bytes)
        if producer == GENERATE:
            cost += min_reward_wait(facts, consumer)
        transfers.append(
            StageTransfer(producer=producer, consumer=consumer, fields=fields, num_bytes=num_bytes, cost=cost)
        )
    return tuple(transfers)


def field_bytes(workload: Workload, field: str) -> float:
    """Bytes of one field for a whole batch."""
    values = field_type(field)
    per_sequence = 1 if values.per_sequence else workload.mean_tokens
    return float(workload.batch_size * per_sequence * values.num_bytes)
