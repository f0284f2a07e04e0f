"""A run that fails is started again from its last checkpoint, a bounded number of times and later each time.

Every node of a run does this by itself: a rank that is lost ends the run on all of them, and they meet again where they
met before. Whoever does not come is lost for good, and the run goes on without it, planned again. What the user has
done wrong, and what the user has ended, is not tried again. In the same way a run goes over to another plan, for which
it has stopped by itself.
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
from meshwright.runtime.launch.interruption import is_asked_within
from meshwright.runtime.launch.rendezvous import Rendezvous
from meshwright.runtime.records.restarts import Restart, read_restarts, steps_recorded, write_restart
from meshwright.runtime.records.stopped import NEXT_PLAN, Stopped

T = TypeVar("T")

_FIRST_SECONDS, _MOST_SECONDS = 1.0, 60.0
"""Before the first restart, and before any: each waits twice as long as the one before where no checkpoint came between
them."""


def with_restarts(
    launch: Callable[[RunRequest, Rendezvous], T | Stopped], request: RunRequest, rendezvous: Rendezvous
) -> T | Stopped:
    """What the launch returns that comes to an end, or is asked to stop. One that stops to go on under another plan is
    started again at once, and counts for none that failed. Raises the RunFailed of the last one that may be tried."""
    failures, in_a_row, before = 0, 0, latest_step(request.out)
    number = max((one.number for one in read_restarts(request.out)), default=0)  # before a resume by hand
    request = replace(request, restarts=number)
    while True:
        number, following, wait = number + 1, again, 0.0
        try:
            ended = launch(request, rendezvous)
            if not isinstance(ended, Stopped) or not ended.goes_on:
                return ended
            following = under_next_plan
            sys.stderr.write(f"{read_restarts(request.out)[-1].told}\n")
        except RunFailed as error:
            if failures == request.max_restarts:
                raise
            failures, saved = failures + 1, latest_step(request.out)
            in_a_row, before = (in_a_row + 1 if saved == before else 1), saved
            wait = seconds_before(in_a_row)
            told = _noted(request, number, str(error))
            sys.stderr.write(f"{told}; starting again in {wait:.0f} s ({failures} of {request.max_restarts})\n")
        if is_asked_within(wait):
            saved = latest_step(request.out)
            return Stopped(done=saved or 0, saved=saved)
        request, rendezvous = following(request, number), rendezvous.again(request.plan.facts.cluster.nodes)


def _noted(request: RunRequest, number: int, reason: str) -> str:
    """The restart that a failure leads to, in words, once it is written down."""
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
        return f"{restart.told} (not written down: {error.strerror})"
    return restart.told


def seconds_before(number: int) -> float:
    """The pause before a restart, counted from 1 behind the last checkpoint that was new."""
    return min(_MOST_SECONDS, _FIRST_SECONDS * 2.0 ** (number - 1))


def again(request: RunRequest, number: int) -> RunRequest:
    """The request to go on with, under the plan that the run had last."""
    written = request.out / "plan.json"
    plan = read_plan(written) if written.exists() else request.plan
    return replace(request, plan=plan, resume=latest_step(request.out) is not None, draw_again=False, restarts=number)


def under_next_plan(request: RunRequest, number: int) -> RunRequest:
    """The request to go on with, under the plan that the run has stopped for."""
    return replace(again(request, number), plan=read_plan(request.out / NEXT_PLAN))
