"""What a notebook shows of a document: a table with its numbers, in which every text is escaped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from meshwright import api
from meshwright.planner.analysis.plan_comparison import compare_plans
from meshwright.planner.analysis.sweep import sweep_of, sweep_point
from meshwright.planner.analysis.whatif import whatif
from meshwright.planner.search.no_plan import Limit, NoPlan
from meshwright.profiles.uncertainty import Interval
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan
from tests.planner.report.pages import Outline

ROOT = Path(__file__).parents[2]
HOSTILE = "<script>alert(1)</script>"


class Shown(Protocol):
    def _repr_html_(self) -> str: ...


def cells(document: Shown) -> list[str]:
    """The texts of what a notebook shows, which has no element but tables and paragraphs."""
    outline = Outline(document._repr_html_())
    assert set(outline.names) <= {"table", "thead", "tbody", "tr", "th", "td", "p"}
    return outline.text


def a_plan(seed: int = 0) -> api.Plan:
    facts = small_facts(memory_bytes=2**50)
    return random_plan(seed, facts, model_of(facts))


def test_a_plan_has_a_row_for_each_stage() -> None:
    plan = a_plan()
    text = cells(plan)
    assert f"A step takes {plan.period_seconds:.3f} s on {plan.facts.cluster.name}" in text[0]
    for placement in plan.placements:
        at = text.index(placement.stage)
        assert text[at + 2] == str(placement.layout)
        assert text[at + 4] == f"{placement.cost.total:.3f}"


def test_two_plans_are_columns_with_the_reasons_below() -> None:
    one, other = a_plan(0), a_plan(1)
    found = compare_plans(one, other)
    text = cells(found)
    assert text[text.index("step s") + 1 :][:2] == [f"{one.period_seconds:.3f}", f"{other.period_seconds:.3f}"]
    assert found.sentences
    assert set(found.sentences) <= set(text)


def test_a_sweep_has_its_points_from_the_cheapest_on() -> None:
    none = NoPlan(status="infeasible", limits=(Limit(stage=None, sentence=HOSTILE),), changes=(), rejected={})
    plan = a_plan()
    dear = plan.model_copy(update={"period_seconds": 3 * plan.period_seconds})
    outcomes = (none, dear, plan)
    points = [
        sweep_point({"staleness": number}, outcome, Interval(1.0, 2.0), price=2.0, num_steps=10)
        for number, outcome in enumerate(outcomes)
    ]
    text = cells(sweep_of(points, price=2.0, num_steps=10))
    assert [part for part in text if part.startswith("staleness=")] == ["staleness=2", "staleness=1", "staleness=0"]
    assert f"no plan: {HOSTILE}" in text
    assert text.count("on the front") == 1
    assert text[text.index("staleness=2") + 3 :][:2] == ["1.000", "2.000"]


def test_what_if_has_a_row_for_each_setting() -> None:
    plan = a_plan()
    answers = whatif(plan, [{"workload.batch_size": 32}, {"cluster.ranks_per_node": 1}], model_of)
    text = cells(answers)
    assert text[text.index("as planned") + 1] == f"{answers.baseline.step_seconds:.3f}"
    assert "workload.batch_size=32" in text
    refused = text[text.index("cluster.ranks_per_node=1") :]
    assert " ".join(answers.answers[1].violations) in refused
    assert HOSTILE in cells(replace(answers, notes=(HOSTILE,)))


@pytest.mark.parametrize("name", ["Plan", "PlanComparison", "Sweep", "WhatIf"])
def test_the_page_about_python_names_what_notebooks_show(name: str) -> None:
    assert hasattr(getattr(api, name), "_repr_html_")
    (line,) = [line for line in (ROOT / "docs" / "api.md").read_text().splitlines() if "**Notebooks.**" in line]
    assert f"`{name}`" in line
