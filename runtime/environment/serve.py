"""What a worker process does: it loads one function, and answers batches of samples with their scores.

    python -m meshwright.runtime.environment.serve FUNCTION PARENT

Batches and answers are lines of JSON. What the function prints goes to the standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import IO

from meshwright.planner.search.child_process import end_with
from meshwright.runtime.environment.functions import function_named
from meshwright.runtime.environment.samples import RewardFunction, RewardSample


def main() -> None:
    """Serves the function that the command line names, until its input or the parent process ends."""
    name, parent = sys.argv[1:]
    end_with(int(parent))
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(name, sys.stdin, answers)


def serve(name: str, batches: IO[str], answers: IO[str]) -> None:
    """Answers until there are no more batches; first that it is ready, or why not."""
    try:
        function = function_named(name)
    except Exception as error:
        _answer(answers, error=_sentence(error))
        return
    _answer(answers, scores=[])
    for line in batches:
        samples = [RewardSample.of(message) for message in json.loads(line)]
        try:
            _answer(answers, scores=_scores(function, samples))
        except Exception as error:
            _answer(answers, error=_sentence(error))


def _scores(function: RewardFunction, samples: Sequence[RewardSample]) -> list[float]:
    scores = [float(score) for score in function(samples)]
    if len(scores) != len(samples):
        raise ValueError(f"{len(scores)} scores for {len(samples)} samples")
    return scores


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _answer(answers: IO[str], **message: object) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
