"""A run that fails is started again from its last checkpoint, a bounded number of times and later each time.

Every node of a run does this by itself: a rank that is lost ends the run on all of them, and they meet again where they
met before. Whoever does not come is lost for good, and the run goes on without it, planned again. What the user has
done wrong, and what the user has ended, is not tried again.
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
from meshwright.runtime.records.restarts import Restart, steps_recorded, write_restart
from meshwright.runtime.records.stopped import Stopped

T = TypeVar("T")

_FIRST_SECONDS, _MOST_SECONDS = 1.0, 60.0
"""Before the first restart, and before any: each waits twice as long as the one before where no checkpoint came between
them."""


def with_restarts(
    launch: Callable[[RunRequest, Rendezvous], T], request: RunRequest, rendezvous: Rendezvous
) -> T | Stopped:
    """What the launch returns that comes to an end. Raises the RunFailed of the last one that may be tried."""
    in_a_row, before = 0, latest_step(request.out)
    for number in range(1, request.max_restarts + 1):
        try:
            return launch(request, rendezvous)
        except RunFailed as error:
            saved = latest_step(request.out)
            in_a_row, before = (in_a_row + 1 if saved == before else 1), saved
            restart = Restart(
                number=number,
                host=socket.gethostname(),
                reason=str(error),
                reached=steps_recorded(request.out),
                saved=saved or 0,
            )
            write_restart(request.out, restart)
            wait = seconds_before(in_a_row)
            sys.stderr.write(f"{restart.told}; starting again in {wait:.0f} s ({number} of {request.max_restarts})\n")
        if is_asked_within(wait):
            return Stopped(done=saved or 0, saved=saved)
        request, rendezvous = again(request, number), rendezvous.again(request.plan.facts.cluster.nodes)
    return launch(request, rendezvous)


def seconds_before(number: int) -> float:
    """The pause before a restart, counted from 1 behind the last checkpoint that was new."""
    return min(_MOST_SECONDS, _FIRST_SECONDS * 2.0 ** (number - 1))


def again(request: RunRequest, number: int) -> RunRequest:
    """The request to go on with, under the plan that the run had last."""
    written = request.out / "plan.json"
    plan = read_plan(written) if written.exists() else request.plan
    return replace(request, plan=plan, resume=latest_step(request.out) is not None, draw_again=False, restarts=number)
