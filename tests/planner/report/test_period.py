"""The predicted period: what is on the critical path is in full colour."""

from __future__ import annotations

from meshwright.planner.analysis.explain import explain
from meshwright.planner.plan.evaluate import items
from meshwright.planner.report.timelines import period_timeline
from tests.planner.report.pages import Outline, plan_of, titles
from tests.seeds import seeds


@seeds(2, all=5)
def test_every_task_that_takes_time_has_a_box_and_those_off_the_path_are_pale(seed: int) -> None:
    plan = plan_of(seed)
    drawn, shown = period_timeline(plan), [item for item in items(plan) if item.cost.total]
    path = {wait.task for wait in explain(plan).critical_path}
    assert len([text for text in titles(drawn) if " to " in text]) == len(shown)
    assert Outline(drawn).attributes.count(("class", "faint")) == len(shown) - len(path)


def test_the_table_tells_the_critical_path_with_its_reasons() -> None:
    plan = plan_of(2)
    text = Outline(period_timeline(plan)).text
    for wait in explain(plan).critical_path:
        assert wait.task in text
        assert wait.because in text
