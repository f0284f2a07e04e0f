"""A batch that a run has skipped, trained on again."""

from __future__ import annotations

from pathlib import Path

from meshwright.runtime.api.given import Pathname
from meshwright.runtime.records.replayed import BatchReplay


def replay(batch: Pathname) -> BatchReplay:
    """Trains on a batch again that a run has skipped, and says which rows are not finite.

    The weights are those of the run's newest checkpoint from before. Nothing of the run changes. Raises BadInput for a
    file that is no such batch, or is not in the directory of its run.
    """
    from meshwright.runtime.execution.replay import replay_batch

    return replay_batch(Path(batch))
