"""Steps with numbers that are not finite: what is looked at, what is kept of them, and when a run ends for them.

An update whose loss, metrics or gradient norm are not finite is not done, nor any of a step whose experience is not,
scores among it. All ranks of a stage see the same numbers, so they skip alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from meshwright.planner.plan.job import DEFAULT_SETTINGS, settings_key
from meshwright.planner.plan.learning_settings import LearningSettings
from meshwright.profiles.documents import parse, write_bytes_atomically
from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.profiles.values import json_value, require_file
from meshwright.runtime.messages.experience import Experience
from meshwright.runtime.messages.packed_tensors import packed
from meshwright.runtime.messages.step_experience import StepExperience

SKIPPED = "skipped"
"""In the directory of a run: where batches of skipped updates go."""

_MOST_BYTES = 2**36
"""Of a file that is read."""

_MOST_KEPT = 8
"""Files of a stage that stay, the newest, so that a run of days does not fill its disk with them."""


@dataclass(frozen=True, kw_only=True)
class SkippedBatch:
    """A batch as a stage trained on it, why it skipped updates, and what the updates follow from beside the weights."""

    stage: str
    batch: StepExperience
    reasons: tuple[str, ...]
    settings: LearningSettings
    num_epochs: int
    num_minibatches: int
    weighs_draws: bool


class BadSteps:
    """Of one trained stage on one rank."""

    def __init__(self, out: Path, *, limit: int, is_writer: bool) -> None:
        """After `limit` bad steps in a row the run ends. One rank of the stage is the writer."""
        self._out, self._limit, self._is_writer = out, limit, is_writer
        self._in_a_row = 0

    def after(self, found: SkippedBatch) -> None:
        """Of every step, with no reasons where it was good.

        Raises RunFailed after too many bad ones in a row, on every rank of the stage alike.
        """
        if not found.reasons:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._is_writer:
            write_skipped(self._out, found)
        if self._in_a_row == self._limit:
            steps = "a step" if self._limit == 1 else f"{self._limit} steps in a row"
            raise RunFailed(
                f"{found.stage} skipped updates in {steps}, the last in step {found.batch.step}: {found.reasons[0]}; "
                f"the weights were left as they were and the batches are in {self._out / SKIPPED}: look at them, then "
                "run again with --resume and another setting, or with a higher max_bad_steps"
            )


def reasons_of(batch: StepExperience) -> list[str]:
    """What of a batch is not finite, a sentence for each field."""
    found = []
    for field, rows in sorted(batch.experience.fields().items()):
        if torch.isfinite(torch.cat(tuple(rows.values()))).all():
            continue
        bad = [row for row, values in sorted(rows.items()) if not torch.isfinite(values).all()]
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        found.append(f"{field} of rows {', '.join(map(str, bad[:5]))}{more} are not finite")
    return found


def reason_of(metrics: Mapping[str, float], update: int) -> str | None:
    """What of an update, counted from 0, is not finite."""
    bad = next((name for name, value in metrics.items() if not math.isfinite(value)), None)
    return f"{bad} of update {update} is {metrics[bad]}" if bad else None


def finite_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that can be written down."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def write_skipped(out: Path, found: SkippedBatch) -> Path:
    """Keeps a batch in the directory of a run, as a file of safetensors whose metadata says the rest."""
    batch = found.batch
    tensors = batch.experience.tensors(batch.experience.fields(), batch.step)
    metadata = {
        "stage": found.stage,
        "reasons": json.dumps(found.reasons),
        "algorithm": settings_key(found.settings),
        "settings": found.settings.model_dump_json(),
        "updates": json.dumps([found.num_epochs, found.num_minibatches, int(found.weighs_draws)]),
    }
    directory = out / SKIPPED
    directory.mkdir(exist_ok=True)
    path = directory / f"step-{batch.step:06d}-{found.stage}.safetensors"
    write_bytes_atomically(path, packed(tensors, metadata))
    for old in sorted(directory.glob(f"step-*-{found.stage}.safetensors"))[:-_MOST_KEPT]:
        old.unlink()
    return path


def read_skipped(path: Path) -> SkippedBatch:
    """What `write_skipped` wrote. Raises BadInput for any other file."""
    require_file(path, "batch", _MOST_BYTES)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        experience = Experience()
        step = experience.take(tensors)
        kind = type(DEFAULT_SETTINGS[metadata["algorithm"]])
        num_epochs, num_minibatches, weighs_draws = map(int, json_value(metadata["updates"], "updates"))
        return SkippedBatch(
            stage=metadata["stage"],
            batch=StepExperience(step=step, rows=range(len(experience.rows("tokens"))), experience=experience),
            reasons=tuple(map(str, json_value(metadata["reasons"], "reasons"))),
            settings=parse(kind, metadata["settings"], f"{path.name}: settings"),
            num_epochs=num_epochs,
            num_minibatches=num_minibatches,
            weighs_draws=bool(weighs_draws),
        )
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise BadInput(
            f"{path} is no batch that a run has kept ({type(error).__name__}); name a file under {SKIPPED} of a run."
        ) from None
