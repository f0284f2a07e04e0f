"""Observed lengths, from the directory of a run or from JSON lines of any trainer, one rollout each.

A line is an object with the tokens of a prompt and of its response. A list of responses holds the turns of a rollout;
the tool tokens between them and the seconds of the tool's calls may be lists that are one shorter. A key with dots is
nested, as in `usage.completion_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.planner.imports.agent_traces import RolloutTrace
from meshwright.planner.plan.plan import read_plan
from meshwright.profiles.documents import parse
from meshwright.profiles.environment.seen_lengths import ObservedLengths, lengths_of_workload
from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.observations import observe, observe_workload
from meshwright.profiles.trace import is_finite_number, read_recent_spans
from meshwright.profiles.values import json_value, read_text

FIELDS = MappingProxyType(
    {
        "prompt": "prompt_tokens",
        "response": "response_tokens",
        "result": "result_tokens",
        "latency": "latency_seconds",
    }
)
"""The quantities read from a line, and the key of each unless the user names another."""

_SIGNAL = "groups_with_signal"
"""The metric of a run: the share of groups with non-zero reward variance."""

_OPTIONAL = ("result", "latency")
_MAX_TOKENS = 2**40


def parse_fields(texts: Sequence[str]) -> dict[str, str]:
    """Parse `what=key` texts. Raises BadInput for another form, and for a quantity that is not read."""
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
    layouts = {placement.stage: placement.layout for placement in plan.placements}
    seen = observe(read_recent_spans(trace / "trace.jsonl"), layouts, plan.graph, plan.facts.workload.batch_size)
    if seen.response_tokens is None:
        raise BadInput(f"the trace of {trace} has no tokens; give the directory of a `meshwright run`.")
    lengths = lengths_of_workload(observe_workload(plan.facts.workload, seen))
    return lengths.model_copy(update={"groups_with_signal": _groups_with_signal(trace / "metrics.jsonl")})


def _groups_with_signal(path: Path) -> tuple[float, ...]:
    """The share of groups with non-zero reward variance in each step that records it."""
    if not path.exists():
        return ()
    lines = read_text(path, "metrics").splitlines()
    metrics = (json_value(line, f"metrics {path}, line {number}") for number, line in enumerate(lines, start=1))
    shares = (line.get(_SIGNAL) for line in metrics if isinstance(line, dict))
    return tuple(float(share) for share in shares if share is not None and _is_quantity(share) and share <= 1)


def _read_lines(path: Path, keys: Mapping[str, str]) -> ObservedLengths:
    prompts, numbers, turn_tokens, result_tokens, seconds, longest = [], [], [], [], [], 0
    has_turns = False
    for number, line in enumerate(read_text(path, "trace").splitlines(), start=1):
        if not line.strip():
            continue
        rollout = _Line(json_value(line, f"trace {path}, line {number}"), f"trace {path}, line {number}", keys)
        turns, results = rollout.tokens("response"), rollout.tokens("result")
        prompts += rollout.tokens("prompt")
        numbers.append(len(turns))
        turn_tokens += turns
        result_tokens += results
        seconds += rollout.numbers("latency")
        longest = max(longest, sum(turns) + sum(results))
        has_turns = has_turns or rollout.has_turns
    if not prompts:
        raise BadInput(f"trace {path} has no rollouts; give a line of JSON for each.")
    trace = RolloutTrace(
        tuple(prompts), tuple(numbers), tuple(turn_tokens), tuple(result_tokens), tuple(seconds), longest
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
