"""Replay of a batch that a run skipped."""

from __future__ import annotations

from pathlib import Path

from meshwright.runtime.api.given import Pathname
from meshwright.runtime.records.replayed import BatchReplay


def replay(batch: Pathname) -> BatchReplay:
    """Train again on a batch that a run skipped, and report the rows that are not finite.

    The weights are those of the run's newest checkpoint before that batch. Nothing in the run changes. Raises BadInput
    for a file that is not such a batch, or that is not in the directory of its run.
    """
    from meshwright.runtime.execution.replay import replay_batch

    return replay_batch(Path(batch))
