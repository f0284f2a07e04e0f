"""Background search for a better plan during a run, in a separate process, so that no step waits for it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from meshwright.planner.analysis.replan import Replanned, replan_and_simulate
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.child_process import end_with_process
from meshwright.profiles.errors import MeshwrightError
from meshwright.profiles.table import Table

_NICENESS = 10
"""The niceness of the search process; the run's own processes have priority."""


class BackgroundSearch:
    """One background search. It starts on construction and ends with this process at the latest."""

    def __init__(self, plan: Plan, directory: Path, table: Table | None) -> None:
        """The arguments are those of `replan_and_simulate`."""
        spawning = multiprocessing.get_context("spawn")
        self._receiver, sender = spawning.Pipe(duplex=False)
        arguments = sender, os.getpid(), plan, directory, table
        self._process = spawning.Process(target=_search_in_process, args=arguments, name="look", daemon=True)
        self._process.start()
        sender.close()

    @property
    def has_ended(self) -> bool:
        """True if `answer` returns without waiting."""
        return self._receiver.poll()

    def answer(self) -> Replanned | str:
        """Wait for the result; a string is a sentence on why there is none."""
        try:
            result: Replanned | str = self._receiver.recv()
        except EOFError:
            return "the search for another plan ended without an answer."
        return result

    def close(self) -> None:
        """Kill the search process."""
        self._process.kill()
        self._process.join()
        self._receiver.close()


def _search_in_process(sender: Connection, parent: int, plan: Plan, directory: Path, table: Table | None) -> None:
    """The main function of the search process. Ranks block SIGTERM for a thread that waits for it; this process has no
    such thread."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    end_with_process(parent)
    os.nice(_NICENESS)
    result: Replanned | str
    try:
        result = replan_and_simulate(plan, directory, table)
    except MeshwrightError as error:
        result = str(error)
    sender.send(result)
