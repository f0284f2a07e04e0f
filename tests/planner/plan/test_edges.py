"""Every edge of a step hands over the bytes of its fields, at the cost model's price."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.cost_queries import field_bytes, stage_transfers
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.jobs import ToyModel, small_facts

FACTS = small_facts(batch_size=16, response=128)


@pytest.mark.parametrize(
    ("field", "num_bytes"),
    [("tokens", 16 * 192 * 8), ("ref_logprobs", 16 * 192 * 4), ("scores", 16 * 4), ("truncated", 16)],
)
def test_a_field_has_a_value_for_each_token_or_one_for_the_sequence(field: str, num_bytes: int) -> None:
    """16 sequences of 64 + 128 tokens."""
    assert field_bytes(FACTS.workload, field) == num_bytes


def test_every_edge_is_handed_over_once_with_all_of_its_fields() -> None:
    model = ToyModel(FACTS)
    found = stage_transfers(FACTS, model)
    assert [(h.producer, h.consumer, h.fields) for h in found] == list(PPO_GRAPH.edges)
    for handover in found:
        assert handover.num_bytes == sum(field_bytes(FACTS.workload, field) for field in handover.fields)
        assert handover.cost == model.transfer_seconds(handover.num_bytes)
