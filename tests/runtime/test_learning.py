"""Minibatches visit every row once an epoch; memory is measured at its peak."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.job import PPO
from meshwright.runtime import memory
from meshwright.runtime.batch import Batch
from meshwright.runtime.learning import Learning, minibatches


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3))
def test_every_epoch_visits_every_row_once(num_epochs: int, num_minibatches: int, size: int, step: int) -> None:
    rows = tuple(range(size * num_minibatches))
    found = list(minibatches(rows, step=step, num_epochs=num_epochs, num_minibatches=num_minibatches, seed=0))
    assert len(found) == num_epochs * num_minibatches
    for epoch in range(num_epochs):
        part = found[epoch * num_minibatches : (epoch + 1) * num_minibatches]
        assert sorted(row for minibatch in part for row in minibatch) == list(rows)


def test_the_order_depends_on_seed_step_and_epoch() -> None:
    def order(seed: int, step: int) -> list[list[int]]:
        return list(minibatches(tuple(range(16)), step=step, num_epochs=2, num_minibatches=2, seed=seed))

    assert order(0, 0) == order(0, 0)
    assert len({str(order(seed, step)) for seed in range(2) for step in range(2)}) == 4
    assert order(0, 0)[:2] != order(0, 0)[2:]


def test_the_generator_is_compared_with_the_trainer_on_tokens_of_the_same_weights() -> None:
    batch = Batch(step=3, rows=range(3))
    for row, (first, then, apart) in enumerate([(3, 3, 0.25), (2, 2, 9.0), (2, 3, 9.0)]):
        proximal = torch.tensor([0.0, -1.0, -2.0, 0.0])
        fields = {
            "tokens": torch.tensor([5, 6, 7, 8]),
            "prompt_lengths": torch.tensor([2]),
            "truncated": torch.zeros(1, dtype=torch.uint8),
            "versions": torch.tensor([0, first, then, 0], dtype=torch.int32),
            "behaviour_logprobs": proximal + torch.tensor([0.0, apart, 0.0, 0.0]),
            "proximal_logprobs": proximal,
            "ref_logprobs": proximal,
            "values": torch.zeros(4),
            "scores": torch.ones(1),
        }
        for field, values in fields.items():
            batch.experience.put(field, row, values)
    metrics = Learning(PPO(), batch, max_staleness=1).metrics()
    assert (metrics["generator_gap"], metrics["max_generator_gap"]) == (0.125, 0.25)
    assert metrics["max_staleness"] == 1
    for row in batch.rows:
        batch.experience.put("versions", row, torch.full((4,), 2, dtype=torch.int32))
    assert "generator_gap" not in Learning(PPO(), batch, max_staleness=1).metrics()


def test_pages_of_a_file_do_not_count(tmp_path: Path) -> None:
    path, num_bytes = tmp_path / "library", 200 * 2**20
    path.write_bytes(bytes(num_bytes))
    before = memory.reset_peak()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[:: mmap.PAGESIZE]) == 0
        assert abs(memory.bytes_in_use() - before) < num_bytes / 4
        assert abs(memory.peak_bytes() - before) < num_bytes / 4


def test_a_large_allocation_shows_in_the_peak_and_is_forgotten_by_a_reset() -> None:
    num_bytes = 200 * 2**20
    before = memory.reset_peak()
    block = torch.ones(num_bytes // 4)
    del block
    assert memory.peak_bytes() - before > 0.9 * num_bytes
    memory.reset_peak()
    assert memory.peak_bytes() - before < 0.5 * num_bytes
