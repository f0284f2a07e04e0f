"""What a reward or a tool is given of a response, as a function and as a message have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeAlias


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """A prompt and a response to it. `id` is step/row of the prompt, `answer` what its line in the job's data has."""

    id: str
    prompt: str
    response: str
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    answer: str | None = None

    @property
    def message(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Self:
        """What `message` gave."""
        ids = {name: tuple(message[name]) for name in ("prompt_ids", "response_ids")}
        return cls(**{**message, **ids})


@dataclass(frozen=True, kw_only=True)
class ToolCall(RewardSample):
    """A rollout whose last turn calls a tool: `response` is all behind the prompt, and `drawn` what turn number `turn`
    has drawn of it."""

    turn: int
    drawn: str


ToolFunction: TypeAlias = Callable[[Sequence[ToolCall]], Sequence[str]]
"""Answers to some calls, in their order."""

RewardFunction: TypeAlias = Callable[[Sequence[RewardSample]], Sequence[float]]
"""Scores of some samples, in their order."""


class RewardError(Exception):
    """A call that gave no scores or no answer, and why."""
