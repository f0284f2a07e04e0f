"""Responses that a run keeps to be read: some of every few steps, with what they were paid."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.profiles.segments import append_lines, files_of
from meshwright.runtime.records.run_lines import keep_steps_before, read_lines

SAMPLES = "samples.jsonl"
"""The file in the directory of a run; a long one is cut into segments."""

SAMPLES_PER_STEP = 4


@dataclass(frozen=True, kw_only=True)
class KeptResponse:
    """A prompt and a response to it as texts, and the score that the response was paid before penalties."""

    step: int
    row: int
    prompt: str
    response: str
    score: float
    response_tokens: int
    truncated: bool


def write_samples(out: Path, samples: Iterable[KeptResponse]) -> None:
    """Appends them to those of a run."""
    append_lines(out / SAMPLES, (json.dumps(asdict(sample), sort_keys=True) + "\n" for sample in samples))


def drop_samples(out: Path, first_step: int) -> None:
    """Drops those of steps that will run again."""
    keep_steps_before(out / SAMPLES, first_step)


def last_samples(out: Path, most: int) -> tuple[KeptResponse, ...]:
    """The last samples of a run, in their order. Raises BadInput naming a line that is none."""
    found: deque[KeptResponse] = deque(maxlen=most)
    for file in files_of(out / SAMPLES)[-2:]:
        found.extend(read_lines(file, _sample))
    return tuple(found)


def _sample(line: dict[str, Any]) -> KeptResponse:
    sample = KeptResponse(**line)
    if not isinstance(sample.prompt, str) or not isinstance(sample.response, str):
        raise TypeError
    return KeptResponse(**{**line, "score": float(sample.score)})
