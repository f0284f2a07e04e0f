"""Costs by their terms, the guesses among them marked."""

from __future__ import annotations

from meshwright.cost_models.cost import Cost, Source, Term
from meshwright.planner.plan.evaluate import evaluate, items, task_name_of
from meshwright.planner.report import formatting
from meshwright.planner.report.resource_sections import terms
from tests.planner.report.pages import Outline, plan_of, titles
from tests.seeds import seeds


def test_extrapolated_terms_are_hatched_and_named() -> None:
    plan = plan_of()
    assert "Extrapolated" not in terms(plan)
    guessed = Cost((Term("layers", 2.0), Term("long contexts", 3.0, Source.EXTRAPOLATED)))
    first, *others = plan.placements
    changed = evaluate(plan.model_copy(update={"placements": (first.model_copy(update={"cost": guessed}), *others)}))
    shown = terms(changed)
    assert f"beyond the measurements: {first.stage}." in shown
    assert f"url(#hatch-{formatting.colour(first.stage, plan.graph)})" in shown
    assert "long contexts 3.00 s (extrapolated)" not in shown  # the whole is as little trusted
    assert f"{first.stage}: long contexts 3.00 s, extrapolated" in titles(shown)


@seeds(2, all=5)
def test_every_term_of_every_task_has_a_box(seed: int) -> None:
    plan = plan_of(seed)
    told = titles(terms(plan))
    for item in items(plan):
        for term in item.cost.merged().terms:
            assert any(text.startswith(f"{task_name_of(item)}: {term.name} ") for text in told)


def test_tasks_are_told_in_the_order_of_their_start() -> None:
    plan = plan_of(1)
    text = Outline(terms(plan)).text
    shown = sorted((i for i in items(plan) if i.cost.total), key=lambda i: i.start_seconds)
    rows = [text.index(f"{item.cost.total:.3f}") for item in shown]
    assert rows == sorted(rows)
