"""The memory of the ranks, as the plan counts it."""

from __future__ import annotations

import pytest

from meshwright.planner.report.resource_sections import memory, memory_of_ranks
from tests.planner.jobs import mixed_facts
from tests.planner.plans import random_plan
from tests.planner.report.pages import Outline, plan_of, titles
from tests.seeds import seeds


@seeds(3, all=10)
def test_the_memory_bars_are_the_plans_own_peaks(seed: int) -> None:
    plan = plan_of(seed)
    found = {rank: filling.peak_bytes for filling in memory_of_ranks(plan) for rank in filling.ranks}
    assert [found[rank] for rank in range(len(found))] == pytest.approx(plan.peak_bytes_per_rank, abs=1)


@seeds(2, all=5)
def test_every_rank_is_in_one_bar_and_ranks_of_one_bar_are_in_the_same_pools(seed: int) -> None:
    plan = plan_of(seed)
    ranks = [rank for filling in memory_of_ranks(plan) for rank in filling.ranks]
    assert sorted(ranks) == list(range(plan.facts.cluster.num_ranks))
    for filling in memory_of_ranks(plan):
        pools = {frozenset(p.name for p in plan.pools if rank in p.ranks) for rank in filling.ranks}
        stages = {frozenset(p.stage for p in plan.placements if p.pool in of) for of in pools}
        assert len(stages) == 1


def test_what_stays_is_told_and_the_most_that_a_stage_needs_besides() -> None:
    plan = plan_of(2)
    told = titles(memory(plan))
    for filling in memory_of_ranks(plan):
        assert all(any(text.startswith(f"{stage}, stays: ") for text in told) for stage, _ in filling.resident)
        assert filling.worst is None or any(text.startswith(f"{filling.worst.stage}, while it runs: ") for text in told)


def test_each_kind_of_device_has_its_own_limit() -> None:
    plan = random_plan(1, mixed_facts(memory_bytes=(2**50, 2**51)))
    outline = Outline(memory(plan))
    assert outline.attributes.count(("class", "limit")) == 2 * 2  # a line and its text
    text = " ".join(outline.text)
    assert "toy has" in text
    assert "fast toy has" in text
