"""Lengths from what was run: the directory of a run, or JSON lines that any trainer has written, a rollout in each.

A line is an object with the tokens of a prompt and of its response. Where the response is a list, it is of the turns of
a rollout, and what the tool told between them, with the seconds that it took, may be lists of one less. A key with dots
is one within another, as `usage.completion_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.planner.imports.agent_traces import AgentTrace
from meshwright.planner.plan.plan import read_plan
from meshwright.profiles.documents import parse
from meshwright.profiles.environment.seen_lengths import SeenLengths, as_seen
from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.observations import met, observe
from meshwright.profiles.trace import is_number, read_most_spans
from meshwright.profiles.values import json_value, read_text

FIELDS = MappingProxyType(
    {
        "prompt": "prompt_tokens",
        "response": "response_tokens",
        "result": "result_tokens",
        "latency": "latency_seconds",
    }
)
"""What is read of a line, and the key that it has unless another is named."""

_SIGNAL = "groups_with_signal"
"""The metric of a run that tells it."""

_OPTIONAL = ("result", "latency")
_MOST_TOKENS = 2**40


def parse_fields(texts: Sequence[str]) -> dict[str, str]:
    """The keys that `what=key` texts name. Raises BadInput for another form, and for what is not read."""
    named = {}
    for text in texts:
        what, _, key = text.partition("=")
        if not key:
            raise BadInput(f"--trace-field {text!r} is not of the form what=key, such as response=completion_length.")
        if what not in FIELDS:
            raise BadInput(f"--trace-field {text!r} names {what!r}, which is not read; {suggestion(what, FIELDS)}")
        named[what] = key
    return named


def read_lengths(trace: Path, keys: Mapping[str, str]) -> SeenLengths:
    """The lengths of the run in a directory, or of the lines of a file whose keys are these, or else those of FIELDS.

    Raises BadInput for a directory without a measured run, and naming the line for one that does not tell its lengths.
    """
    if not trace.is_dir():
        return _of_lines(trace, {**FIELDS, **keys})
    if keys:
        raise BadInput(f"--trace-field: {trace} is the directory of a run, whose trace has its own keys; leave it out.")
    plan = read_plan(trace / "plan.json")
    layouts = {placement.stage: placement.layout for placement in plan.placements}
    seen = observe(read_most_spans(trace / "trace.jsonl"), layouts, plan.graph, plan.facts.workload.batch_size)
    if seen.response_tokens is None:
        raise BadInput(f"the trace of {trace} tells no tokens; give the directory of a `meshwright run`.")
    found = as_seen(met(plan.facts.workload, seen))
    return found.model_copy(update={"groups_with_signal": _groups_with_signal(trace / "metrics.jsonl")})


def _groups_with_signal(path: Path) -> tuple[float, ...]:
    """Gives the share of groups with non-zero reward variance, of each step that a run tells it of."""
    if not path.exists():
        return ()
    lines = read_text(path, "metrics").splitlines()
    read = (json_value(line, f"metrics {path}, line {number}") for number, line in enumerate(lines, start=1))
    told = (line.get(_SIGNAL) for line in read if isinstance(line, dict))
    return tuple(float(share) for share in told if share is not None and _is_quantity(share) and share <= 1)


def _of_lines(path: Path, keys: Mapping[str, str]) -> SeenLengths:
    prompts, numbers, drawn, told, seconds, longest = [], [], [], [], [], 0
    has_turns = False
    for number, line in enumerate(read_text(path, "trace").splitlines(), start=1):
        if not line.strip():
            continue
        found = _Line(json_value(line, f"trace {path}, line {number}"), f"trace {path}, line {number}", keys)
        turns, results = found.tokens("response"), found.tokens("result")
        prompts += found.tokens("prompt")
        numbers.append(len(turns))
        drawn += turns
        told += results
        seconds += found.numbers("latency")
        longest = max(longest, sum(turns) + sum(results))
        has_turns = has_turns or found.has_turns
    if not prompts:
        raise BadInput(f"trace {path} has no rollouts; give a line of JSON for each.")
    trace = AgentTrace(tuple(prompts), tuple(numbers), tuple(drawn), tuple(told), tuple(seconds), longest)
    written = trace.workload()
    if not has_turns:
        del written["turns"]
    return parse(SeenLengths, json.dumps(written), f"trace {path}")


class _Line:
    """A rollout as a line has it; `told` begins the sentence about what is wrong with it."""

    def __init__(self, value: Any, told: str, keys: Mapping[str, str]) -> None:
        if not isinstance(value, dict):
            raise BadInput(f"{told} is no object; write one for each rollout, with its numbers of tokens.")
        self._value, self._told, self._keys = value, told, keys

    @property
    def has_turns(self) -> bool:
        return isinstance(self._at("response"), list)

    def tokens(self, what: str) -> list[int]:
        """One number of tokens, or one for each turn."""
        found = self.numbers(what)
        for number in found:
            if number != int(number) or not 1 <= number <= _MOST_TOKENS:
                raise BadInput(
                    f"{self._told}: {self._keys[what]} has {number:g}, which is no number of tokens; write whole "
                    "numbers of 1 or more, or leave the rollout out."
                )
        return [int(number) for number in found]

    def numbers(self, what: str) -> list[float]:
        found = self._at(what)
        if found is None and what in _OPTIONAL:
            return []
        if found is None:
            raise BadInput(
                f"{self._told} has no {self._keys[what]!r}; name the key that has it with --trace-field {what}=KEY."
            )
        several = found if isinstance(found, list) and what != "prompt" else [found]
        if (not several and what not in _OPTIONAL) or not all(map(_is_quantity, several)):
            raise BadInput(
                f"{self._told}: {self._keys[what]!r} is neither a number of 0 or more nor a list of them; name another "
                f"key with --trace-field {what}=KEY."
            )
        return [float(number) for number in several]

    def _at(self, what: str) -> Any:
        inside: Any = self._value
        for key in self._keys[what].split("."):
            inside = inside.get(key) if isinstance(inside, dict) else None
        return inside


def _is_quantity(number: Any) -> bool:
    return is_number(number) and not isinstance(number, bool) and number >= 0
