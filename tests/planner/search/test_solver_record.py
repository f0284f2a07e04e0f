"""What a plan says of its search: a proof only when every scope has one, and counts that add up."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.plan import SearchWork
from meshwright.planner.search.frontier import frontiers
from meshwright.planner.search.solver_record import solver_record, work_of
from meshwright.planner.solver.result import Effort, Limits
from tests.planner.jobs import ToyModel, small_facts


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
    assert found.asked_gap == gap


def test_the_work_is_that_of_all_stages() -> None:
    facts = small_facts(ranks_per_node=2, batch_size=4)
    costed = frontiers(facts, ToyModel(facts), ())
    whole, generation = work_of(costed, Effort(2, 0.5)), work_of(costed[:1], Effort())
    assert whole.timed > generation.timed > 0
    assert whole.weighed > generation.weighed > 0
    assert whole.generations == generation.generations > 0
    assert (whole.models, whole.deterministic_time, generation.models) == (2, 0.5, 0)
