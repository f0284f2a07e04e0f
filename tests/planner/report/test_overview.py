"""The overview: a box for whatever takes time, on the ranks that it takes."""

from __future__ import annotations

import re

import pytest

from meshwright.planner.plan.evaluate import items
from meshwright.planner.plan.steps_ahead import StepsAhead, steps_ahead_patterns
from meshwright.planner.report.timelines import overview, works_ahead
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan
from tests.planner.report.pages import Outline, plan_of, titles
from tests.seeds import seeds


@seeds(2, all=5)
def test_the_overview_has_a_box_for_every_stage_and_refit(seed: int) -> None:
    plan = plan_of(seed)
    told = titles(overview(plan))
    for placement in plan.placements:
        assert any(text.startswith(f"{placement.stage} on ranks ") for text in told)
    for refit in plan.refits:
        assert not refit.cost.total or any(text.startswith(f"refit {refit.target} on ranks ") for text in told)


@seeds(2, all=5)
def test_boxes_are_as_many_as_the_plan_has_tasks_that_take_time(seed: int) -> None:
    plan = plan_of(seed)
    told = {text for text in titles(overview(plan)) if " on ranks " in text}  # ranks that lie apart have a box each
    assert len(told) == sum(item.end_seconds > item.start_seconds for item in items(plan))


@pytest.mark.parametrize("ahead", steps_ahead_patterns(PPO_GRAPH, 2), ids=str)
def test_a_plan_works_ahead_where_a_stage_does(ahead: StepsAhead) -> None:
    assert works_ahead(plan_of(3, ahead)) == any(ahead.values())


def test_of_many_nodes_some_share_a_label() -> None:
    plan = random_plan(7, small_facts(nodes=128, ranks_per_node=8, memory_bytes=2**50, batch_size=4096))
    labels = [text for text in Outline(overview(plan)).text if re.match(r"nodes? \d", text)]
    assert len(labels) <= 24
    assert labels[0] == "nodes 0-5"
    assert labels[-1].endswith("127")
