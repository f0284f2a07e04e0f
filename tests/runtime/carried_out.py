"""A run on ranks that a test has: from its first turn to its end, without checkpoints and evaluations."""

from __future__ import annotations

from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun


def carried_out(asked: RunRequest) -> RankRun:
    """The run when it has ended on this rank."""
    run = RankRun(asked)
    run.recorder.open(0)
    for turn in run.periods:
        run.run_period(turn)
    run.finish()
    run.close()
    return run
