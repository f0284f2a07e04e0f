"""The results of replaying a skipped batch. No torch is needed to read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class UpdateReplay:
    """One update of the batch: its metrics, and the rows whose own loss or gradient is not finite."""

    rows: tuple[int, ...]
    metrics: Mapping[str, float]
    bad_rows: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BatchReplay:
    """The replay of a skipped batch on the weights of a checkpoint of its run."""

    stage: str
    step: int
    weights_of_step: int
    """Step of the newest checkpoint that is not newer than the batch; 0 for the initial weights."""
    reasons: tuple[str, ...]
    """Reasons for which the run skipped the batch."""
    updates: tuple[UpdateReplay, ...]
