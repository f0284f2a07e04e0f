"""The program of a worker process: it loads one function and answers batches of samples with scores or tool answers.

    python -m meshwright.runtime.environment.worker_process FUNCTION reward|tool PARENT

The process ends with its parent, and everything that the function has started ends with the process.

Batches and answers are lines of JSON. What the function prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Literal, NamedTuple, TypeAlias

from meshwright.runtime.environment.functions import load_function
from meshwright.runtime.environment.process_tree import fork_under_keeper
from meshwright.runtime.environment.samples import RewardSample, ToolCall

FunctionKind: TypeAlias = Literal["reward", "tool"]


class _KindSpec(NamedTuple):
    """The types of the samples and answers of a kind of function, and the word for its answers."""

    sample: Callable[[Mapping[str, Any]], RewardSample]
    answer: Callable[[Any], object]
    noun: str


_KINDS: Mapping[FunctionKind, _KindSpec] = {
    "reward": _KindSpec(RewardSample.from_message, float, "scores"),
    "tool": _KindSpec(ToolCall.from_message, str, "answers"),
}


def main() -> None:
    """Serve the function that the command line names until the input or the parent process ends."""
    name, kind, parent = sys.argv[1:]
    fork_under_keeper(int(parent))
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(name, sys.stdin, answers, "tool" if kind == "tool" else "reward")


def serve(name: str, batches: IO[str], answers: IO[str], kind: FunctionKind = "reward") -> None:
    """Report that the function is loaded, or why not, and then answer batches until there are no more."""
    try:
        function = load_function(name)
    except Exception as error:
        _answer(answers, error=_sentence(error))
        return
    _answer(answers, answers=[])
    for line in batches:
        samples = [_KINDS[kind].sample(message) for message in json.loads(line)]
        try:
            _answer(answers, answers=_answers(function, samples, _KINDS[kind]))
        except BaseException as error:  # an exit of the function must not end the worker
            _answer(answers, error=_sentence(error))


def _answers(function: Callable[[Any], Any], samples: Sequence[RewardSample], kind: _KindSpec) -> list[object]:
    answers = [kind.answer(answer) for answer in function(samples)]
    if len(answers) != len(samples):
        raise ValueError(f"{len(answers)} {kind.noun} for {len(samples)} samples")
    return answers


def _sentence(error: BaseException) -> str:
    """Return the exception as text; its own conversion to text may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _answer(file: IO[str], **message: object) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


if __name__ == "__main__":
    main()
