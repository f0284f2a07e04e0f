"""Random jobs with rewards on hosts reach the gap that was asked, and no pinned plan is faster than their bound."""

from __future__ import annotations

import math

import pytest

from benchmarks.search.pinned_rewards import facts_of, tried
from tests.planner.jobs import small_facts
from tests.seeds import seeds


@pytest.mark.slow
@seeds(1, all=3)
def test_a_random_job_reaches_its_gap_and_no_pin_beats_its_bound(seed: int) -> None:
    found = tried(seed, facts_of(seed, small_facts(batch_size=64)), 4, math.inf)
    assert found.gap <= found.requested_gap
    assert (found.num_pins, found.faster) == (4, ())


def test_jobs_differ_in_their_staleness_and_their_rewards() -> None:
    jobs = [facts_of(seed, small_facts(batch_size=64)) for seed in range(30)]
    assert {job.staleness for job in jobs} == {0, 1, 2}
    assert {len(job.rewards) for job in jobs} == {1, 2}
    assert len({job.rewards for job in jobs}) == len(jobs)
