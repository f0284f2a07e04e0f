"""Steps with numbers that are not finite: detection, the batch saved for a replay, and when the run ends.

An update whose loss, metrics or gradient norm is not finite is skipped, and so are all updates of a step whose
experience is not finite. All ranks of a stage see the same numbers, so all skip the same updates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from meshwright.planner.job.algorithm_settings import LearningSettings
from meshwright.planner.job.job import DEFAULT_SETTINGS, settings_key
from meshwright.profiles.documents import parse, write_bytes_atomically
from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.profiles.untrusted_text import json_value, require_file
from meshwright.runtime.messages.experience import Experience, StepExperience, safetensors_bytes

SKIPPED = "skipped"
"""The directory of skipped batches, in the directory of a run."""

_MAX_BYTES = 2**36
"""Largest file of a skipped batch that is read."""

_MAX_FILES = 8
"""Number of skipped batches of a stage that are kept, the newest ones, so that a long run does not fill its disk."""


@dataclass(frozen=True, kw_only=True)
class SkippedBatch:
    """A batch whose updates a stage skipped, the reasons, and all that determines the updates besides the weights."""

    stage: str
    batch: StepExperience
    reasons: tuple[str, ...]
    settings: LearningSettings
    num_epochs: int
    num_minibatches: int
    importance_sampling: bool


class BadSteps:
    """The count of consecutive bad steps of one trained stage, on one rank."""

    def __init__(self, out: Path, *, limit: int, is_writer: bool) -> None:
        """After `limit` bad steps in a row the run ends. One rank of the stage is the writer of batches."""
        self._out, self._limit, self._is_writer = out, limit, is_writer
        self._num_consecutive = 0

    def record(self, outcome: SkippedBatch) -> None:
        """Records the outcome of a step; it has no reasons if no update was skipped.

        Raises RunFailed after too many bad steps in a row, on every rank of the stage.
        """
        if not outcome.reasons:
            self._num_consecutive = 0
            return
        self._num_consecutive += 1
        if self._is_writer:
            write_skipped(self._out, outcome)
        if self._num_consecutive == self._limit:
            steps = "a step" if self._limit == 1 else f"{self._limit} steps in a row"
            raise RunFailed(
                f"{outcome.stage} skipped updates in {steps}, the last in step {outcome.batch.step}: "
                f"{outcome.reasons[0]}; "
                f"the weights were left as they were and the batches are in {self._out / SKIPPED}: inspect them, then "
                "run again with --resume and another setting, or with a higher max_bad_steps"
            )


def non_finite_fields(batch: StepExperience) -> list[str]:
    """One sentence for each field of a batch that has numbers that are not finite."""
    reasons = []
    for field, rows in sorted(batch.experience.fields().items()):
        if torch.isfinite(torch.cat(tuple(rows.values()))).all():
            continue
        bad = [row for row, values in sorted(rows.items()) if not torch.isfinite(values).all()]
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        reasons.append(f"{field} of rows {', '.join(map(str, bad[:5]))}{more} are not finite")
    return reasons


def non_finite_metric(metrics: Mapping[str, float], update: int) -> str | None:
    """A sentence on the first metric of an update, counted from 0, that is not finite; None if all are."""
    bad = next((name for name, value in metrics.items() if not math.isfinite(value)), None)
    return f"{bad} of update {update} is {metrics[bad]}" if bad else None


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are finite, which JSON can hold."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def write_skipped(out: Path, skipped: SkippedBatch) -> Path:
    """Saves a batch in the directory of a run, as a safetensors file whose metadata has the rest; returns its path."""
    batch = skipped.batch
    tensors = batch.experience.to_tensors(batch.experience.fields(), batch.step)
    metadata = {
        "stage": skipped.stage,
        "reasons": json.dumps(skipped.reasons),
        "algorithm": settings_key(skipped.settings),
        "settings": skipped.settings.model_dump_json(),
        "updates": json.dumps([skipped.num_epochs, skipped.num_minibatches, int(skipped.importance_sampling)]),
    }
    directory = out / SKIPPED
    directory.mkdir(exist_ok=True)
    path = directory / f"step-{batch.step:06d}-{skipped.stage}.safetensors"
    write_bytes_atomically(path, safetensors_bytes(tensors, metadata))
    for old in sorted(directory.glob(f"step-*-{skipped.stage}.safetensors"))[:-_MAX_FILES]:
        old.unlink()
    return path


def read_skipped(path: Path) -> SkippedBatch:
    """Reads a batch that `write_skipped` wrote. Raises BadInput for any other file."""
    require_file(path, "batch", _MAX_BYTES)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is not a mapping
        experience = Experience()
        step = experience.put_tensors(tensors)
        kind = type(DEFAULT_SETTINGS[metadata["algorithm"]])
        num_epochs, num_minibatches, importance_sampling = map(int, json_value(metadata["updates"], "updates"))
        return SkippedBatch(
            stage=metadata["stage"],
            batch=StepExperience(step=step, rows=range(len(experience.rows("tokens"))), experience=experience),
            reasons=tuple(map(str, json_value(metadata["reasons"], "reasons"))),
            settings=parse(kind, metadata["settings"], f"{path.name}: settings"),
            num_epochs=num_epochs,
            num_minibatches=num_minibatches,
            importance_sampling=bool(importance_sampling),
        )
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise BadInput(
            f"{path} is not a skipped batch of a run ({type(error).__name__}); give a file from a run's {SKIPPED} "
            "directory."
        ) from None
