"""The report: all that a plan says is on one page, labelled with whose time it is, and nothing is fetched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.analysis.plan_summary import run_cost
from meshwright.planner.analysis.predicted_ranges import predicted_ranges
from meshwright.planner.plan.steps_ahead import StepsAhead, steps_ahead_patterns
from meshwright.planner.report.formatting import seconds
from meshwright.planner.report.report import report
from meshwright.planner.report.timelines import overview, period_timeline
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.uncertainty import Interval
from tests.planner.report.pages import Outline, contents_of, plan_of

SECTIONS = [
    "overview",
    "period",
    "timelines",
    "memory",
    "idle",
    "terms",
    "compared",
    "learning",
    "sizes",
    "proof",
    "facts",
]


@pytest.fixture(scope="module")
def page() -> str:
    return report(contents_of(plan_of(), "rehearsed", "measured"))


def test_every_section_is_on_the_page_and_in_its_contents(page: str) -> None:
    outline = Outline(page)
    assert [name for name in outline.ids if not name.startswith("hatch-")] == SECTIONS
    assert [value for name, value in outline.attributes if name == "href"] == [f"#{name}" for name in SECTIONS]


def test_a_predicted_number_has_its_range_where_it_is_known(page: str) -> None:
    assert "10th to the 90th percentile" not in page
    plan = plan_of()
    cost = run_cost(plan, 2.5, 100)
    ranges = predicted_ranges(plan, Interval(0.5 * plan.period_seconds, 2 * plan.period_seconds), cost)
    text = Outline(report(replace(contents_of(plan), cost=cost, ranges=ranges))).text
    assert any("10th to the 90th percentile" in part for part in text)
    assert f"{seconds(0.5 * plan.period_seconds)} to {seconds(2 * plan.period_seconds)}" in text
    assert cost.money is not None
    assert f"{0.5 * cost.money:,.2f} to {2 * cost.money:,.2f}" in text
    assert f"{0.5 * cost.gpu_hours:,.1f} to {2 * cost.gpu_hours:,.1f}" in text


def test_nothing_is_fetched_and_nothing_runs(page: str) -> None:
    outline = Outline(page)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(outline.names)
    assert {"src", "onclick", "onload"}.isdisjoint(name for name, _ in outline.attributes)
    assert "@import" not in page
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in outline.attributes


def test_every_clock_is_named_where_its_times_are(page: str) -> None:
    text = " ".join(Outline(page).text)
    for name in ("SIMULATED", "REHEARSAL", "MEASURED"):
        assert text.count(name) >= 2
    assert "it shows scheduling and messages, not computing" in text


def test_without_runs_only_the_simulation_is_shown() -> None:
    text = " ".join(Outline(report(contents_of(plan_of()))).text)
    assert "SIMULATED" in text
    assert "REHEARSAL" not in text
    assert "MEASURED" not in text


def test_the_same_contents_give_the_same_bytes(page: str) -> None:
    assert report(contents_of(plan_of(), "rehearsed", "measured")) == page


def test_names_that_a_user_gave_are_escaped() -> None:
    plan = plan_of()
    hostile = "</title><script>alert(1)</script>"
    actor = replace(plan.facts.models.actor, name=hostile)
    device = plan.facts.cluster.device.model_copy(update={"name": hostile, "source": hostile})
    facts = plan.facts.model_copy(
        update={
            "models": plan.facts.models.model_copy(update={"actor": actor}),
            "cluster": plan.facts.cluster.model_copy(update={"device": device}),
        }
    )
    contents = contents_of(plan.model_copy(update={"facts": facts, "pins": (hostile,)}), "measured")
    contents = replace(contents, runs=(replace(contents.runs[0], name=hostile),))
    text = report(contents)
    assert "<script" not in text
    assert "script" not in Outline(text).names


@pytest.mark.parametrize("ahead", steps_ahead_patterns(PPO_GRAPH, 2), ids=str)
def test_a_turn_says_on_which_step_each_stage_works_when_some_work_ahead(ahead: StepsAhead) -> None:
    plan = plan_of(3, ahead)
    text = Outline(report(contents_of(plan, "measured"))).text
    for picture in (overview(plan), period_timeline(plan)):
        told = " ".join(Outline(picture).text)
        for steps_ahead in set(ahead.values()) - {0}:
            assert f"step n+{steps_ahead}" in told
        assert ("step n+" in told) == any(ahead.values())
    for stage, steps_ahead in ahead.items():
        assert not steps_ahead or any(f"{stage} by {steps_ahead}" in part for part in text)
