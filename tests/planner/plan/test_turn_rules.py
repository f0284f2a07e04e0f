"""Multi-turn rollouts: which schedules of a generation they allow, and which are offered."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.job.job import Facts
from meshwright.planner.plan.layout_and_schedule_rules import schedule_rules, schedules
from meshwright.planner.plan.steps_ahead import SearchCase, synchronous
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE
from tests.planner.jobs import small_facts


def facts_with_turns(num_turns: int = 4, staleness: int = 3, **changes: Any) -> Facts:
    facts = small_facts()
    turns = ToolTurns.model_validate(
        {
            "number": {"max": num_turns, "fixed": num_turns},
            "result": {"max": 4, "fixed": 4},
            "max_tokens": 4 * facts.workload.max_tokens,
        }
    )
    workload = facts.workload.model_copy(update={"turns": turns, **changes})
    return facts.model_copy(update={"workload": workload, "staleness": staleness})


def broken(facts: Facts, **schedule: Any) -> tuple[str, ...]:
    asked = Schedule(generation_slots=1, **schedule)
    return schedule_rules(facts, facts.graph.by_name[GENERATE], Layout(), asked)


def offered(facts: Facts) -> set[tuple[int, int]]:
    case = SearchCase(ahead=synchronous(facts.graph), keeps_in_flight=True)
    found = schedules(facts, facts.graph.by_name[GENERATE], Layout(), case)
    return {(schedule.batches_in_flight, schedule.overcommit) for schedule in found}


@pytest.mark.parametrize(("num_turns", "staleness", "most"), [(4, 3, 4), (4, 1, 2), (3, 7, 2), (1, 7, 1), (9, 0, 1)])
def test_batches_in_flight_are_offered_within_the_staleness_and_the_number_of_turns(
    num_turns: int, staleness: int, most: int
) -> None:
    found = offered(facts_with_turns(num_turns, staleness))
    assert found == {(2**k, 0) for k in range(most.bit_length())}


def test_more_batches_in_flight_than_turns_are_refused() -> None:
    assert not broken(facts_with_turns(), batches_in_flight=4)
    assert "batches_in_flight=5 is more than the 4 turns of a rollout; use 4." in broken(
        facts_with_turns(), batches_in_flight=5
    )


def test_overcommit_is_refused_since_the_clock_would_select_the_samples() -> None:
    (sentence,) = broken(facts_with_turns(), overcommit=4)
    assert sentence == (
        "overcommit=4 trains first on the sequences that end first, and with multi-turn rollouts those are the ones "
        "whose tool answers fast, so that the clock would select the samples; use 0."
    )


def test_rollouts_that_are_selected_by_their_scores_end_in_the_period_that_starts_them() -> None:
    facts = facts_with_turns(best_of=2)
    assert offered(facts) == {(1, 0)}
    assert "batches_in_flight=2 is not supported with best_of; use 1." in broken(facts, batches_in_flight=2)
