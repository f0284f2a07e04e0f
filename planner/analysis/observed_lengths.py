"""Observed lengths for a workload: from recorded agent rollouts, the directory of a run, or JSON lines of any trainer.

A line of an agent trace is an object with `messages` (or `trajectory`, `history`) in OpenAI's chat format. Each
message has a `role` and a `content`, and may have a `timestamp` in seconds or as ISO 8601; an assistant's may have
`tool_calls`. The messages before the first one of the assistant are the prompt, each run of assistant messages is a
turn, and the messages between two turns are a tool result. The latency of a tool result lasts from the assistant's
last message to the result's last message. Tokens of the chat template are not counted.

A line of any other trace is an object with the tokens of a prompt and of its response. A list of responses holds the
turns of a rollout; the tool tokens between them and the seconds of the tool's calls may be lists that are one shorter.
A key with dots is nested, as in `usage.completion_tokens`.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from meshwright.planner.analysis.trace_analysis import observe_run
from meshwright.planner.plan.plan import read_plan
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.observations import observe_workload
from meshwright.profiles.trace import is_finite_number, read_recent_spans
from meshwright.profiles.untrusted_text import DuplicateKeyError, json_value, load_json, read_text
from meshwright.profiles.workload import ObservedLengths, lengths_of_workload

_CONVERSATIONS = ("messages", "trajectory", "history")
_MAX_BINS = 64
"""Bins of a histogram; more distinct numbers are summarised by the means of bins of about equal counts."""


@dataclass(frozen=True)
class RolloutTrace:
    """Token counts of some rollouts: `prompt_tokens` and `num_turns` have an entry for each rollout, `turn_tokens` for
    each turn, `tool_tokens` for each tool result, and `latency_seconds` for each tool result that has timestamps."""

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
    """Read the rollouts of a file; `count_tokens` returns the number of tokens of a text.

    Raises BadInput naming a malformed line, and for a file without a rollout.
    """
    prompts, num_turns, turn_tokens, result_tokens, seconds, longest = [], [], [], [], [], 0
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
        num_turns.append(len(turns))
        turn_tokens += [sizes[index] for index in turns]
        result_tokens += [sizes[index] for index in range(turns[0] + 1, turns[-1], 2)]
        seconds += list(_latencies(parts, turns))
        longest = max(longest, sum(sizes[turns[0] : turns[-1] + 1]))
    if not prompts:
        raise BadInput(f"agent trace {path} has no rollouts; give a line of JSON for each.")
    return RolloutTrace(
        tuple(prompts), tuple(num_turns), tuple(turn_tokens), tuple(result_tokens), tuple(seconds), longest
    )


@dataclass(frozen=True)
class _Message:
    is_assistant: bool
    text: str
    seconds: float | None
    """The timestamp, in seconds since the epoch."""


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
    """Each distinct number with its count or, if there are too many, the mean and the size of each of _MAX_BINS bins of
    about equal counts."""
    ordered = sorted(numbers)
    if len(set(ordered)) <= _MAX_BINS:
        return [(number, len(list(equal))) for number, equal in groupby(ordered)]
    parts = (part.tolist() for part in np.array_split(np.array(ordered), _MAX_BINS))
    return [(round(statistics.fmean(part), 3), len(part)) for part in parts if part]


FIELDS = MappingProxyType(
    {
        "prompt": "prompt_tokens",
        "response": "response_tokens",
        "result": "result_tokens",
        "latency": "latency_seconds",
    }
)
"""The quantities read from a line, each with its key unless the user names another."""

_SIGNAL = "groups_with_signal"
"""The metric of a run: the share of groups with non-zero reward variance."""

_OPTIONAL = ("result", "latency")
_MAX_TOKENS = 2**40


def parse_fields(texts: Sequence[str]) -> dict[str, str]:
    """Parse texts of the form `what=key`. Raises BadInput for another form, and for a quantity that is not read."""
    named = {}
    for text in texts:
        what, _, key = text.partition("=")
        if not key:
            raise BadInput(f"--trace-field {text!r} is not of the form what=key, such as response=completion_length.")
        if what not in FIELDS:
            raise BadInput(f"--trace-field {text!r} names {what!r}, which is not read; {suggestion(what, FIELDS)}")
        named[what] = key
    return named


def read_lengths(trace: Path, keys: Mapping[str, str]) -> ObservedLengths:
    """Read the lengths of the run in a directory, or of a file of lines with these keys, by default those of FIELDS.

    Raises BadInput for a directory without a measured run, and naming the line for one without lengths.
    """
    if not trace.is_dir():
        return _read_lines(trace, {**FIELDS, **keys})
    if keys:
        raise BadInput(f"--trace-field: {trace} is the directory of a run, whose trace has its own keys; leave it out.")
    plan = read_plan(trace / "plan.json")
    observation = observe_run(plan, read_recent_spans(trace / "trace.jsonl"))
    if observation.response_tokens is None:
        raise BadInput(f"the trace of {trace} has no tokens; give the directory of a `meshwright run`.")
    lengths = lengths_of_workload(observe_workload(plan.facts.workload, observation))
    shares = _groups_with_signal(trace / "metrics.jsonl")
    return lengths.model_copy(update={"groups_with_signal": shares, "speculation": observation.speculation})


def _groups_with_signal(path: Path) -> tuple[float, ...]:
    """The share of groups with non-zero reward variance in each step that records it."""
    if not path.exists():
        return ()
    lines = read_text(path, "metrics").splitlines()
    metrics = (json_value(line, f"metrics {path}, line {number}") for number, line in enumerate(lines, start=1))
    shares = (line.get(_SIGNAL) for line in metrics if isinstance(line, dict))
    return tuple(float(share) for share in shares if share is not None and _is_quantity(share) and share <= 1)


def _read_lines(path: Path, keys: Mapping[str, str]) -> ObservedLengths:
    prompts, num_turns, turn_tokens, result_tokens, seconds, longest = [], [], [], [], [], 0
    has_turns = False
    for number, line in enumerate(read_text(path, "trace").splitlines(), start=1):
        if not line.strip():
            continue
        rollout = _Line(json_value(line, f"trace {path}, line {number}"), f"trace {path}, line {number}", keys)
        turns, results = rollout.tokens("response"), rollout.tokens("result")
        prompts += rollout.tokens("prompt")
        num_turns.append(len(turns))
        turn_tokens += turns
        result_tokens += results
        seconds += rollout.numbers("latency")
        longest = max(longest, sum(turns) + sum(results))
        has_turns = has_turns or rollout.has_turns
    if not prompts:
        raise BadInput(f"trace {path} has no rollouts; give a line of JSON for each.")
    trace = RolloutTrace(
        tuple(prompts), tuple(num_turns), tuple(turn_tokens), tuple(result_tokens), tuple(seconds), longest
    )
    workload = trace.workload()
    if not has_turns:
        del workload["turns"]
    return parse(ObservedLengths, json.dumps(workload), f"trace {path}")


class _Line:
    """One line with a rollout; `source` begins the error messages about it."""

    def __init__(self, value: Any, source: str, keys: Mapping[str, str]) -> None:
        if not isinstance(value, dict):
            raise BadInput(f"{source} is not an object; write one for each rollout, with its numbers of tokens.")
        self._value, self._source, self._keys = value, source, keys

    @property
    def has_turns(self) -> bool:
        return isinstance(self._lookup("response"), list)

    def tokens(self, what: str) -> list[int]:
        """The tokens of a quantity: one number, or one for each turn. Raises BadInput for a value that is not a number
        of tokens."""
        numbers = self.numbers(what)
        for number in numbers:
            if number != int(number) or not 1 <= number <= _MAX_TOKENS:
                raise BadInput(
                    f"{self._source}: {self._keys[what]} has {number:g}, which is not a number of tokens; write whole "
                    "numbers of 1 or more, or leave the rollout out."
                )
        return [int(number) for number in numbers]

    def numbers(self, what: str) -> list[float]:
        """The values of a quantity. Raises BadInput where the line lacks it or has no number of 0 or more."""
        value = self._lookup(what)
        if value is None and what in _OPTIONAL:
            return []
        if value is None:
            raise BadInput(
                f"{self._source} has no {self._keys[what]!r}; name the key that has it with --trace-field {what}=KEY."
            )
        values = value if isinstance(value, list) and what != "prompt" else [value]
        if (not values and what not in _OPTIONAL) or not all(map(_is_quantity, values)):
            raise BadInput(
                f"{self._source}: {self._keys[what]!r} is neither a number of 0 or more nor a list of them; name "
                f"another key with --trace-field {what}=KEY."
            )
        return [float(number) for number in values]

    def _lookup(self, what: str) -> Any:
        node: Any = self._value
        for key in self._keys[what].split("."):
            node = node.get(key) if isinstance(node, dict) else None
        return node


def _is_quantity(number: Any) -> bool:
    return is_finite_number(number) and not isinstance(number, bool) and number >= 0
