"""What a reward or a tool is given of a response, as a function and as a message have it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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


_GREATEST = float(2**128 - 2**104)
"""The greatest number in fp32; whole numbers of any length are compared with it as they are."""
_MOST_CHARACTERS = 500
"""Of a reason: more of a stranger's text helps nobody."""


class RewardError(Exception):
    """A call that gave no scores or no answer, and why."""


class FailedForNowError(RewardError):
    """A call that may be answered when it is made again. `is_away` says that who was called gave no answer of its own:
    nobody listens, nothing came in time, or another server answered that it is not there."""

    def __init__(self, reason: str, *, is_away: bool = False) -> None:
        super().__init__(reason)
        self.is_away = is_away


class JudgeAwayError(RewardError):
    """A call that failed because who was called answers nobody, whatever the samples are."""


def reason_of(error: BaseException) -> str:
    """Why a call failed, as printable text: what an exception says may be a stranger's."""
    told = error.args[0] if isinstance(error, RewardError) and error.args else f"{type(error).__name__}: {error}"
    plain = str(told).encode("utf-8", "backslashreplace").decode()
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in plain[:_MOST_CHARACTERS])


def checked_scores(scores: Any, count: int) -> list[float]:
    """The scores as numbers. Raises RewardError unless there are so many, each of which fp32 holds."""
    if not isinstance(scores, list) or len(scores) != count:
        raise RewardError(f"the answer has no {count} scores")
    for score in scores:
        if not isinstance(score, int | float) or not abs(score) <= _GREATEST:
            raise RewardError("a score is not a finite number that fp32 holds")
    return [float(score) for score in scores]


def say(sentence: str) -> None:
    """On the standard error, where there is one that takes it."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{sentence}\n")
