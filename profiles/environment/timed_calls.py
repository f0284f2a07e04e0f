"""Calls of a job's rewards and of its tool that were timed on this machine, as a table keeps them."""

from __future__ import annotations

from collections import Counter
from typing import Literal, TypeAlias

from pydantic import Field, field_validator

from meshwright.profiles.documents import Document
from meshwright.profiles.environment.latency import LatencySpec, MeasuredCalls

CallKind: TypeAlias = Literal["reward", "tool"]


class Called(Document):
    """The key of the calls: what is called, and of how many samples at a time. A job's name of it does not count."""

    kind: CallKind
    target: str = Field(min_length=1, description="a function, or the URL of a judge")
    batch_size: int = Field(default=1, gt=0)


class TimedCalls(Document):
    """The seconds of each call that was answered, ascending, and how many were not."""

    called: Called
    seconds: tuple[float, ...] = Field(min_length=1, max_length=1024)
    num_failed: int = Field(default=0, ge=0)
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")

    @field_validator("seconds")
    @classmethod
    def _ascending(cls, found: tuple[float, ...]) -> tuple[float, ...]:
        if min(found) < 0:
            raise ValueError("a call takes 0 seconds or more")
        return tuple(sorted(found))

    @property
    def latency(self) -> LatencySpec:
        """Every call as likely as every other."""
        weights = Counter(self.seconds)
        measured = MeasuredCalls(num_calls=len(self.seconds), num_failed=self.num_failed, date=self.date)
        return LatencySpec(histogram=tuple((s, float(n)) for s, n in sorted(weights.items())), measured=measured)
