"""Timed calls of rewards and tools, as a profile table stores them."""

from __future__ import annotations

from collections import Counter
from typing import Literal, TypeAlias

from pydantic import Field, field_validator

from meshwright.profiles.documents import Document
from meshwright.profiles.environment.latency import LatencySpec, MeasuredCalls

CallKind: TypeAlias = Literal["reward", "tool"]


class CallKey(Document):
    """The key of timed calls: the callee and the samples per call, independent of the name that a job gives it."""

    kind: CallKind
    target: str = Field(min_length=1, description="a function, or the URL of a judge")
    batch_size: int = Field(default=1, gt=0)


class TimedCalls(Document):
    """Seconds of each successful call, ascending, and the number of failed calls."""

    called: CallKey
    seconds: tuple[float, ...] = Field(min_length=1, max_length=1024)
    num_failed: int = Field(default=0, ge=0)
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")

    @field_validator("seconds")
    @classmethod
    def _ascending(cls, seconds: tuple[float, ...]) -> tuple[float, ...]:
        if min(seconds) < 0:
            raise ValueError("a call takes 0 seconds or more")
        return tuple(sorted(seconds))

    @property
    def latency(self) -> LatencySpec:
        """Empirical distribution of the calls, all equally likely."""
        weights = Counter(self.seconds)
        measured = MeasuredCalls(num_calls=len(self.seconds), num_failed=self.num_failed, date=self.date)
        return LatencySpec(histogram=tuple((s, float(n)) for s, n in sorted(weights.items())), measured=measured)
