"""A workload from what agents have done: rollouts as JSON lines of chat messages.

A line is an object with `messages` (or `trajectory`, `history`), as OpenAI's chat format has them: each with a `role`
and a `content`, an assistant's with `tool_calls` perhaps, and with a `timestamp` in seconds or as ISO 8601. What stands
before the first message of the assistant is the prompt, each of the assistant's is a turn, and what stands between two
turns is an answer. An answer has taken the time from the message of the assistant before it to its own last message.
What a chat template puts around messages is not counted.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import DoubledKeyError, load_json, read_text

_CONVERSATIONS = ("messages", "trajectory", "history")
_MOST_PARTS = 64
"""Of a histogram; more numbers are told by the means of equally likely parts."""


@dataclass(frozen=True)
class AgentTrace:
    """Tokens of each part of some rollouts, and the seconds of the answers that have timestamps."""

    prompts: tuple[int, ...]
    numbers: tuple[int, ...]
    drawn: tuple[int, ...]
    told: tuple[int, ...]
    seconds: tuple[float, ...]
    longest: int
    """Tokens behind a prompt, at most."""

    def workload(self) -> dict[str, Any]:
        """The lengths of a job's workload, and its turns, as a job file has them."""
        latency = {"histogram": _histogram(self.seconds)} if self.seconds else {"fixed": 0.0}
        return {
            "prompt": _lengths(self.prompts),
            "response": _lengths(self.drawn),
            "turns": {
                "number": _lengths(self.numbers),
                "result": _lengths(self.told or (1,)),
                "latency_seconds": latency,
                "max_tokens": max(self.longest, *self.drawn),
            },
        }


def read_agent_trace(path: Path, count: Callable[[str], int]) -> AgentTrace:
    """The rollouts of a file; `count` gives the tokens of a text. Raises BadInput naming the line, and for a file
    without a rollout."""
    prompts, numbers, drawn, told, seconds, longest = [], [], [], [], [], 0
    for number, line in enumerate(read_text(path, "agent trace").splitlines(), start=1):
        if not line.strip():
            continue
        messages = list(_messages(line, f"agent trace {path}, line {number}"))
        parts = [(is_drawn, list(group)) for is_drawn, group in groupby(messages, lambda m: m.is_drawn)]
        turns = [place for place, (is_drawn, _) in enumerate(parts) if is_drawn]
        if not turns:
            raise BadInput(f"agent trace {path}, line {number} has no message of an assistant; leave it out.")
        sizes = [max(1, sum(count(message.text) for message in group)) for _, group in parts]
        prompts.append(sum(sizes[: turns[0]]) or 1)
        numbers.append(len(turns))
        drawn += [sizes[place] for place in turns]
        told += [sizes[place] for place in range(turns[0] + 1, turns[-1], 2)]
        seconds += list(_waits(parts, turns))
        longest = max(longest, sum(sizes[turns[0] : turns[-1] + 1]))
    if not prompts:
        raise BadInput(f"agent trace {path} has no rollouts; give a line of JSON for each.")
    return AgentTrace(tuple(prompts), tuple(numbers), tuple(drawn), tuple(told), tuple(seconds), longest)


@dataclass(frozen=True)
class _Message:
    is_drawn: bool
    text: str
    at: float | None
    """In seconds."""


def _messages(line: str, what: str) -> Iterator[_Message]:
    try:
        found = load_json(line)
        messages = next(found[name] for name in _CONVERSATIONS if name in found)
        for message in messages:
            calls = message.get("tool_calls")
            text = _text(message.get("content")) + (json.dumps(calls) if calls else "")
            yield _Message(message["role"] == "assistant", text, _seconds(message.get("timestamp")))
    except DoubledKeyError as error:
        raise BadInput(f"{what}: {error}.") from None
    except (ValueError, TypeError, KeyError, AttributeError, StopIteration, RecursionError):
        raise BadInput(
            f"{what} is no rollout; write an object with {' or '.join(_CONVERSATIONS)}, each message with a role and a "
            "content."
        ) from None


def _text(content: Any) -> str:
    """Gives the text of a message whose content is a text, parts of one, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)


def _seconds(timestamp: Any) -> float | None:
    if timestamp is None:
        return None
    if isinstance(timestamp, str):
        return datetime.datetime.fromisoformat(timestamp).timestamp()
    return float(timestamp)


def _waits(parts: Sequence[tuple[bool, Sequence[_Message]]], turns: Sequence[int]) -> Iterator[float]:
    for place in turns[:-1]:
        called, answered = parts[place][1][-1].at, parts[place + 1][1][-1].at
        if called is not None and answered is not None and answered >= called:
            yield answered - called


def _lengths(numbers: Sequence[int]) -> dict[str, Any]:
    pairs = [(max(1, round(number)), weight) for number, weight in _histogram(numbers)]
    return {"max": max(numbers), "histogram": pairs}


def _histogram(numbers: Sequence[float]) -> list[tuple[float, float]]:
    """Each number with how often it is there, or the means of equally likely parts."""
    ordered = sorted(numbers)
    if len(set(ordered)) <= _MOST_PARTS:
        return [(number, len(list(alike))) for number, alike in groupby(ordered)]
    parts = (part.tolist() for part in np.array_split(np.array(ordered), _MOST_PARTS))
    return [(round(statistics.fmean(part), 3), len(part)) for part in parts if part]
