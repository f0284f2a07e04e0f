"""The rewards of a job that run on host workers or a remote service, with or without a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from meshwright.profiles.documents import Document
from meshwright.profiles.environment.latency import LatencySpec

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
    latency_seconds: LatencySpec = Field(default=LatencySpec(fixed=0.01), description=_LATENCY)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.function is None) == (self.url is None):
            raise ValueError("give one of: function, or url")
        if self.function is not None and self.function not in BUILT_IN and not is_function_path(self.function):
            raise ValueError(f"function={self.function!r} is none of {', '.join(BUILT_IN)} and no module:function")
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
    """The load of a reward on its workers; a remote reward needs no CPU of the host."""

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
