"""An interleaved pipeline is left out before it is costed only where it would have been left out behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.planner.plan.steps_ahead import search_cases, steps_ahead_patterns
from meshwright.planner.search.choice_costs import PlainPipeline
from meshwright.planner.search.frontiers import frontier
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from tests.planner.jobs import mixture_facts, small_facts

PLAIN = Layout(pp=2, dp=2)
CUT = replace(PLAIN, vpp=2)
ONE, TWO = Schedule(), Schedule(micro_batch_size=2)


class AskedEverything(AnalyticModel):
    """The same costs from a model that promises nothing of memory, so that every choice is costed."""

    memory_is_monotone = False


@pytest.mark.parametrize("name", ["actor_train", "critic_train"])
@pytest.mark.parametrize("memory_bytes", [2**22, 2**23, 2**30])
def test_what_is_left_out_before_it_is_costed_would_have_been_left_out(name: str, memory_bytes: int) -> None:
    facts = small_facts(memory_bytes=memory_bytes)
    scope = next(scope for scope in search_cases(steps_ahead_patterns(PPO_GRAPH, 0)[0], 0))
    found, whole = (
        frontier(
            facts, model(facts.cluster, facts.workload, facts.precision), PPO_GRAPH.by_name[name], (), search_case=scope
        )
        for model in (AnalyticModel, AskedEverything)
    )
    assert found.candidates == whole.candidates
    assert sum(found.rejected.values()) == sum(whole.rejected.values())
    assert memory_bytes < 2**30 or any(c.layout.vpp > 1 for kept in found.candidates.values() for c in kept)


@pytest.fixture
def beside() -> PlainPipeline:
    """One row at a time takes 5 s and 3 bytes, of which 2 stay; two at a time are too many."""
    found = PlainPipeline(small_facts().models.actor)
    found.record(PLAIN, ONE, (5.0, 5.0, 2.0, 3.0))
    found.record(PLAIN, TWO, "too large")
    return found


def test_it_is_too_large_where_the_plain_one_is_under_the_same_schedule(beside: PlainPipeline) -> None:
    assert beside.too_large(CUT, TWO) == "too large"
    assert beside.too_large(CUT, ONE) is None


def test_it_is_beaten_where_a_plain_one_is_no_slower(beside: PlainPipeline) -> None:
    assert beside.dominates(CUT, ONE, 5.0)
    assert not beside.dominates(CUT, ONE, 4.9)
    assert not beside.dominates(CUT, TWO, 9.0)


def test_only_the_same_pipeline_is_beside_it(beside: PlainPipeline) -> None:
    other = Layout(pp=4, vpp=2)
    assert beside.too_large(other, TWO) is None
    assert not beside.dominates(other, ONE, 9.0)
    beside.record(replace(other, vpp=1), ONE, (7.0, 7.0, 1.0, 1.0))
    assert beside.too_large(CUT, TWO) is None
    assert beside.dominates(other, ONE, 7.0)


def test_layers_that_differ_promise_nothing() -> None:
    """Dense layers in front of layers of experts are dealt more evenly to more chunks."""
    model = mixture_facts(small_facts()).models.actor
    assert model.experts is not None
    for num_dense, applies in ((0, True), (1, False)):
        mixed = replace(model, experts=replace(model.experts, num_dense_layers=num_dense))
        found = PlainPipeline(mixed)
        found.record(PLAIN, TWO, "too large")
        assert (found.too_large(CUT, TWO) is not None) == applies
