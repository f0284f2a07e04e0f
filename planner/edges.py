"""What passes between stages within a step, how many bytes it is, and what handing it over costs."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost_models.cost import Cost
from meshwright.cost_models.question import CostModel
from meshwright.planner.job import Facts
from meshwright.profiles.stages import STAGE_EDGES
from meshwright.profiles.workload import Workload

_TOKEN_BYTES = {"tokens": 8}
"""Token ids travel as int64; every other field that has a value per token takes four bytes of it."""

_PER_SEQUENCE = {"scores": 4, "prompt_lengths": 8, "truncated": 1}
"""Fields with one value per sequence, and its bytes."""


@dataclass(frozen=True, kw_only=True)
class Handover:
    """Fields that a consumer needs from a producer; their cost is the same wherever the two run."""

    producer: str
    consumer: str
    fields: tuple[str, ...]
    num_bytes: float
    cost: Cost


def handovers(facts: Facts, model: CostModel) -> tuple[Handover, ...]:
    """Every edge of the step, by producer and consumer in the order of the stages."""
    found = []
    for producer, consumer, fields in STAGE_EDGES:
        num_bytes = sum(field_bytes(facts.workload, field) for field in fields)
        cost = model.handover_seconds(num_bytes)
        found.append(Handover(producer=producer, consumer=consumer, fields=fields, num_bytes=num_bytes, cost=cost))
    return tuple(found)


def field_bytes(workload: Workload, field: str) -> float:
    """Bytes of one field of a whole batch."""
    if field in _PER_SEQUENCE:
        return float(workload.batch_size * _PER_SEQUENCE[field])
    return workload.batch_size * workload.mean_tokens * _TOKEN_BYTES.get(field, 4)
