"""A measured latency is taken where a job states none, and a job's own figure is never replaced."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.job.rewards_and_tools import Reward, Tool, from_plan, from_table, unstated_calls
from meshwright.profiles.environment.latency import CallKey, LatencySpec, TimedCalls
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.workload import Workload

OPEN = Reward(name="style", function="mine:style")
STATED = Reward(name="judge", url="http://judge/score", latency_seconds=LatencySpec(fixed=2.0))
TOOL = Tool(function="calculator")


def workload(**stated: Any) -> Workload:
    turns = ToolTurns(number=LengthSpec(max=3, fixed=2), result=LengthSpec(max=4, fixed=3), max_tokens=40, **stated)
    lengths = {"prompt": LengthSpec(max=8, fixed=8), "response": LengthSpec(max=8, fixed=8)}
    return Workload(batch_size=8, turns=turns, **lengths)


def timed(kind: Any, target: str, batch_size: int = 1) -> TimedCalls:
    called = CallKey(kind=kind, target=target, batch_size=batch_size)
    return TimedCalls(called=called, seconds=(0.1, 0.3), date="2026-11-25")


CALLS = (timed("reward", "mine:style"), timed("reward", "http://judge/score"), timed("tool", "calculator"))


def test_what_the_job_leaves_open_is_taken_from_the_table_and_what_it_states_is_kept() -> None:
    found: Any = from_table([OPEN, STATED], TOOL, workload(), CALLS)
    assert found["rewards"] == (OPEN.model_copy(update={"latency_seconds": CALLS[0].latency}), STATED)
    assert found["workload"].turns.latency_seconds == CALLS[2].latency


def test_a_tool_whose_latency_is_stated_keeps_it() -> None:
    stated = workload(latency_seconds=LatencySpec(fixed=0.0))
    assert from_table([], TOOL, stated, CALLS) == {"rewards": (), "workload": stated}


def test_calls_of_another_number_of_samples_are_not_its_own() -> None:
    of_eight = from_table([OPEN], None, workload(), [timed("reward", "mine:style", batch_size=8)])
    assert of_eight["rewards"] == (OPEN,)


def test_what_has_to_be_called_is_what_is_open() -> None:
    assert unstated_calls([OPEN, STATED], TOOL, workload()) == (CALLS[0].called, CALLS[2].called)
    assert unstated_calls([STATED], TOOL, workload(latency_seconds=LatencySpec(fixed=0.1))) == ()
    assert unstated_calls([], TOOL, Workload.model_validate({**dict(workload()), "turns": None})) == ()


@pytest.mark.parametrize("latency", [LatencySpec(fixed=5.0), CALLS[0].latency])
def test_of_a_plan_only_what_was_measured_stands_for_what_the_job_leaves_open(latency: LatencySpec) -> None:
    load = OPEN.model_copy(update={"latency_seconds": latency}).load
    [found] = from_plan([OPEN], workload(), [load], workload())["rewards"]  # type: ignore[misc]
    assert (found.latency_seconds == latency) == (latency.measured is not None)
