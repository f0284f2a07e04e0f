"""Sample responses that a run keeps as text: a few every few steps, with their scores."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.profiles.run_logs import append_lines, log_files
from meshwright.runtime.records.run_lines import keep_steps_before, read_lines

SAMPLES = "samples.jsonl"
"""The file in the directory of a run; a long one is split into segments."""

SAMPLES_PER_STEP = 4


@dataclass(frozen=True, kw_only=True)
class KeptResponse:
    """A prompt and a response to it as text, and the score of the response before penalties."""

    step: int
    row: int
    prompt: str
    response: str
    score: float
    response_tokens: int
    truncated: bool


def write_samples(out: Path, samples: Iterable[KeptResponse]) -> None:
    """Append samples to those of a run."""
    append_lines(out / SAMPLES, (json.dumps(asdict(sample), sort_keys=True) + "\n" for sample in samples))


def drop_samples(out: Path, first_step: int) -> None:
    """Drop the samples from `first_step` on, whose steps will run again."""
    keep_steps_before(out / SAMPLES, first_step)


def last_samples(out: Path, number: int) -> tuple[KeptResponse, ...]:
    """Return the last `number` samples of a run, in order. Raises BadInput naming a line that is not a sample."""
    last: deque[KeptResponse] = deque(maxlen=number)
    for file in log_files(out / SAMPLES)[-2:]:
        last.extend(read_lines(file, _sample))
    return tuple(last)


def _sample(line: dict[str, Any]) -> KeptResponse:
    sample = KeptResponse(**line)
    if not isinstance(sample.prompt, str) or not isinstance(sample.response, str):
        raise TypeError
    return KeptResponse(**{**line, "score": float(sample.score)})
