"""A look from beside a run at whether another plan is better: in a process of its own, so that no step waits for it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from meshwright.planner.analysis.replan import Replanned
from meshwright.planner.analysis.shown import replan_and_simulate
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.child_process import end_with
from meshwright.profiles.errors import MeshwrightError
from meshwright.profiles.table import Table

_NICE = 10
"""What computes goes first."""


class Look:
    """One look, which begins at once and ends with this process at the latest."""

    def __init__(self, plan: Plan, directory: Path, table: Table | None) -> None:
        """The arguments are those of `replan_and_simulate`."""
        spawning = multiprocessing.get_context("spawn")
        self._told, tells = spawning.Pipe(duplex=False)
        arguments = tells, os.getpid(), plan, directory, table
        self._process = spawning.Process(target=_look, args=arguments, name="look", daemon=True)
        self._process.start()
        tells.close()

    @property
    def has_ended(self) -> bool:
        """Whether its answer, or that there is none, can be had without waiting."""
        return self._told.poll()

    def answer(self) -> Replanned | str:
        """What it found, or why it found nothing in a sentence; waits for it."""
        try:
            found: Replanned | str = self._told.recv()
        except EOFError:
            return "looking for another plan ended without an answer."
        return found

    def close(self) -> None:
        """Ends it, wherever it is."""
        self._process.kill()
        self._process.join()
        self._told.close()


def _look(tells: Connection, parent: int, plan: Plan, directory: Path, table: Table | None) -> None:
    """What the process does. Ranks block signals, for which a thread of theirs waits; this one has none."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    end_with(parent)
    os.nice(_NICE)
    found: Replanned | str
    try:
        found = replan_and_simulate(plan, directory, table)
    except MeshwrightError as error:
        found = str(error)
    tells.send(found)
