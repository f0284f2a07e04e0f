"""What a search costs is counted: no noise moves it, and it hardly grows with the number of ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.planner.compile import best_plan
from meshwright.planner.plan.job import Facts, read_job, resolve
from meshwright.planner.plan.plan import Plan, SearchWork
from meshwright.planner.search import parallel
from meshwright.profiles.cluster import Cluster
from tests.planner.jobs import ToyModel, small_facts

JOB = Path(__file__).parents[3] / "examples" / "7b-16xa100" / "job.yaml"


def scaled(num_ranks: int) -> Facts:
    """The job on so many ranks, its batch in proportion."""
    facts = resolve(read_job(JOB), JOB.parent)
    assert isinstance(facts.cluster, Cluster)
    cluster = facts.cluster.model_copy(update={"nodes": num_ranks // facts.cluster.ranks_per_node})
    batch_size = facts.workload.batch_size * num_ranks // facts.cluster.num_ranks
    workload = facts.workload.model_copy(update={"batch_size": batch_size})
    return facts.model_copy(update={"cluster": cluster, "workload": workload})


@cache
def work(num_ranks: int) -> SearchWork:
    """What planning the synchronous job takes, as its plan says."""
    facts = scaled(num_ranks)
    assert isinstance(facts.cluster, Cluster)
    plan = best_plan(facts, AnalyticModel(facts.cluster, facts.workload, facts.precision))
    assert isinstance(plan, Plan)
    return plan.solver.work


@pytest.mark.slow
def test_a_thousand_times_the_ranks_take_hardly_more_questions() -> None:
    few, many = work(64), work(16_384)
    assert few.timed <= 45_000
    assert few.weighed <= 28_000
    assert many.timed <= 1.8 * few.timed
    assert many.weighed <= 1.8 * few.weighed
    assert many.models <= 4 * few.models


def test_the_counts_do_not_depend_on_who_costs_what(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = small_facts(ranks_per_node=4, nodes=4, batch_size=16)

    def counted() -> SearchWork:
        plan = best_plan(facts, ToyModel(facts))
        assert isinstance(plan, Plan)
        return plan.solver.work

    shared = counted()
    monkeypatch.setattr(parallel, "_can_share", lambda: False)
    assert counted() == shared
    assert shared.timed >= shared.generations > 0
    assert shared.weighed > 0
    assert shared.models > 0
    assert shared.too_slow > 0


@pytest.mark.slow
def test_an_algorithm_with_fewer_stages_takes_fewer_questions() -> None:
    path = JOB.parents[1] / "grpo-7b-8xh100" / "job.yaml"
    facts = resolve(read_job(path), path.parent)
    assert isinstance(facts.cluster, Cluster)
    plan = best_plan(facts, AnalyticModel(facts.cluster, facts.workload, facts.precision))
    assert isinstance(plan, Plan)
    assert [placement.stage for placement in plan.placements] == list(facts.graph.names)
    assert len(plan.placements) == 5
    assert plan.solver.work.timed <= 4_000
    assert plan.solver.work.weighed <= 3_900
    assert plan.solver.work.models <= 8
