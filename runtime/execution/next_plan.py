"""Whether a run goes on under another plan: looked at every few steps by rank 0, for all of them.

A run goes over where a step becomes faster by more than a search leaves open, as predicted and as simulated, and the
steps that are left earn what going over takes: moving, a checkpoint, and that processes start, as long as they have
taken in this very run. All of it is measured but the moving, so that no two runs need go over behind the same step.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Self

import torch.distributed as dist

from meshwright.planner.analysis.look import Look
from meshwright.planner.analysis.replan import Replanned
from meshwright.planner.plan.plan import write_plan
from meshwright.runtime.execution.agreement import Wish
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.records.restarts import Restart, steps_recorded, write_restart
from meshwright.runtime.records.stopped import NEXT_PLAN


class NextPlan:
    """Of rank 0, which asks behind every turn."""

    def __init__(self, request: RunRequest, first: int) -> None:
        """The run goes on from `first` updates."""
        self._request, self._first = request, first
        self._start_seconds: float | None = None
        self._look: Look | None = None
        self._found: Replanned | None = None
        self._has_asked, self._told = False, ""

    @classmethod
    def of(cls, request: RunRequest, first: int) -> Self | None:
        """Where this is rank 0 and the run is to be looked at."""
        return cls(request, first) if request.replan_every and dist.get_rank() == 0 else None

    def wish(self, done: int, checkpoint_seconds: float | None) -> Wish:
        """What rank 0 wishes behind a turn, after `done` updates, where the last checkpoint took so long. What one
        takes is tried once, where it is not known and decides."""
        now = time.monotonic()
        if self._start_seconds is None:
            self._start_seconds = now - self._request.launched
        if not self._told:
            self._found = self._found or self._looked(done)
        if self._found is None:
            return Wish()
        if checkpoint_seconds is None:
            asks, self._has_asked = not self._has_asked, True
            return Wish(save=asks)
        self._told = self._told or self._decided(self._found, self._request.steps - done, checkpoint_seconds)
        if not self._told:
            self._found = None
        return Wish(replan=bool(self._told))

    def leave(self, done: int) -> None:
        """Writes down the plan that was decided for, and why, where the run stops for it."""
        assert self._found is not None, "ranks go over without a plan"
        out, number = self._request.out, self._request.restarts + 1
        write_plan(out / NEXT_PLAN, self._found.plan)
        restart = Restart(
            number=number,
            host=socket.gethostname(),
            reason="",
            reached=steps_recorded(out),
            saved=done,
            planned_again=self._told,
        )
        write_restart(out, restart)

    def close(self) -> None:
        """Ends a look that is under way."""
        if self._look:
            self._look.close()
            self._look = None

    def _looked(self, done: int) -> Replanned | None:
        """A plan that is faster as things are, when a look has found one; begins a look where one is due."""
        if self._look is None:
            steps = done - self._first
            if steps > 1 and steps % self._request.replan_every == 0:
                self._look = Look(self._request.plan, self._request.out, self._request.table)
            return None
        if not self._look.has_ended:
            return None
        found = self._look.answer()
        self.close()
        if isinstance(found, str):
            sys.stderr.write(f"not planned again behind step {done}: {found}\n")
            return None
        return found if found.earned_after(0.0) is not None else None

    def _decided(self, found: Replanned, left: int, checkpoint_seconds: float) -> str:
        """That the run goes over, and why; nothing where that is not earned in the steps that are left."""
        assert self._start_seconds is not None
        kept, new = found.kept_seconds, found.plan.period_seconds
        pause = checkpoint_seconds + max(0.0, self._start_seconds - (kept or 0.0))
        steps = found.earned_after(pause)
        if steps is None or steps >= left:
            return ""
        told = f"planned again for what it has met: a step is predicted to take {new:.3g} s"
        if kept is None:
            return f"{told}, and the plan before cannot go on: {found.broken}"
        return (
            f"{told} where the plan before takes {kept:.3g} s as things are{_simulated(found)}; going over takes "
            f"{pause + found.moving_seconds:.3g} s, earned back in {steps} of the {left} steps left"
        )


def _simulated(found: Replanned) -> str:
    one = found.simulated
    return f" (simulated: {one.seconds:.3g} s and {one.kept_seconds:.3g} s)" if one else ""
