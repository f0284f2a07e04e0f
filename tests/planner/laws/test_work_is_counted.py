"""What a search costs is counted: no noise moves it, and it hardly grows with the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.cost import Cost, Memory
from meshwright.cost_models.question import Call
from meshwright.planner import compile as search
from meshwright.planner.plan.job import Facts, read_job, resolve
from meshwright.planner.plan.steps_ahead import patterns
from meshwright.planner.solver.result import Limits
from meshwright.profiles.cluster import Cluster

JOB = Path(__file__).parents[3] / "examples" / "7b-16xa100" / "job.yaml"


class Counting(AnalyticModel):
    """Counts the different questions that it is asked."""

    def __init__(self, facts: Facts) -> None:
        assert isinstance(facts.cluster, Cluster)
        super().__init__(facts.cluster, facts.workload, facts.precision)
        self.timed: set[Call] = set()
        self.weighed: set[Call] = set()

    def seconds(self, call: Call) -> Cost:
        self.timed.add(call)
        return super().seconds(call)

    def memory(self, call: Call) -> Memory:
        self.weighed.add(call)
        return super().memory(call)


def scaled(num_ranks: int) -> Facts:
    """The job on so many ranks, its batch in proportion."""
    facts = resolve(read_job(JOB), JOB.parent)
    assert isinstance(facts.cluster, Cluster)
    cluster = facts.cluster.model_copy(update={"nodes": num_ranks // facts.cluster.ranks_per_node})
    batch_size = facts.workload.batch_size * num_ranks // facts.cluster.num_ranks
    workload = facts.workload.model_copy(update={"batch_size": batch_size})
    return facts.model_copy(update={"cluster": cluster, "workload": workload})


def costed(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> tuple[int, int]:
    """How many questions of time and of memory the only scope of a synchronous job takes."""
    facts = scaled(num_ranks)
    model = Counting(facts)
    monkeypatch.setattr(search, "side_by_side", lambda work, items, **_: [work(item) for item in items])
    asked = search._Search(facts=facts, model=model, pins=(), ahead=patterns(0), limits=Limits(gap=0.01), progress=None)
    assert all(call.options for call in asked.formulate(asked.scopes[0]).formulation.problem.calls)
    return len(model.timed), len(model.weighed)


@pytest.mark.slow
def test_a_thousand_times_the_ranks_take_hardly_more_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, weighed = costed(monkeypatch, 64)
    assert timed <= 22_000
    assert weighed <= 15_000
    many_timed, many_weighed = costed(monkeypatch, 16_384)
    assert many_timed <= 1.6 * timed
    assert many_weighed <= 1.6 * weighed
