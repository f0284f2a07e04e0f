"""Every edge of a step hands over the bytes of its fields, at the cost model's price."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.cost_queries import field_bytes, stage_transfers
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.stages import GENERATE, KEPT_COUNTS, KEPT_TOKENS
from tests.planner.jobs import ToyModel, small_facts

FACTS = small_facts(batch_size=16, response=128)


@pytest.mark.parametrize(
    ("field", "num_bytes"),
    [("tokens", 16 * 192 * 8), ("ref_logprobs", 16 * 192 * 4), ("scores", 16 * 4), ("truncated", 16)],
)
def test_a_field_has_a_value_for_each_token_or_one_for_the_sequence(field: str, num_bytes: int) -> None:
    """16 sequences of 64 + 128 tokens."""
    assert field_bytes(FACTS.workload, field) == num_bytes


def test_sampling_masks_are_a_number_for_each_token_that_a_set_may_have_and_its_size_for_each_position() -> None:
    """16 sequences with 128 sampled tokens; sizes are of all 192 positions."""
    kept = FACTS.workload.model_copy(update={"kept_tokens": 50})
    assert field_bytes(kept, KEPT_TOKENS) == 16 * 128 * 50 * 4
    assert field_bytes(kept, KEPT_COUNTS) == 16 * 192 * 4


def test_a_larger_set_costs_more_bytes_between_the_stages_that_read_it_and_no_others() -> None:
    sizes = {}
    for kept_tokens in (0, 32, 64):
        workload = FACTS.workload.model_copy(update={"kept_tokens": kept_tokens})
        facts = FACTS.model_copy(update={"workload": workload})
        transfers = stage_transfers(facts, ToyModel(facts))
        sizes[kept_tokens] = {(one.producer, one.consumer): one.num_bytes for one in transfers}
    readers = {"ref_logprob", "actor_logprob", "actor_train"}
    assert sizes[0].keys() == sizes[32].keys() == sizes[64].keys()
    for (producer, consumer), num_bytes in sizes[0].items():
        grows = producer == GENERATE and consumer in readers
        assert (num_bytes < sizes[32][producer, consumer] < sizes[64][producer, consumer]) == grows
        assert grows or num_bytes == sizes[64][producer, consumer]


def test_every_edge_is_handed_over_once_with_all_of_its_fields() -> None:
    model = ToyModel(FACTS)
    found = stage_transfers(FACTS, model)
    assert [(h.producer, h.consumer, h.fields) for h in found] == list(PPO_GRAPH.edges)
    for handover in found:
        assert handover.num_bytes == sum(field_bytes(FACTS.workload, field) for field in handover.fields)
        assert handover.cost == model.transfer_seconds(handover.num_bytes)
