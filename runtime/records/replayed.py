"""What a skipped batch does when it is trained on again. It needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class UpdateReplay:
    """One update of the batch: its metrics, and the rows whose own share of it is not finite."""

    rows: tuple[int, ...]
    metrics: Mapping[str, float]
    bad_rows: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BatchReplay:
    """What a skipped batch does to the weights that a checkpoint of its run has."""

    stage: str
    step: int
    weights_of_step: int
    """Of the newest checkpoint that is not newer than the batch; 0 also for the weights that the run began with."""
    reasons: tuple[str, ...]
    """Why the run skipped it."""
    updates: tuple[UpdateReplay, ...]
