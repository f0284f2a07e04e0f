"""The rewards and the tool of a job, which run on host workers or a remote service, and their latencies.

Latencies that the job does not state are filled in from a profile table or a plan; stated ones are never replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, TypeVar

from pydantic import Field, model_validator

from meshwright.profiles.documents import Document
from meshwright.profiles.environment.latency import CallKey, LatencySpec, TimedCalls
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.workload import Workload

BUILT_IN = ("exact_match", "maths_answer", "unit_tests")
"""Built-in reward functions, which every job may name; see `runtime.environment`."""

_NAME = "^[a-z][a-z0-9_]*$"
_FUNCTION = f"{', '.join(BUILT_IN)}, or module:function of a module that run is allowed to load"
_WORKERS = "concurrent calls for each replica of the generation; chosen by the plan if not given"
_RETRY = "total time for which failing calls of a judge are retried, with growing pauses"
_FAILURE = "score of a sample whose reward failed or timed out; the run ends if not given"
_LATENCY = "latency of one call"
_BATCH = "maximum number of samples of one call"


class Reward(Document):
    """A function in worker processes of the host, or a judge behind a URL."""

    name: str = Field(pattern=_NAME, max_length=40, description="name under which scores are recorded")
    function: str | None = Field(default=None, description=_FUNCTION)
    url: str | None = Field(default=None, pattern="^https?://", description="a judge that is called by HTTP POST")
    weight: float = Field(default=1.0, description="weight of its scores in the final scalar reward")
    workers: int | None = Field(default=None, gt=0, le=1024, description=_WORKERS)
    batch_size: int = Field(default=1, gt=0, le=1024, description=_BATCH)
    timeout_seconds: float = Field(default=10.0, gt=0, le=1e5, description="time limit of one call")
    retry_seconds: float = Field(default=600.0, ge=0, le=1e6, description=_RETRY)
    failure_score: float | None = Field(default=None, description=_FAILURE)
    latency_seconds: LatencySpec = Field(default=LatencySpec(fixed=0.01, assumed=True), description=_LATENCY)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.function is None) == (self.url is None):
            raise ValueError("give one of: function, or url")
        if self.function is not None and self.function not in BUILT_IN and not is_function_path(self.function):
            raise ValueError(
                f"function={self.function!r} is neither one of {', '.join(BUILT_IN)} nor of the form module:function"
            )
        return self

    @property
    def load(self) -> RewardLoad:
        """The properties that planning needs."""
        return RewardLoad(
            name=self.name,
            is_remote=self.url is not None,
            workers=self.workers,
            batch_size=self.batch_size,
            latency_seconds=self.latency_seconds,
        )


class RewardLoad(Document):
    """The load of a reward on its workers, as planning sees it; a remote reward needs no CPU of the host."""

    name: str
    is_remote: bool
    workers: int | None = Field(default=None, gt=0, le=1024, description=_WORKERS)
    batch_size: int = Field(gt=0, le=1024, description=_BATCH)
    latency_seconds: LatencySpec = Field(description=_LATENCY)


class HostWorkers(Document):
    """Concurrent calls that a plan gives a reward for each replica of the generation."""

    reward: str
    workers: int = Field(gt=0)


def require_unique_names(rewards: Sequence[Reward]) -> None:
    """Raises ValueError if two rewards have the same name."""
    names = [reward.name for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"rewards: the name {name} is given {names.count(name)} times; give each reward its own")


def is_function_path(function: str) -> bool:
    """True if the text has the form module:function."""
    module, _, name = function.partition(":")
    return name.isidentifier() and all(part.isidentifier() for part in module.split("."))


BUILT_IN_TOOLS = ("calculator",)
"""Built-in tools, which every job may name; see `runtime.environment`."""

_TOOL_FUNCTION = f"{', '.join(BUILT_IN_TOOLS)}, or module:function of a module that run is allowed to load"
_CALL_END = "the text that ends a call: a turn that completes it is answered by the tool, any other ends the rollout"
_TOOL_WORKERS = "concurrent calls for each replica of the generation"
_TOOL_FAILURE = "answer if the function failed or timed out; the run ends if not given"


class Tool(Document):
    """A tool that answers turns of a rollout; the next turn continues after its answer."""

    function: str = Field(description=_TOOL_FUNCTION)
    call_end: str = Field(default=">>", min_length=1, max_length=40, description=_CALL_END)
    workers: int = Field(default=4, gt=0, le=1024, description=_TOOL_WORKERS)
    timeout_seconds: float = Field(default=10.0, gt=0, le=1e5, description="time limit of one call")
    failure_answer: str | None = Field(default=None, description=_TOOL_FAILURE)

    @model_validator(mode="after")
    def _is_a_function(self) -> Self:
        if self.function not in BUILT_IN_TOOLS and not is_function_path(self.function):
            raise ValueError(
                f"function={self.function!r} is neither one of {', '.join(BUILT_IN_TOOLS)} nor of the form "
                "module:function"
            )
        return self


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
    latencies = {timed.called: timed.latency for timed in calls}
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
