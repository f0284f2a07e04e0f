"""What is told of an adapter: what is trained, and whose weights the reference runs on."""

from __future__ import annotations

import html

import pytest

from meshwright.cost_models.cost import WEIGHTS
from meshwright.planner.analysis.optional_features import adapter_summary
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report.contents import Contents
from meshwright.planner.report.report import report
from meshwright.planner.simulation.simulate import simulate
from tests.planner.drawn import model_of
from tests.planner.jobs import adapted_facts, small_facts
from tests.planner.plans import random_plan

PLANS = [random_plan(seed, adapted_facts(small_facts(memory_bytes=2**50))) for seed in range(8)]


@pytest.mark.parametrize("plan", PLANS)
def test_the_reference_is_told_with_the_stage_whose_copy_it_uses_or_as_apart(plan: Plan) -> None:
    found, owner = adapter_summary(plan), plan.copy_of("ref_logprob")
    assert found is not None
    assert found.copy_bytes == plan.placement("ref_logprob").resident.amount(WEIGHTS)
    assert found.trained_params == plan.facts.models.actor.trainable_params
    if owner == "ref_logprob":
        assert (found.serves, found.own_copies) == ((), ("ref_logprob",))
    else:
        assert (found.serves, found.own_copies) == ((("ref_logprob", owner),), ())


def test_both_are_among_the_plans() -> None:
    assert {bool(adapter_summary(plan).serves) for plan in PLANS} == {True, False}  # type: ignore[union-attr]


def test_of_a_plan_without_an_adapter_nothing_is_told() -> None:
    assert adapter_summary(random_plan(0)) is None


def test_the_report_says_so() -> None:
    facts = adapted_facts(small_facts(memory_bytes=2**50))
    plan = random_plan(0, facts, model_of(facts))
    found = adapter_summary(plan)
    assert found is not None
    text = report(Contents(plan=plan, simulation=simulate(plan, steps=2, traced=True)))
    assert all(sentence in html.unescape(text) for sentence in found.sentences)
