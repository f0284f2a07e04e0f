"""The best law of a family: it meets rows that follow one, and says by how much others contradict all of them."""

import statistics

import pytest

from benchmarks.fidelity.ceiling import Iteration, ceiling, measured_again


def iteration(size: int, *, pp: int = 4, dp: int = 2) -> Iteration:
    """Eight layers whose time grows slower than the micro-batch, 0.2 s in each slot, and 3 s in the update."""
    num_batches = 48 // size
    layer = 0.1 + 0.3 * size
    measured = (num_batches + pp - 1) * (8 / pp * layer + 0.2) + 3.0
    return Iteration("8x64", 8, 2, pp, dp, size, num_batches, measured)


def test_rows_that_follow_a_law_are_met() -> None:
    rows = [iteration(size, pp=pp) for size in (1, 2, 4) for pp in (2, 4)]
    found = ceiling(rows)
    assert found.mean == pytest.approx(0, abs=1e-6)
    assert found.spearman == pytest.approx(1)
    assert found.regret == pytest.approx(0)


def test_sequences_that_take_longer_in_larger_micro_batches_follow_no_law() -> None:
    honest = [iteration(size, pp=pp) for size in (1, 2, 4) for pp in (2, 4)]
    late = [row._replace(measured=row.measured * (1.5 if row.micro_batch_size == 4 else 1)) for row in honest]
    found = ceiling(late)
    assert 0.01 < found.mean < 0.25


def test_a_second_measurement_differs_from_the_first_by_what_is_said() -> None:
    rows = [iteration(size, pp=pp, dp=dp) for size in (1, 2, 4) for pp in (2, 4) for dp in range(1, 9)]
    same, apart = measured_again(rows, 0.0, seed=0), [measured_again(rows, 0.06, seed) for seed in range(50)]
    assert (same.mean, same.regret, same.spearman) == (0, 0, pytest.approx(1))
    assert statistics.fmean(score.mean for score in apart) == pytest.approx(0.06, rel=0.05)
    assert all(score.spearman < 1 for score in apart)
