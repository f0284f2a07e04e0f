"""A typo in a job, a plan or a what-if is refused before it takes the machine."""

from __future__ import annotations

import pytest

from meshwright.planner.job.limits import position_violations, require_within_limits
from meshwright.planner.job.whatif_settings import with_setting
from meshwright.profiles.errors import BadInput
from tests.planner.jobs import small_facts


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("workload.batch_size", 2**30),
        ("workload.num_epochs", 10**6),
        ("workload.response.max", 2**40),
        ("workload.prompt.max", 2**40),
        ("cluster.nodes", 10**8),
        ("cluster.ranks_per_node", 10**6),
        ("cluster.host_memory_bytes", 2**80),
        ("cluster.device.memory_bytes", 2**80),
        ("cluster.device.memory_bytes_per_second", 1e-300),
        ("cluster.device.launch_seconds", 1e300),
        ("cluster.device.flops_per_second", {"fp32": -1.0, "bf16": 1e12}),
        ("cluster.inter_node.bytes_per_second", 1e-300),
        ("cluster.intra_node.seconds", 1e9),
        ("models.actor.num_layers", 10**9),
        ("models.reward.vocab_size", 10**12),
        ("models.critic.hidden_size", 10**12),
    ],
)
def test_a_number_beyond_all_use_is_refused_by_its_name(field: str, value: object) -> None:
    facts = small_facts(ranks_per_node=2, batch_size=4, memory_bytes=2**34)
    with pytest.raises(BadInput, match=field.rpartition(".")[2]) as error:
        with_setting(facts, {field: value})
    assert "\n" not in str(error.value)


def test_as_many_ranks_as_anybody_has_are_possible() -> None:
    facts = small_facts(ranks_per_node=8, batch_size=4, memory_bytes=2**34)
    assert with_setting(facts, {"cluster.nodes": 2**17}).cluster.num_ranks == 2**20
    with pytest.raises(BadInput, match="2097152 ranks, above the limit of 1048576"):
        with_setting(facts, {"cluster.nodes": 2**17, "cluster.ranks_per_node": 16})


def test_a_batch_of_many_rows_for_each_of_many_ranks_is_possible() -> None:
    facts = small_facts(ranks_per_node=8, batch_size=4, memory_bytes=2**34)
    assert with_setting(facts, {"cluster.nodes": 2**14, "workload.batch_size": 64 * 2**17}).cluster.num_ranks == 2**17


def test_what_is_beyond_all_use_is_told_with_whose_number_it_is() -> None:
    facts = small_facts()
    require_within_limits(facts.models.by_name, facts.cluster, facts.workload, "job")
    huge = facts.cluster.model_copy(update={"host_memory_bytes": 2**61})
    with pytest.raises(BadInput, match=f"job: cluster.host_memory_bytes={2**61} is above the limit of {2**60}"):
        require_within_limits(facts.models.by_name, huge, facts.workload, "job")


@pytest.mark.parametrize(("response", "way"), [(448, ()), (449, ("response.max to 448",))])
def test_sequences_end_within_the_positions_of_every_model(response: int, way: tuple[str, ...]) -> None:
    """512 positions, of which prompts take 64."""
    facts = small_facts(response=response)
    found = position_violations(facts.models.by_name, facts.workload)
    assert len(found) == len(way)
    assert all(part in sentence for part, sentence in zip(way, found, strict=True))
