"""A first answer while a search runs: the step time of the given plan's placements under the changed facts."""

from __future__ import annotations

import threading

from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import MeshwrightError
from meshwright.runtime.api.analyses import whatif
from meshwright.runtime.explorer.searches import Answer
from meshwright.runtime.explorer.source import Source
from meshwright.runtime.explorer.state import State


class Estimates:
    """The step times in seconds of the given placements under states, each computed once; None where they break a
    rule."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._seconds: dict[State, float | None] = {}
        self._lock = threading.Lock()

    def of(self, state: State, given: Answer | None) -> float | None:
        """The step time under a state without pins; None until the given plan is known."""
        if not state.settings or state.pins or given is None or not isinstance(given.outcome, Plan):
            return None
        with self._lock:
            if state.searched not in self._seconds:
                self._seconds[state.searched] = self._estimate(given.outcome, state)
            return self._seconds[state.searched]

    def _estimate(self, plan: Plan, state: State) -> float | None:
        try:
            (answer,) = whatif(plan, [state.values], self._source.table).answers
        except MeshwrightError:  # the search says why
            return None
        return answer.metrics.step_seconds if answer.metrics and answer.fits else None
