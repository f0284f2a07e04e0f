"""Measured tables: timed on this machine, or corrected by a run."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from meshwright.planner.analysis.correct_table import Calibration, read_run
from meshwright.planner.analysis.correct_table import calibrate as calibrated
from meshwright.planner.plan.job import Facts, Job
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import require_valid
from meshwright.profiles.environment.timed_calls import TimedCalls
from meshwright.profiles.table import Table
from meshwright.runtime.api.given import Pathname, require_number

_SHARE_OF_CALLS = 0.1
"""The fraction of the measuring time that is spent on calls of rewards and tools."""


def profile(
    facts: Facts,
    output: Pathname,
    *,
    minutes: float = 2.0,
    device: str | None = None,
    fresh: bool = False,
    job: Job | None = None,
    directory: Pathname = ".",
    allow_modules: Sequence[str] = (),
) -> Table:
    """Time the job's kernel passes and collectives on this machine for about `minutes`; return and write the table.

    With the `job` of the facts, whose paths are relative to `directory`, calls of its rewards and its tool are timed
    first where it states no latency; functions may be built-in ones and those of `allow_modules`.

    A call that was interrupted is continued by the next one unless that is `fresh`; `num_missing` counts the remaining
    measurements. `device` is cpu or cuda, by default that of the job's cluster. It starts processes that import the
    program's main module, which therefore needs `if __name__ == "__main__":`.
    Raises BadInput when this machine is not one of the cluster's, when `output` was measured under other conditions,
    and when a reward or the tool does not answer.
    """
    require_number("minutes", minutes, minimum=0)
    from meshwright.runtime.profiling.calling import time_calls
    from meshwright.runtime.profiling.profiling import profile_job

    def calls(known: Sequence[TimedCalls]) -> Sequence[TimedCalls]:
        if job is None:
            return ()
        seconds = 60 * minutes * _SHARE_OF_CALLS
        return time_calls(job, Path(directory), known, seconds=seconds, allowed=allow_modules)

    return profile_job(facts, Path(output), minutes=minutes, kind=device, fresh=fresh, time_calls=calls)


def num_missing(facts: Facts, table: Table) -> int:
    """The number of measurements of the job's shapes that a table of this machine lacks, because its time was over."""
    from meshwright.runtime.profiling.profiling import num_missing as missing

    return missing(facts, table)


def calibrate(plan: Plan, run: Pathname, table: Table | None = None) -> Calibration:
    """Correct a table by what a run of this plan measured; the measurements stay, and corrections are added.

    `run` is the directory of the run, and `table` the one that the plan was made with, if any.
    Raises BadInput for a plan that breaks a rule, a run of another plan and a trace that was not measured.
    """
    require_valid(plan)
    return calibrated(plan, read_run(plan, Path(run)), table, date=datetime.date.today().isoformat())
