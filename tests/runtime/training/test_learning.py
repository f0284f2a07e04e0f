"""Minibatches visit every row once an epoch; memory is measured at its peak."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.runtime.device import used_memory
from meshwright.runtime.training.learning import minibatches


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


def test_pages_of_a_file_do_not_count(tmp_path: Path) -> None:
    path, num_bytes = tmp_path / "library", 200 * 2**20
    path.write_bytes(bytes(num_bytes))
    before = used_memory.reset_peak()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[:: mmap.PAGESIZE]) == 0
        assert abs(used_memory.bytes_in_use() - before) < num_bytes / 4
        assert abs(used_memory.peak_bytes() - before) < num_bytes / 4


def test_a_large_allocation_shows_in_the_peak_and_is_forgotten_by_a_reset() -> None:
    num_bytes = 200 * 2**20
    before = used_memory.reset_peak()
    block = torch.ones(num_bytes // 4)
    del block
    assert used_memory.peak_bytes() - before > 0.9 * num_bytes
    used_memory.reset_peak()
    assert used_memory.peak_bytes() - before < 0.5 * num_bytes
