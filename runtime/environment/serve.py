"""What a worker process does: it loads one function, and answers batches of samples: with scores, or as a tool.

    python -m meshwright.runtime.environment.serve FUNCTION reward|tool PARENT

It ends with its parent, and everything that the function has started ends with it.

Batches and answers are lines of JSON. What the function prints goes to the standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Literal, NamedTuple, TypeAlias

from meshwright.runtime.environment.functions import function_named
from meshwright.runtime.environment.keeping import keep
from meshwright.runtime.environment.samples import RewardSample, ToolCall

FunctionKind: TypeAlias = Literal["reward", "tool"]


class _Served(NamedTuple):
    """What a function is given, what of, and what it answers to each."""

    sample: Callable[[Mapping[str, Any]], RewardSample]
    answer: Callable[[Any], object]
    told: str


_KINDS: Mapping[FunctionKind, _Served] = {
    "reward": _Served(RewardSample.of, float, "scores"),
    "tool": _Served(ToolCall.of, str, "answers"),
}


def main() -> None:
    """Serves the function that the command line names, until its input or the parent process ends."""
    name, kind, parent = sys.argv[1:]
    keep(int(parent))
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(name, sys.stdin, answers, "tool" if kind == "tool" else "reward")


def serve(name: str, batches: IO[str], answers: IO[str], kind: FunctionKind = "reward") -> None:
    """Answers until there are no more batches; first that it is ready, or why not."""
    try:
        function = function_named(name)
    except Exception as error:
        _answer(answers, error=_sentence(error))
        return
    _answer(answers, answers=[])
    for line in batches:
        samples = [_KINDS[kind].sample(message) for message in json.loads(line)]
        try:
            _answer(answers, answers=_answers(function, samples, _KINDS[kind]))
        except BaseException as error:  # an exit of the function is none of the worker's
            _answer(answers, error=_sentence(error))


def _answers(function: Callable[[Any], Any], samples: Sequence[RewardSample], kind: _Served) -> list[object]:
    answers = [kind.answer(answer) for answer in function(samples)]
    if len(answers) != len(samples):
        raise ValueError(f"{len(answers)} {kind.told} for {len(samples)} samples")
    return answers


def _sentence(error: BaseException) -> str:
    """Whatever the exception makes of being asked what it says."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _answer(file: IO[str], **message: object) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


if __name__ == "__main__":
    main()
