"""Minibatches visit every row once an epoch, in an order that seed, step and epoch decide."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.runtime.training.training_batch import minibatches


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
