"""Two plans side by side: a plan does not differ from itself, and what differs is told of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.analysis.plan_comparison import StageComparison, StagePlacement, TermChange, compare_plans
from meshwright.planner.analysis.plan_summary import memory_parts
from meshwright.planner.job.whatif_settings import with_setting
from meshwright.planner.plan.pins import Ranks
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan


def test_a_plan_is_like_itself() -> None:
    plan = random_plan(0)
    found = compare_plans(plan, plan)
    assert found.difference.step_seconds == 0
    assert found.facts == ()
    assert all(row.one == row.other for row in found.stages)
    assert {row.stage for row in found.stages} == {placement.stage for placement in plan.placements}


def test_what_differs_is_told_of_both() -> None:
    facts = small_facts(memory_bytes=2**50)
    longer = with_setting(facts, {"workload.batch_size": 32})
    one, other = random_plan(0, facts, model_of(facts)), random_plan(1, longer, model_of(longer))
    found = compare_plans(one, other)
    assert found.difference.step_seconds == other.period_seconds - one.period_seconds
    assert [(fact.key, fact.one, fact.other) for fact in found.facts] == [("workload.batch_size", 16, 32)]
    for row in found.stages:
        assert row.one is not None
        assert row.other is not None
        assert (row.one.pool, row.other.pool) == (one.choice(row.stage, "pool"), other.choice(row.stage, "pool"))


def test_costs_of_other_tables_and_loose_proofs_are_told() -> None:
    plan = random_plan(0)
    measured = plan.model_copy(update={"digests": {**plan.digests, "profile": "0" * 64}})
    notes = compare_plans(plan, measured).notes
    assert any("different tables" in note for note in notes)
    assert any("not closer" in note for note in notes)
    proven = plan.model_copy(update={"solver": plan.solver.model_copy(update={"gap": 0.01})})
    assert compare_plans(proven, proven).notes == ()


def test_the_terms_of_a_stage_say_why_it_is_slower() -> None:
    facts = small_facts(memory_bytes=2**50)
    longer = with_setting(facts, {"workload.response.scale": 2})
    one = random_plan(0, facts, model_of(facts))
    other = random_plan(0, longer, model_of(longer))
    found = compare_plans(one, other)
    for row in found.stages:
        assert row.one is not None
        assert row.other is not None
        change = row.other.seconds - row.one.seconds
        assert sum(term.difference for term in row.terms) == pytest.approx(change, abs=0.0005 * (len(row.terms) + 4))
        assert [abs(term.difference) for term in row.terms] == sorted(
            (abs(term.difference) for term in row.terms), reverse=True
        )
    generate = next(row for row in found.stages if row.stage == "actor_generate")
    assert generate.sentence is None or generate.sentence in found.sentences


def test_a_stage_whose_choice_differs_says_how() -> None:
    placed = StagePlacement(pool=Ranks(0, 2), layout=Layout(dp=2), schedule=Schedule(), steps_ahead=0, seconds=1.0)
    terms = (TermChange(name="layers", one=0.5, other=1.0), TermChange(name="bubble", one=0.2, other=0.1))

    def sentence(other: StagePlacement) -> str | None:
        return StageComparison(stage="actor_train", one=placed, other=other, terms=terms).sentence

    slower = replace(placed, seconds=1.4)
    assert sentence(slower) == "actor_train: the same choice, +0.400 s, mostly layers +0.500 s."
    assert "tp2,pp1,dp1 instead of tp1,pp1,dp2" in (sentence(replace(slower, layout=Layout(tp=2))) or "")
    assert "on ranks 2-3 instead of 0-1" in (sentence(replace(slower, pool=Ranks(2, 2))) or "")
    assert "ahead by 1 steps instead of 0" in (sentence(replace(slower, steps_ahead=1)) or "")
    other_schedule = replace(slower, schedule=Schedule(micro_batch_size=4))
    assert "with another schedule" in (sentence(other_schedule) or "")
    assert "mostly bubble -0.100 s" in (sentence(replace(placed, seconds=0.9)) or "")
    only = StageComparison(stage="actor_train", one=placed, other=None)
    assert only.sentence == "actor_train is only in the first plan."


def test_memory_that_differs_is_that_of_the_fullest_ranks() -> None:
    facts = small_facts(memory_bytes=2**50)
    one, other = random_plan(0, facts, model_of(facts)), random_plan(1, facts, model_of(facts))
    found = compare_plans(one, other)
    for plan, bytes_of in ((one, lambda part: part.one_bytes), (other, lambda part: part.other_bytes)):
        parts = {(part.stage, part.what, part.stays): part.num_bytes for part in memory_parts(plan)}
        for part in found.memory:
            assert bytes_of(part) == parts.get((part.stage, part.what, part.stays), 0.0)
    assert compare_plans(one, one).memory == ()
    assert compare_plans(one, one).sentences == ()
