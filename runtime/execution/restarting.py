"""Restarts of a failed run from its last checkpoint, a bounded number of times and with growing pauses.

Every node does this by itself: a lost rank ends the run on all nodes, and they meet again at the same rendezvous. A
node that does not return is lost for good, and the run continues without it under a new plan. Bad input and a run that
the user has stopped are not retried. A run that stops by itself to continue under another plan is restarted likewise.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from meshwright.planner.plan.plan import read_plan
from meshwright.profiles.errors import RunFailed
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.resume import latest_step
from meshwright.runtime.launch.interruption import stop_requested_within
from meshwright.runtime.launch.rendezvous import Rendezvous
from meshwright.runtime.records.restarts import Restart, read_restarts, steps_recorded, write_restart
from meshwright.runtime.records.stopped import NEXT_PLAN, Stopped

T = TypeVar("T")

_FIRST_SECONDS, _MAX_SECONDS = 1.0, 60.0
"""Pause before the first restart, and the longest pause; it doubles while no new checkpoint appears."""


def with_restarts(
    launch: Callable[[RunRequest, Rendezvous], T | Stopped], request: RunRequest, rendezvous: Rendezvous
) -> T | Stopped:
    """Launch the run until it ends or is asked to stop, and return what that launch returns.

    A run that stops to continue under another plan is started again at once and does not count as a failure. Raises
    the RunFailed of the last permitted attempt.
    """
    failures, in_a_row, previous = 0, 0, latest_step(request.out)
    number = max((one.number for one in read_restarts(request.out)), default=0)  # from before a manual --resume
    request = replace(request, restarts=number)
    while True:
        number, next_request, wait = number + 1, restart_request, 0.0
        try:
            outcome = launch(request, rendezvous)
            if not isinstance(outcome, Stopped) or not outcome.continues:
                return outcome
            next_request = next_plan_request
            sys.stderr.write(f"{read_restarts(request.out)[-1].message}\n")
        except RunFailed as error:
            if failures == request.max_restarts:
                raise
            failures, saved = failures + 1, latest_step(request.out)
            in_a_row, previous = (in_a_row + 1 if saved == previous else 1), saved
            wait = pause_seconds(in_a_row)
            message = _record_restart(request, number, str(error))
            sys.stderr.write(f"{message}; starting again in {wait:.0f} s ({failures} of {request.max_restarts})\n")
        if stop_requested_within(wait):
            saved = latest_step(request.out)
            return Stopped(done=saved or 0, saved=saved)
        request, rendezvous = next_request(request, number), rendezvous.next_attempt(request.plan.facts.cluster.nodes)


def _record_restart(request: RunRequest, number: int, reason: str) -> str:
    """Write the restart to the run's record and return its message."""
    restart = Restart(
        number=number,
        host=socket.gethostname(),
        reason=reason,
        reached=steps_recorded(request.out),
        saved=latest_step(request.out) or 0,
    )
    try:
        write_restart(request.out, restart)
    except OSError as error:  # the disk may be what failed
        return f"{restart.message} (not written down: {error.strerror})"
    return restart.message


def pause_seconds(number: int) -> float:
    """Return the pause before the `number`-th restart (from 1) since the last new checkpoint."""
    return min(_MAX_SECONDS, _FIRST_SECONDS * 2.0 ** (number - 1))


def restart_request(request: RunRequest, number: int) -> RunRequest:
    """Return the request that continues the run under its latest plan."""
    path = request.out / "plan.json"
    plan = read_plan(path) if path.exists() else request.plan
    return replace(request, plan=plan, resume=latest_step(request.out) is not None, resample=False, restarts=number)


def next_plan_request(request: RunRequest, number: int) -> RunRequest:
    """Return the request that continues the run under the plan that it has stopped for."""
    return replace(restart_request(request, number), plan=read_plan(request.out / NEXT_PLAN))
