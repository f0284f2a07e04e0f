"""What a search weighed, on a terminal: what was found is shown, and what was not asked for is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.analysis.explain import explain
from meshwright.planner.analysis.pareto import SizePoint
from meshwright.planner.analysis.runners_up import RunnerUp
from meshwright.planner.analysis.sensitivity import Sensitivity
from meshwright.planner.analysis.structures import Ranked
from meshwright.planner.analysis.whatif import Outlook
from meshwright.planner.plan.plan import Plan
from meshwright.runtime.commands import show_search
from meshwright.runtime.commands.show_search import Why
from tests.planner.jobs import small_facts
from tests.runtime.plans_by_hand import Where, plan_by_hand


def plan_on(num_ranks: int) -> Plan:
    return plan_by_hand(
        small_facts(ranks_per_node=num_ranks, batch_size=32, memory_bytes=2**40),
        {"other": Where(f"0:{num_ranks}", f"dp{num_ranks}")},
    )


def why(num_ranks: int = 2) -> Why:
    return Why(explanation=explain(plan_on(num_ranks)), held_back=(), sensitivities=())


def shown(capsys: pytest.CaptureFixture[str], found: Why) -> str:
    """What is printed, with single spaces."""
    show_search.why(found)
    return " ".join(capsys.readouterr().out.split())


def test_what_was_not_asked_for_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = why()
    text = shown(capsys, found)
    assert f"what a turn of {found.explanation.period_seconds:.3f} s waits for" in text
    assert "what each choice buys" not in text
    assert "other numbers of GPUs" not in text
    assert "what memory binds" not in text


def test_what_a_choice_buys_is_found_and_proven(capsys: pytest.CaptureFixture[str]) -> None:
    one = RunnerUp(
        stage="actor_train", choice="dp2", instead="tp2", period_seconds=3.0, delta_seconds=0.5, proven_seconds=0.25
    )
    none = replace(one, choice="0:2", instead="no plan", period_seconds=None, delta_seconds=None, proven_seconds=None)
    text = shown(capsys, replace(why(), runners_up=(one, none)))
    assert "actor_train dp2 tp2 - +0.500 +0.250" in text
    assert "actor_train 0:2 no plan - - -" in text


def test_a_size_without_a_plan_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    outlook = Outlook(
        step_seconds=2.0,
        tokens_per_second=1000.0,
        idle_share=0.1,
        headroom_bytes=0.0,
        host_bytes=2**30,
        gpu_hours=4.4,
        money=None,
    )
    there = SizePoint(num_ranks=8, outlook=outlook, is_on_front_of_gpus=True, is_on_front_of_money=False, broken=())
    missing = SizePoint(
        num_ranks=3, outlook=None, is_on_front_of_gpus=False, is_on_front_of_money=False, broken=("no whole node.",)
    )
    text = shown(capsys, replace(why(), sizes=(there, missing)))
    assert "8 2.000 1,000 0.0 1.0 4.4 - GPUs" in text
    assert "3 - - - - - - no plan" in text
    assert "3 ranks: no whole node." in text


def test_an_input_whose_change_breaks_the_placements_has_no_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    known = Sensitivity(name="batch size", factor=1.1, period_seconds=2.0, elasticity=0.5)
    unknown = Sensitivity(name="ranks", factor=2.0, period_seconds=None, elasticity=None, broken=("too many.",))
    text = shown(capsys, replace(why(), sensitivities=(known, unknown)))
    assert "batch size 10% 2.000 +0.50" in text
    assert "ranks 100% - the placements are not legal then" in text


def test_ranks_that_do_not_fit_a_terminal_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert "more ranks" not in shown(capsys, why(16))
    assert "and 16 more ranks; --json has them all." in shown(capsys, why(32))


def test_structures_are_told_by_where_they_differ_from_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    facts = small_facts(ranks_per_node=2, memory_bytes=2**40)
    best, other = (
        plan_by_hand(facts, {"other": Where("0:2", "dp2"), "actor_train": Where("0:2", layout)})
        for layout in ("dp2", "tp2")
    )
    rows = [Ranked(plan=best, simulated_seconds=1.0), Ranked(plan=other, simulated_seconds=2.0)]
    show_search.structures(rows, [Path("plan.json"), Path("plan.2.json")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("plan")]
    assert [line[0] for line in lines] == ["plan.json", "plan.2.json"]
    assert [line[1] for line in lines] == ["1.000", "2.000"]
    assert lines[0][-1] == "-"
    assert lines[1][-2:] == ["actor_train", "tp2,pp1,dp1"]
