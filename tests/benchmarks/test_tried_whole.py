"""Random graphs of stages: the solver finds what trying everything finds, and a cost that differs is found out."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.search.random_graphs import FEWEST_STAGES, MOST_STAGES, MOST_TRAINED, random_job
from benchmarks.search.tried_whole import report, tried
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.protocol import (
    DelegatingCostModel,
    LayoutCosts,
    QueriedLayoutCosts,
    QueryLoop,
    RefitQuery,
    RefitTable,
    SecondsColumns,
    StageQuery,
)
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.profiles.choice_table import ChoiceTable
from meshwright.profiles.elementwise import FloatArray
from tests.seeds import cases, seeds


@dataclass(frozen=True)
class WithFault(DelegatingCostModel):
    """A cost model by which one stage, or every refit, takes a hundredth less."""

    less: str

    def seconds(self, query: StageQuery) -> Cost:
        found = super().seconds(query)
        return found.scaled(0.99) if query.stage.name == self.less else found

    def seconds_of_choices(self, query: StageQuery, choices: ChoiceTable) -> SecondsColumns:
        return QueryLoop.seconds_of_choices(self, query, choices)

    def seconds_of_refits(self, refits: RefitTable) -> FloatArray:
        return QueryLoop.seconds_of_refits(self, refits)

    def on_layout(self, query: StageQuery) -> LayoutCosts:
        return QueriedLayoutCosts(self, query)

    def refit_seconds(self, move: RefitQuery) -> Cost:
        found = super().refit_seconds(move)
        return found.scaled(0.99) if self.less == "refit" else found


@seeds(1, all=14)
def test_the_solver_finds_what_trying_everything_finds(seed: int) -> None:
    found = tried(random_job(seed))
    assert found.disagreements == ()
    assert found.num_choices > 0


@cases(("seed", "group_size"), [(0, 2), (1, 4), (2, 2), (3, 4)], few=1)
def test_it_does_so_with_several_samples_of_a_prompt(seed: int, group_size: int) -> None:
    assert tried(random_job(seed, group_size=group_size)).disagreements == ()


@cases(("seed", "group_size", "best_of"), [(0, 1, 3), (1, 2, 6), (2, 4, 8), (3, 2, 4), (4, 1, 3)], few=1)
def test_it_does_so_where_the_best_of_several_samples_are_kept(seed: int, group_size: int, best_of: int) -> None:
    job = random_job(seed, group_size=group_size, best_of=best_of)
    assert job.facts.workload.best_of == best_of
    found = tried(job)
    assert found.disagreements == ()
    assert found.num_choices > 0


@seeds(1, all=14)
def test_it_does_so_on_pools_of_any_number_of_nodes_with_stages_of_different_numbers_of_layers(seed: int) -> None:
    found = tried(random_job(seed, num_nodes=3))
    assert found.disagreements == ()
    assert found.num_choices > 0


@cases("less", ["actor_generate", "actor_train", "refit"], few=1)
def test_a_cost_that_differs_is_found_out(less: str) -> None:
    job = random_job(3)
    assert tried(job, WithFault(cost_model_of(job.facts), "nothing")).disagreements == ()
    said = tried(job, WithFault(cost_model_of(job.facts), less)).disagreements
    assert said[0].startswith("seed 3, ")
    assert "brute force" in said[0]


def test_the_jobs_are_of_all_kinds_and_the_same_every_time() -> None:
    jobs = [random_job(seed) for seed in range(300)]
    graphs = [job.facts.graph for job in jobs]
    sizes = range(FEWEST_STAGES, MOST_STAGES + 1)
    assert {len(graph.stages) + len(graph.host_stages) for graph in graphs} == set(sizes)
    assert {len(graph.train_stage) for graph in graphs} == set(range(1, MOST_TRAINED + 1))
    assert 60 < sum(bool(graph.host_stages) for graph in graphs) < 240
    assert 60 < sum(bool(graph.streaming) for graph in graphs) < 240
    assert len(set(graphs)) > 250
    assert jobs == [random_job(seed) for seed in range(300)]


def test_a_report_counts_those_that_agree_and_tells_the_others() -> None:
    job = random_job(1)
    good, bad = tried(job), tried(job, WithFault(cost_model_of(job.facts), "actor_train"))
    text = report({"one kind": [good, bad], "another": [good], "none": []}, "command")
    assert "| 2 of one kind | 1 | 0 |" in text
    assert "| 1 of another | 1 | 0 |" in text
    assert "of none" not in text
    assert f"- {bad.disagreements[0]}" in text
