"""Latencies of rewards and tools that a job does not state, filled in from a profile table or a plan.

A latency that the job states is never replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from meshwright.planner.environment.rewards import Reward, RewardLoad
from meshwright.planner.environment.tool import Tool
from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.environment.timed_calls import CallKey, TimedCalls
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.workload import Workload

_LATENCY_KEY = "latency_seconds"

D = TypeVar("D", Reward, ToolTurns)


def unstated_calls(rewards: Sequence[Reward], tool: Tool | None, workload: Workload) -> tuple[CallKey, ...]:
    """Return the keys of rewards and tools whose latency the job does not state."""
    calls = [reward_call_key(reward) for reward in rewards if not _is_stated(reward)]
    if tool and workload.turns and not _is_stated(workload.turns):
        calls.append(tool_call_key(tool))
    return tuple(dict.fromkeys(calls))


def reward_call_key(reward: Reward) -> CallKey:
    """Return the key of a reward's calls in a table."""
    return CallKey(kind="reward", target=str(reward.function or reward.url), batch_size=reward.batch_size)


def tool_call_key(tool: Tool) -> CallKey:
    """Return the key of a tool's calls in a table."""
    return CallKey(kind="tool", target=tool.function)


def from_table(
    rewards: Sequence[Reward], tool: Tool | None, workload: Workload, calls: Sequence[TimedCalls]
) -> dict[str, object]:
    """Return a job's `rewards` and `workload` with measured latencies where it states none."""
    latencies = {one.called: one.latency for one in calls}
    return {
        "rewards": tuple(_with_latency(reward, latencies.get(reward_call_key(reward))) for reward in rewards),
        "workload": _with_tool_latency(workload, latencies.get(tool_call_key(tool)) if tool else None),
    }


def from_plan(
    rewards: Sequence[Reward], workload: Workload, loads: Sequence[RewardLoad], planned: Workload
) -> dict[str, object]:
    """Return a job's `rewards` and `workload` with the measured latencies of a plan where it states none."""
    latencies = {load.name: _measured_or_none(load.latency_seconds) for load in loads}
    return {
        "rewards": tuple(_with_latency(reward, latencies.get(reward.name)) for reward in rewards),
        "workload": _with_tool_latency(
            workload, _measured_or_none(planned.turns.latency_seconds) if planned.turns else None
        ),
    }


def _with_tool_latency(workload: Workload, latency: LatencySpec | None) -> Workload:
    return workload.model_copy(update={"turns": _with_latency(workload.turns, latency)}) if workload.turns else workload


def _with_latency(document: D, latency: LatencySpec | None) -> D:
    if latency is None or _is_stated(document):
        return document
    return document.model_copy(update={_LATENCY_KEY: latency})


def _is_stated(document: Reward | ToolTurns) -> bool:
    return _LATENCY_KEY in document.model_fields_set


def _measured_or_none(latency: LatencySpec) -> LatencySpec | None:
    return latency if latency.measured else None
