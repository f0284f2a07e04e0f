"""Latencies of rewards and of the tool that a job leaves open: those that a table has measured, or that a plan has.

A figure that the job states is never replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from meshwright.planner.environment.rewards import Reward, RewardLoad
from meshwright.planner.environment.tool import Tool
from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.environment.timed_calls import Called, TimedCalls
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.workload import Workload

_LATENCY = "latency_seconds"

D = TypeVar("D", Reward, ToolTurns)


def open_calls(rewards: Sequence[Reward], tool: Tool | None, workload: Workload) -> tuple[Called, ...]:
    """What is called without the job saying how long that takes."""
    found = [called_by(reward) for reward in rewards if not _is_stated(reward)]
    if tool and workload.turns and not _is_stated(workload.turns):
        found.append(called_of(tool))
    return tuple(dict.fromkeys(found))


def called_by(reward: Reward) -> Called:
    """What a table keeps the calls of a reward under."""
    return Called(kind="reward", target=str(reward.function or reward.url), batch_size=reward.batch_size)


def called_of(tool: Tool) -> Called:
    """What a table keeps the calls of a tool under."""
    return Called(kind="tool", target=tool.function)


def from_table(
    rewards: Sequence[Reward], tool: Tool | None, workload: Workload, calls: Sequence[TimedCalls]
) -> dict[str, object]:
    """A job's `rewards` and `workload` with the latencies that were measured, where it states none."""
    known = {one.called: one.latency for one in calls}
    return {
        "rewards": tuple(_filled(reward, known.get(called_by(reward))) for reward in rewards),
        "workload": _with_tool(workload, known.get(called_of(tool)) if tool else None),
    }


def from_plan(
    rewards: Sequence[Reward], workload: Workload, loads: Sequence[RewardLoad], planned: Workload
) -> dict[str, object]:
    """The same with those that a plan was made with, if they were measured."""
    known = {load.name: _measured(load.latency_seconds) for load in loads}
    return {
        "rewards": tuple(_filled(reward, known.get(reward.name)) for reward in rewards),
        "workload": _with_tool(workload, _measured(planned.turns.latency_seconds) if planned.turns else None),
    }


def _with_tool(workload: Workload, latency: LatencySpec | None) -> Workload:
    return workload.model_copy(update={"turns": _filled(workload.turns, latency)}) if workload.turns else workload


def _filled(document: D, latency: LatencySpec | None) -> D:
    if latency is None or _is_stated(document):
        return document
    return document.model_copy(update={_LATENCY: latency})


def _is_stated(document: Reward | ToolTurns) -> bool:
    return _LATENCY in document.model_fields_set


def _measured(latency: LatencySpec) -> LatencySpec | None:
    return latency if latency.measured else None
