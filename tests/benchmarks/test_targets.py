"""The benchmark of targets asks of a training stage what a run does, of lengths as the job draws them."""

from __future__ import annotations

import pytest

from benchmarks.costs.targets import RESPONSES, batch_of, target_seconds


@pytest.mark.parametrize("name", RESPONSES)
def test_targets_are_computed_of_a_batch_of_drawn_lengths(name: str) -> None:
    batch, workload = batch_of(16, RESPONSES[name])
    lengths = batch.lengths()
    assert list(lengths) == list(range(16))
    assert len(set(lengths.values())) > 8
    assert max(lengths.values()) <= workload.max_tokens
    assert target_seconds(batch, workload) > 0
