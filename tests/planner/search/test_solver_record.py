"""What a plan says of its search: a proof only when every scope has one, and counts that add up."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.plan import SearchWork
from meshwright.planner.search.frontiers import frontiers
from meshwright.planner.search.search_case import count_work, solver_record, with_gap
from meshwright.planner.solver.result import Effort, Limits
from tests.planner.jobs import ToyModel, small_facts
from tests.runtime.cli.test_report_command import small_plan


@pytest.mark.parametrize(
    ("statuses", "is_whole", "gap", "told"),
    [
        ({"optimal"}, True, 0.0, "optimal"),
        ({"optimal"}, False, 0.0, "feasible"),
        ({"optimal", "infeasible", "beaten"}, True, 0.0, "optimal"),
        ({"optimal", "beaten"}, True, 0.01, "feasible"),
        ({"optimal", "feasible"}, True, 0.0, "feasible"),
    ],
)
def test_a_plan_is_proven_when_every_scope_is(statuses: set[str], is_whole: bool, gap: float, told: str) -> None:
    limits = Limits(gap=gap)
    found = solver_record(limits, is_whole=is_whole, statuses=statuses, bound_seconds=1.0, work=SearchWork())
    assert found.status == told
    assert found.requested_gap == gap


@pytest.mark.parametrize(("asked", "status"), [(0.0, "feasible"), (0.01, "feasible"), (0.25, "optimal")])
def test_a_plan_that_takes_longer_than_was_searched_with_is_not_proven(asked: float, status: str) -> None:
    """As one does whose ticks were coarse, or that rewards keep waiting."""
    plan = small_plan(0)
    bound, limits = 0.8 * plan.period_seconds, Limits(gap=asked)
    found = solver_record(limits, is_whole=True, statuses={"optimal"}, bound_seconds=bound, work=SearchWork())
    assert with_gap(plan.model_copy(update={"solver": found})).solver.status == status


def test_the_work_is_that_of_all_stages() -> None:
    facts = small_facts(ranks_per_node=2, batch_size=4)
    costed = frontiers(facts, ToyModel(facts), ())
    whole, generation = count_work(costed, Effort(2, 0.5)), count_work(costed[:1], Effort())
    assert whole.num_time_costs > generation.num_time_costs > 0
    assert whole.num_memory_costs > generation.num_memory_costs > 0
    assert whole.num_generations == generation.num_generations > 0
    assert (whole.num_models, whole.deterministic_time, generation.num_models) == (2, 0.5, 0)
