"""What a run shows is what its last steps met, and a layout that was slow under an earlier plan stays so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from meshwright.planner.analysis.recorded_costs import mismatched_costs
from meshwright.planner.analysis.replan import RECENT_STEPS, observed_run, replan_and_simulate, replan_from_run
from meshwright.planner.compile import best_plan
from meshwright.planner.plan.cost_queries import cost_model_of, query_for_placement
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan, read_plan, write_plan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.trace import Span, write_spans
from tests.planner.jobs import small_facts

FACTS = small_facts(batch_size=8)


def planned(*pins: str) -> Plan:
    """The best plan under pins, which it does not keep when it is planned again."""
    found = best_plan(FACTS, cost_model_of(FACTS), pins=parse_pins(pins, FACTS.graph))
    assert isinstance(found, Plan)
    return found.model_copy(update={"pins": ()})


PLAN = planned("actor_train.layout=dp2")
OTHER = planned("actor_train.layout=tp2")


def seconds_of(plan: Plan) -> dict[str, float]:
    """Of each stage, as its equations have it."""
    return {p.stage: cost_model_of(plan.facts).seconds(query_for_placement(plan, p)).total for p in plan.placements}


def write_steps(
    plan: Plan, trace: Path, steps: range, times: Mapping[str, float] | None = None, response: float | None = None
) -> None:
    """What a run would leave behind whose stages take so many times what is predicted, 1 where nothing is said, and
    whose responses have so many tokens."""
    usual, rows = seconds_of(plan), plan.facts.workload.batch_size
    for step in steps:
        for p in plan.placements:
            tokens = {} if response is None else {"num_tokens": response * rows / p.layout.dp}
            for rank in plan.pool(p.pool).ranks:
                span = Span(
                    step=step,
                    instruction=p.stage,
                    kind="stage",
                    rank=rank,
                    start_seconds=0.0,
                    end_seconds=usual[p.stage] * (times or {}).get(p.stage, 1.0),
                    clock="measured",
                    facts=tokens if p.stage == "actor_generate" else {},
                )
                write_spans(trace, [span])


def run_of_two_plans(directory: Path, before: float, now: float) -> Path:
    """A run that has gone over from PLAN to OTHER, and how many times longer its actor trained under each of them than
    is predicted."""
    write_plan(directory / "plan-until-000004.json", PLAN)
    write_steps(PLAN, directory / "trace-until-000004.jsonl", range(4), {"actor_train": before})
    write_plan(directory / "plan.json", OTHER)
    write_steps(OTHER, directory / "trace.jsonl", range(4, 8), {"actor_train": now})
    return directory


def forget(directory: Path) -> Path:
    """The run without what it was under the plan before."""
    for path in directory.glob("*-until-*"):
        path.unlink()
    return directory


def test_the_last_steps_are_what_a_run_shows(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", PLAN)
    write_steps(PLAN, tmp_path / "trace.jsonl", range(30), {"critic_train": 9.0}, response=20.0)
    write_steps(PLAN, tmp_path / "trace.jsonl", range(30, 31 + RECENT_STEPS), response=60.0)
    shown = observed_run(PLAN, tmp_path)
    assert shown.facts.workload.response_lengths.mean == pytest.approx(60.0, rel=0.02)
    assert shown.facts.workload.response.max == FACTS.workload.response.max
    assert shown.factors["critic_train"] == pytest.approx(shown.factors["actor_train"], rel=0.05)


def test_a_layout_is_as_slow_as_it_was_when_the_run_had_it(tmp_path: Path) -> None:
    shown = observed_run(OTHER, run_of_two_plans(tmp_path, before=5.0, now=2.0))
    placement, usual = OTHER.placement("actor_train"), cost_model_of(FACTS)
    layouts = (PLAN.placement("actor_train").layout, placement.layout, Layout.parse("pp2"))
    calls = [query_for_placement(OTHER, placement.model_copy(update={"layout": layout})) for layout in layouts]
    times = [shown.model.seconds(call).total / usual.seconds(call).total for call in calls]
    assert times == pytest.approx([5.0, 2.0, 2.0])  # the last one is none that the run has had
    assert shown.model.lower_bound_seconds(calls[0].stage, calls[0].model, 2, 0) <= shown.model.seconds(calls[1]).total


def test_what_a_plan_costs_at_the_paces_of_a_run_is_verified_by_them(tmp_path: Path) -> None:
    plan = replan_from_run(OTHER, run_of_two_plans(tmp_path, before=5.0, now=2.0)).plan
    paces = {placement.stage: placement.pace for placement in plan.placements}
    assert paces["actor_train"] == pytest.approx(2.0)
    write_plan(tmp_path / "next.json", plan)
    assert mismatched_costs(read_plan(tmp_path / "next.json"), cost_model_of(plan.facts)) == ()
    hidden = tuple(placement.model_copy(update={"pace": 1.0}) for placement in plan.placements)
    told = mismatched_costs(plan.model_copy(update={"placements": hidden}), cost_model_of(plan.facts))
    assert any(sentence.startswith("actor_train: its cost") for sentence in told)


def test_a_plan_that_was_left_is_not_gone_back_to_for_what_it_promised(tmp_path: Path) -> None:
    found = replan_from_run(OTHER, run_of_two_plans(tmp_path, before=5.0, now=1.0))
    assert found.plan.placement("actor_train").layout != PLAN.placement("actor_train").layout
    forgetful = replan_from_run(OTHER, forget(tmp_path))
    assert forgetful.plan.placement("actor_train").layout == PLAN.placement("actor_train").layout


def test_a_plan_that_was_made_in_the_run_and_was_off_makes_another_less_credible(tmp_path: Path) -> None:
    run_of_two_plans(tmp_path, before=1.0, now=3.0)
    found = replan_from_run(OTHER, tmp_path)
    assert found.old_plan_seconds is not None
    assert found.relative_error == pytest.approx(1 - OTHER.period_seconds / found.old_plan_seconds, rel=1e-6)
    assert replan_from_run(OTHER, forget(tmp_path)).relative_error == 0.0


def test_a_faster_plan_is_simulated_beside_the_one_before_and_any_other_is_not(tmp_path: Path) -> None:
    run_of_two_plans(tmp_path, before=1.0, now=3.0)
    found = replan_and_simulate(OTHER, tmp_path)
    assert found.simulated is not None
    assert found.old_plan_seconds is not None
    assert found.simulated.old_plan_seconds == pytest.approx(found.old_plan_seconds, rel=0.02)  # lengths here are fixed
    assert found.simulated.seconds == pytest.approx(found.plan.period_seconds, rel=0.02)
    write_plan(tmp_path / "plan.json", found.plan)
    (tmp_path / "trace.jsonl").unlink()
    write_steps(found.plan, tmp_path / "trace.jsonl", range(4))
    assert replan_and_simulate(found.plan, tmp_path).simulated is None


def test_a_plan_that_was_left_before_a_whole_step_shows_nothing(tmp_path: Path) -> None:
    run_of_two_plans(tmp_path, before=1.0, now=1.0)
    (tmp_path / "trace-until-000004.jsonl").write_text("")
    assert observed_run(OTHER, tmp_path).relative_error == 0.0


def test_a_run_of_another_plan_is_refused(tmp_path: Path) -> None:
    run_of_two_plans(tmp_path, before=1.0, now=1.0)
    with pytest.raises(BadInput, match="is a run of another plan"):
        observed_run(PLAN, tmp_path)
