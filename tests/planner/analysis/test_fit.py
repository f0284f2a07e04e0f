"""How many ranks a job needs: the least is one that has a plan and the one below has none; each size is planned."""

from __future__ import annotations

import pytest

from meshwright.planner.analysis.cluster_sizing import fit
from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.job.whatif_settings import with_setting
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import BadInput
from tests.planner.jobs import ToyModel, small_facts
from tests.seeds import cases


def fits_on(facts: Facts, nodes: int) -> bool:
    there = with_setting(facts, {"cluster.nodes": nodes})
    return isinstance(best_plan(there, ToyModel(there)), Plan)


@cases("memory_bytes", [6_000_000, 8_000_000, 10_000_000], few=1)
def test_the_least_number_of_nodes_fits_and_one_node_less_does_not(memory_bytes: int) -> None:
    facts = small_facts(nodes=1, ranks_per_node=1, batch_size=12, memory_bytes=memory_bytes)
    found = fit(facts, ToyModel, sizes=(4,))
    assert found.min_ranks is not None
    assert found.min_ranks > 1
    assert fits_on(facts, found.min_ranks)
    assert not fits_on(facts, found.min_ranks - 1)


def test_a_part_of_a_node_may_be_enough_and_doublings_are_planned() -> None:
    facts = small_facts(ranks_per_node=4, batch_size=8, memory_bytes=2**40)
    found = fit(facts, ToyModel, price=2.0)
    assert found.min_ranks == 1
    assert [point.num_ranks for point in found.points] == [1, 2, 4, 8]
    seconds = [point.metrics.step_seconds for point in found.points if point.metrics]
    assert seconds == sorted(seconds, reverse=True)
    assert all(point.metrics and point.metrics.money for point in found.points)
    assert found.answers is not None
    assert len(found.answers.answers) == 4


def test_a_job_that_fits_nowhere_has_no_least() -> None:
    found = fit(small_facts(ranks_per_node=1, batch_size=4, memory_bytes=2**10), ToyModel)
    assert (found.min_ranks, found.points, found.answers) == (None, (), None)
    assert found.max_ranks == 16


def test_a_size_that_is_no_number_of_nodes_is_refused_before_anything_is_planned() -> None:
    with pytest.raises(BadInput, match="6 is not a number of whole nodes of 4 ranks"):
        fit(small_facts(), ToyModel, sizes=(6,))


def test_progress_is_told_of_both_searches() -> None:
    told: list[str] = []
    facts = small_facts(ranks_per_node=1, batch_size=4, memory_bytes=2**40)
    fit(facts, ToyModel, sizes=(1,), progress=lambda what, _done, _total: told.append(what))
    assert dict.fromkeys(told) == dict.fromkeys(["searching for the smallest size", "planning sizes"])
