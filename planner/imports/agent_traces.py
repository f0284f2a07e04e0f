"""A workload from recorded agent rollouts: JSON lines of chat messages.

A line is an object with `messages` (or `trajectory`, `history`) in OpenAI's chat format. Each message has a `role` and
a `content`, and may have a `timestamp` in seconds or as ISO 8601; an assistant's may have `tool_calls`. The messages
before the first one of the assistant are the prompt, each run of assistant messages is a turn, and the messages between
two turns are a tool result. The latency of a tool result lasts from the assistant's last message to the result's last
message. Tokens of the chat template are not counted.
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
from meshwright.profiles.values import DuplicateKeyError, load_json, read_text

_CONVERSATIONS = ("messages", "trajectory", "history")
_MAX_BINS = 64
"""Bins of a histogram; more distinct numbers are summarised by the means of equally likely parts."""


@dataclass(frozen=True)
class RolloutTrace:
    """Token counts of some rollouts: `prompts` and `numbers` (of turns) per rollout, `drawn` per turn, `told` per tool
    result, and `seconds` per tool result that has timestamps."""

    prompt_tokens: tuple[int, ...]
    num_turns: tuple[int, ...]
    turn_tokens: tuple[int, ...]
    tool_tokens: tuple[int, ...]
    latency_seconds: tuple[float, ...]
    max_tokens: int
    """Tokens of the longest rollout, without its prompt."""

    def workload(self) -> dict[str, Any]:
        """The lengths and turns as the `workload` of a job file."""
        latency = {"histogram": _histogram(self.latency_seconds)} if self.latency_seconds else {"fixed": 0.0}
        return {
            "prompt": _lengths(self.prompt_tokens),
            "response": _lengths(self.turn_tokens),
            "turns": {
                "number": _lengths(self.num_turns),
                "result": _lengths(self.tool_tokens or (1,)),
                "latency_seconds": latency,
                "max_tokens": max(self.max_tokens, *self.turn_tokens),
            },
        }


def read_agent_trace(path: Path, count_tokens: Callable[[str], int]) -> RolloutTrace:
    """Read the rollouts of a file; `count` returns the number of tokens of a text.

    Raises BadInput naming a malformed line, and for a file without a rollout.
    """
    prompts, numbers, turn_tokens, result_tokens, seconds, longest = [], [], [], [], [], 0
    for number, line in enumerate(read_text(path, "agent trace").splitlines(), start=1):
        if not line.strip():
            continue
        messages = list(_messages(line, f"agent trace {path}, line {number}"))
        parts = [(is_assistant, list(group)) for is_assistant, group in groupby(messages, lambda m: m.is_assistant)]
        turns = [index for index, (is_assistant, _) in enumerate(parts) if is_assistant]
        if not turns:
            raise BadInput(f"agent trace {path}, line {number} has no message of an assistant; leave it out.")
        sizes = [max(1, sum(count_tokens(message.text) for message in group)) for _, group in parts]
        prompts.append(sum(sizes[: turns[0]]) or 1)
        numbers.append(len(turns))
        turn_tokens += [sizes[index] for index in turns]
        result_tokens += [sizes[index] for index in range(turns[0] + 1, turns[-1], 2)]
        seconds += list(_latencies(parts, turns))
        longest = max(longest, sum(sizes[turns[0] : turns[-1] + 1]))
    if not prompts:
        raise BadInput(f"agent trace {path} has no rollouts; give a line of JSON for each.")
    return RolloutTrace(
        tuple(prompts), tuple(numbers), tuple(turn_tokens), tuple(result_tokens), tuple(seconds), longest
    )


@dataclass(frozen=True)
class _Message:
    is_assistant: bool
    text: str
    seconds: float | None
    """In seconds."""


def _messages(line: str, what: str) -> Iterator[_Message]:
    try:
        conversation = load_json(line)
        messages = next(conversation[name] for name in _CONVERSATIONS if name in conversation)
        for message in messages:
            calls = message.get("tool_calls")
            text = _text(message.get("content")) + (json.dumps(calls) if calls else "")
            yield _Message(message["role"] == "assistant", text, _seconds(message.get("timestamp")))
    except DuplicateKeyError as error:
        raise BadInput(f"{what}: {error}.") from None
    except (ValueError, TypeError, KeyError, AttributeError, StopIteration, RecursionError):
        raise BadInput(
            f"{what} is not a rollout; write an object with {' or '.join(_CONVERSATIONS)}, each message with a role "
            "and a content."
        ) from None


def _text(content: Any) -> str:
    """The text of a message whose content is a string, a list of parts, or nothing."""
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


def _latencies(parts: Sequence[tuple[bool, Sequence[_Message]]], turns: Sequence[int]) -> Iterator[float]:
    for index in turns[:-1]:
        called, answered = parts[index][1][-1].seconds, parts[index + 1][1][-1].seconds
        if called is not None and answered is not None and answered >= called:
            yield answered - called


def _lengths(numbers: Sequence[int]) -> dict[str, Any]:
    pairs = [(max(1, round(number)), weight) for number, weight in _histogram(numbers)]
    return {"max": max(numbers), "histogram": pairs}


def _histogram(numbers: Sequence[float]) -> list[tuple[float, float]]:
    """Each number with its count, or the means and sizes of equally likely parts."""
    ordered = sorted(numbers)
    if len(set(ordered)) <= _MAX_BINS:
        return [(number, len(list(equal))) for number, equal in groupby(ordered)]
    parts = (part.tolist() for part in np.array_split(np.array(ordered), _MAX_BINS))
    return [(round(statistics.fmean(part), 3), len(part)) for part in parts if part]
