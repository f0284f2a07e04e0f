"""Rounds and prefills are looked up on a grid that the cost model was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost_models.protocol import DelegatingCostModel, StageQuery
from meshwright.planner.plan.cost_queries import Choice, query_for_choice
from meshwright.planner.simulation.simulated_flight import Grid, round_times
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.workload import Workload
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts


def test_a_grid_is_linear_between_its_points_and_constant_beyond() -> None:
    grid = Grid(np.array([1.0, 3.0]), np.array([10.0, 20.0]), np.array([[0.0, 10.0], [2.0, 12.0]]))
    found = grid(np.array([1.0, 2.0, 3.0, 9.0]), np.array([15.0, 10.0, 20.0, 99.0]))
    assert found.tolist() == [5.0, 1.0, 12.0, 12.0]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, dp=2), Layout(pp=2, dp=2)], ids=str)
def test_a_prefill_and_its_rounds_add_up_to_what_the_model_says_of_equal_rows(layout: Layout) -> None:
    """Four rows of 40 tokens on each replica that draw 9: a prefill, and eight rounds with 40 to 48 tokens cached."""
    facts, stage = small_facts(), PPO_GRAPH.by_name["actor_generate"]
    call = query_for_choice(facts, stage, Choice(layout, Schedule(generation_slots=4)), deferral=0)
    times = round_times(facts, call, model_of)
    prompt, response = (LengthSpec(max=tokens, fixed=tokens) for tokens in (40, 9))
    asked = facts.model_copy(update={"workload": Workload(batch_size=4 * layout.dp, prompt=prompt, response=response)})
    rows = np.full(8, 4.0)
    found = times.prefill(rows[:1], np.array([40.0])).sum() + times.round_(rows, np.arange(40.0, 48.0)).sum()
    assert found == pytest.approx(model_of(asked).seconds(call).total, rel=0.02)


class TimedTogether(DelegatingCostModel):
    """A cost model whose prefills and decode steps of one round are one pass."""

    def has_mixed_batches(self, query: StageQuery) -> bool:
        return query.stage.generates


def test_rounds_are_shared_where_the_cost_model_says_so() -> None:
    facts, choice = small_facts(), Choice(Layout(), Schedule(generation_slots=4))
    query = query_for_choice(facts, PPO_GRAPH.by_name["actor_generate"], choice, deferral=0)
    assert not round_times(facts, query, model_of).has_mixed_batches
    times = round_times(facts, query, lambda facts: TimedTogether(model_of(facts)))
    assert times.has_mixed_batches
    rows, tokens = np.full(2, 3.0), np.full(2, 40.0)
    alone, beside = times.refill(rows, tokens, np.array([False, True]), np.full(2, 50.0))
    assert alone == times.prefill(rows[:1], tokens[:1])
    assert alone - beside == times.round_(np.array([1.0]), np.array([50.0]))


def test_more_rows_and_more_cached_tokens_never_take_less() -> None:
    facts, choice = small_facts(), Choice(Layout(), Schedule(generation_slots=8))
    times = round_times(
        facts, query_for_choice(facts, PPO_GRAPH.by_name["actor_generate"], choice, deferral=0), model_of
    )
    for grid in (times.prefill, times.round_):
        assert grid.rows.tolist() == [1, 2, 4, 8, 16]
        assert (np.diff(grid.seconds, axis=0) >= 0).all()
        assert (np.diff(grid.seconds, axis=1) >= -1e-12).all()
