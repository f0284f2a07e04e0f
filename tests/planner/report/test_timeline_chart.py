"""Timelines of a plan by any clock: every rank where there are few, some of every pool where there are many."""

from __future__ import annotations

from meshwright.planner.report.report import report
from meshwright.planner.report.timelines import shown_ranks, timelines
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan
from tests.planner.report.pages import Outline, contents_of, plan_of, titles


def test_of_very_many_ranks_some_of_every_pool_are_shown() -> None:
    plan = random_plan(7, small_facts(nodes=128, ranks_per_node=8, memory_bytes=2**50, batch_size=4096))
    shown = shown_ranks(plan)
    assert len(shown) < 100
    assert shown == sorted(set(shown))
    assert all(set(pool.ranks) & set(shown) for pool in plan.pools)
    text = report(contents_of(plan))
    assert len(text) < 2**20
    assert f"{len(shown)} of the 1024 ranks are shown" in text
    assert shown_ranks(plan_of()) == [0, 1, 2, 3]


def test_the_first_step_warms_up_and_is_not_drawn() -> None:
    told = titles(timelines(contents_of(plan_of(), "measured")))
    steps = {text.partition(" of step ")[2].partition(" on ranks ")[0] for text in told if " of step " in text}
    first, *others = sorted(map(int, steps))
    assert others
    assert {f"end of step {step}" for step in (first, *others)} <= set(
        Outline(timelines(contents_of(plan_of(), "measured"))).text
    )


def test_every_run_has_a_picture_of_its_own_under_its_clock() -> None:
    text = Outline(timelines(contents_of(plan_of(), "rehearsed", "measured"))).text
    assert [word for word in text if word in ("SIMULATED", "REHEARSAL", "MEASURED")] == [
        "SIMULATED",
        "REHEARSAL",
        "MEASURED",
    ]


def test_messages_are_not_drawn() -> None:
    assert not [text for text in titles(timelines(contents_of(plan_of()))) if text.startswith(("send", "receive"))]
