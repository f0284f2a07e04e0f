"""The samples that rewards and tools receive, the types of their functions, and the errors of their calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, TypeAlias


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """A prompt and a response. `id` is step/row of the prompt; `answer` is that of its row in the job's data.

    `messages` are those of a prompt that is a chat, each with role and content; a prompt of another form has none.
    """

    id: str
    prompt: str
    response: str
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    answer: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()

    def __getitem__(self, name: str) -> Any:
        """Return a field by name, so that `sample["response"]` is `sample.response`.

        Raises KeyError for an unknown name, naming the fields.
        """
        names = [field.name for field in fields(self)]
        if name not in names:
            raise KeyError(f"a sample has no {name!r}; it has {', '.join(names)}")
        return getattr(self, name)

    @property
    def message(self) -> dict[str, Any]:
        """The sample as plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Return the sample of a `message`."""
        lists = {name: tuple(message[name]) for name in ("prompt_ids", "response_ids", "messages")}
        return cls(**{**message, **lists})


@dataclass(frozen=True, kw_only=True)
class ToolCall(RewardSample):
    """A rollout whose last turn calls a tool.

    `response` is all text after the prompt, `sampled` the part of it that was sampled in turn number `turn`.
    """

    turn: int
    sampled: str


ToolFunction: TypeAlias = Callable[[Sequence[ToolCall]], Sequence[str]]
"""Returns the answers to calls, in their order."""

RewardFunction: TypeAlias = Callable[[Sequence[RewardSample]], Sequence[float]]
"""Returns the scores of samples, in their order."""


_MAX_FP32 = float(2**128 - 2**104)
"""The largest finite fp32 number; integers of any size are compared with it exactly."""
_MAX_REASON_CHARACTERS = 500
"""Length limit of a reason, since it may be untrusted text."""


class RewardError(Exception):
    """A call returned no scores or no answer; the argument is the reason."""


class TemporaryRewardError(RewardError):
    """A temporary failure: a retry of the call may succeed.

    `is_unreachable` is True if the server itself gave no answer: no connection, a timeout, or a proxy that cannot
    reach it."""

    def __init__(self, reason: str, *, is_unreachable: bool = False) -> None:
        super().__init__(reason)
        self.is_unreachable = is_unreachable


class JudgeUnreachableError(RewardError):
    """A call failed because the server is unreachable, whatever the samples are."""


def printable_reason(error: BaseException) -> str:
    """Return why a call failed as printable text, because the text of an exception may be untrusted."""
    reason = error.args[0] if isinstance(error, RewardError) and error.args else f"{type(error).__name__}: {error}"
    text = str(reason).encode("utf-8", "backslashreplace").decode()
    return "".join(
        character if character.isprintable() else f"\\x{ord(character):02x}"
        for character in text[:_MAX_REASON_CHARACTERS]
    )


def validate_scores(scores: Any, count: int) -> list[float]:
    """Return the scores as floats. Raises RewardError unless there are `count`, all finite in fp32."""
    if not isinstance(scores, list) or len(scores) != count:
        raise RewardError(f"the answer has no {count} scores")
    for score in scores:
        if not isinstance(score, int | float) or not abs(score) <= _MAX_FP32:
            raise RewardError("a score is not a finite number that fp32 holds")
    return [float(score) for score in scores]


def print_to_stderr(sentence: str) -> None:
    """Print a sentence on standard error, and ignore a standard error that is closed."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{sentence}\n")
