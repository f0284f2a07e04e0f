"""Drafts in plans: offered where the workload states their acceptance, and refused by name elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.layout_and_schedule_rules import schedule_rules, schedules
from meshwright.planner.plan.pin_files import pins_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import VLLM
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.speculation import Speculation
from meshwright.profiles.stages import GENERATE
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts

TURNS = ToolTurns.model_validate({"number": {"max": 2, "fixed": 2}, "result": {"max": 4, "fixed": 2}, "max_tokens": 24})


def draft_facts(*acceptance: float, **changes: Any) -> Facts:
    facts = small_facts()
    speculation = Speculation(acceptance=acceptance) if acceptance else None
    return facts.model_copy(
        update={"workload": facts.workload.model_copy(update={"speculation": speculation}), **changes}
    )


def sentences(facts: Facts, draft_tokens: int) -> tuple[str, ...]:
    schedule = Schedule(generation_slots=4, draft_tokens=draft_tokens)
    return schedule_rules(facts, facts.graph.by_name[GENERATE], Layout(), schedule)


def offered(facts: Facts) -> set[int]:
    stage = facts.graph.by_name[GENERATE]
    return {schedule.draft_tokens for schedule in schedules(facts, stage, Layout())}


def test_drafts_are_considered_only_where_their_acceptance_is_stated() -> None:
    assert offered(draft_facts()) == {0}
    assert offered(draft_facts(0.9)) == {0, 1}
    assert offered(draft_facts(*[0.9] * 5)) == {0, 2, 4}
    assert offered(draft_facts(*[0.9] * 8)) == {0, 2, 4, 8}
    workload = draft_facts(0.9).workload.model_copy(update={"speculation": Speculation(acceptance=(0.9,), drafted=0)})
    assert offered(draft_facts().model_copy(update={"workload": workload})) == {0}


def test_a_draft_without_a_stated_acceptance_is_refused() -> None:
    assert sentences(draft_facts(), 4) == (
        "draft_tokens=4 needs the share of drafts that are accepted, which the job does not state; give "
        "workload.speculation.acceptance, or use 0.",
    )
    with pytest.raises(BadInput, match=r"since draft_tokens=4 needs .*; give workload.speculation.acceptance, or use"):
        compile_plan(facts := draft_facts(), model_of(facts), pins=[f"{GENERATE}.draft_tokens=4"])
    assert sentences(draft_facts(0.5, 0.5), 4) == (
        "draft_tokens=4 is more than the 2 positions of workload.speculation.acceptance; use 2 at most.",
    )
    assert sentences(draft_facts(0.5, 0.5), 2) == ()


def test_what_does_not_go_with_drafts_is_named() -> None:
    plain = draft_facts(0.5, 0.5)
    with_turns = plain.model_copy(update={"workload": plain.workload.model_copy(update={"turns": TURNS})})
    for facts, reason in (
        (with_turns, "multi-turn rollouts"),
        (plain.model_copy(update={"engine": VLLM}), "engine vllm on a CPU, which is started without drafts"),
    ):
        assert f"draft_tokens=2 is not supported with {reason}; use 0." in sentences(facts, 2)
        assert offered(facts) == {0}


def test_drafts_are_only_for_the_stage_that_generates() -> None:
    facts = draft_facts(0.5, 0.5)
    found = schedule_rules(facts, facts.graph.by_name["ref_logprob"], Layout(), Schedule(draft_tokens=2))
    assert found == ("draft_tokens=2 on a stage that does not generate; use 0.",)


@pytest.mark.parametrize(("acceptance", "drafts"), [((0.95,) * 4, True), ((0.01,) * 4, False)])
def test_a_plan_drafts_where_that_is_faster(acceptance: tuple[float, ...], drafts: bool) -> None:
    facts = draft_facts(*acceptance)
    plan = compile_plan(facts, model_of(facts))
    assert isinstance(plan, Plan)
    chosen = plan.placement(GENERATE).schedule.draft_tokens
    assert (chosen > 0) == drafts
    assert verify(plan) == ()
    assert f"{GENERATE}.draft_tokens={chosen}" in pins_of(plan)


def test_a_plan_whose_drafts_nobody_stated_does_not_verify() -> None:
    facts = draft_facts(0.9, 0.9)
    plan = compile_plan(facts, model_of(facts))
    assert isinstance(plan, Plan)
    generation = plan.placement(GENERATE)
    forged = generation.model_copy(update={"schedule": replace(generation.schedule, draft_tokens=16)})
    placements = tuple(forged if p.stage == GENERATE else p for p in plan.placements)
    assert any(
        "draft_tokens=16 is more than the 2" in one
        for one in verify(plan.model_copy(update={"placements": placements}))
    )
