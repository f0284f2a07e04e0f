"""What a search costs is counted: no noise moves it, and it hardly grows with the number of ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.protocol import DelegatingCostModel, LayoutCosts, QueriedLayoutCosts, StageQuery
from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan, SearchWork
from meshwright.planner.plan.steps_ahead import search_cases, steps_ahead_patterns
from meshwright.planner.proof.checker import all_search_cases
from meshwright.planner.proof.prover import prove
from meshwright.planner.proof.space import Enumeration
from meshwright.planner.search import parallel
from meshwright.planner.solver.result import Limits
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.stages import GENERATE
from tests.planner.jobs import ToyModel, small_facts
from tests.seeds import cases

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


@pytest.mark.check_all
def test_256_times_the_ranks_have_about_twice_as_many_choices_to_cost() -> None:
    few, many = work(64), work(16_384)
    assert few.num_time_costs <= 80_000
    assert few.num_memory_costs <= 54_000
    assert many.num_time_costs <= 2.2 * few.num_time_costs
    assert many.num_memory_costs <= 1.8 * few.num_memory_costs
    assert many.num_models <= 4 * few.num_models


def test_the_counts_do_not_depend_on_who_costs_what(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = small_facts(ranks_per_node=4, nodes=4, batch_size=16)

    def counted() -> SearchWork:
        plan = best_plan(facts, ToyModel(facts))
        assert isinstance(plan, Plan)
        return plan.solver.work

    shared = counted()
    monkeypatch.setattr(parallel, "_can_share", lambda: False)
    assert counted() == shared
    assert shared.num_time_costs >= shared.num_generations > 0
    assert shared.num_memory_costs > 0
    assert shared.num_models > 0
    assert shared.num_too_slow > 0


@pytest.mark.slow
def test_an_algorithm_with_fewer_stages_takes_fewer_questions() -> None:
    path = JOB.parents[1] / "grpo-7b-8xh100" / "job.yaml"
    facts = resolve(read_job(path), path.parent)
    assert isinstance(facts.cluster, Cluster)
    plan = best_plan(facts, AnalyticModel(facts.cluster, facts.workload, facts.precision))
    assert isinstance(plan, Plan)
    assert [placement.stage for placement in plan.placements] == list(facts.graph.names)
    assert len(plan.placements) == 5
    assert plan.solver.work.num_time_costs <= 11_500
    assert plan.solver.work.num_memory_costs <= 11_500
    assert plan.solver.work.num_models <= 10


@pytest.mark.check_all
def test_few_of_the_turns_that_experts_may_generate_in_are_played() -> None:
    path = JOB.parents[1] / "moe-16384" / "job.yaml"
    plan = best_plan(facts := resolve(read_job(path), path.parent), cost_model_of(facts), limits=Limits(gap=0.03))
    assert isinstance(plan, Plan)
    assert plan.solver.work.num_generations <= 400
    assert plan.solver.work.num_time_costs <= 15_000


@pytest.mark.slow
@cases(("job", "most_units"), [("mixed-32", 1.3), ("13b-70b-128", 5.6), ("70b-64xh100", 2.0)], few=1)
def test_to_prove_that_an_answer_is_within_the_gap_takes_little_work(job: str, most_units: float) -> None:
    """Also where the best plan takes hardly more seconds than a round of the search has aimed at."""
    path = JOB.parents[1] / job / "job.yaml"
    plan = best_plan(facts := resolve(read_job(path), path.parent), cost_model_of(facts))
    assert isinstance(plan, Plan)
    assert plan.solver.gap is not None
    assert plan.solver.gap <= 0.01
    assert 0 < plan.solver.work.deterministic_time <= most_units


@dataclass(frozen=True)
class Counted(DelegatingCostModel):
    """A cost model that notes of which stages it is asked for seconds of choices, other than for what they stream."""

    asked: Counter[str] = field(default_factory=Counter)

    def seconds(self, query: StageQuery) -> Cost:
        self.asked[query.stage.name] += 1
        return super().seconds(query)

    def on_layout(self, query: StageQuery) -> LayoutCosts:
        return QueriedLayoutCosts(self, query)


@pytest.mark.slow
@cases(
    ("job", "most_seconds", "most_turns", "most_choices"),
    [("7b-16xa100", 137.56, 90, 14_000), ("70b-64xh100", 29.23, 110, 72_000), ("405b-1024", 199.80, 110, 96_000)],
    few=1,
)
def test_a_checker_plays_few_turns(job: str, most_seconds: float, most_turns: int, most_choices: int) -> None:
    """The seconds are those of the best plan that is known."""
    path = JOB.parents[1] / job / "job.yaml"
    facts = resolve(read_job(path), path.parent)
    model = Counted(cost_model_of(facts))
    every = [
        scope
        for ahead in steps_ahead_patterns(facts.graph, facts.staleness)
        for scope in search_cases(ahead, facts.staleness)
    ]
    found = Enumeration(facts, model, most_seconds).spaces(every)
    assert all(len(space.choices[GENERATE].site) for space in found)
    assert 0 < model.asked[GENERATE] <= most_turns
    assert model.asked.total() <= most_choices


@pytest.mark.slow
def test_a_proof_costs_no_choice_twice() -> None:
    """The choices of the shorter periods that it states are among those in which it was found."""
    facts = small_facts(ranks_per_node=2, batch_size=4)
    plan = best_plan(facts, ToyModel(facts))
    assert isinstance(plan, Plan)
    asked: list[int] = []
    for max_splits in (0, 64):
        model = Counted(ToyModel(facts))
        prove(plan, model, max_splits=max_splits)
        asked.append(model.asked.total())
    once = Counted(ToyModel(facts))
    Enumeration(facts, once, plan.period_seconds).spaces(all_search_cases(plan))
    assert asked == [once.asked.total()] * 2
    assert once.asked.total() > 0
